"""`model mixtral { … }`: Mixtral (Jiang et al. 2024, arXiv 2401.04088)."""

from attrs import frozen

from ...dsl.schema.component import named
from ...dsl.schema.model import FAMILIES, ExpertTransformer
from ...planner.architecture import Architecture
from ...planner.blocks.attention import AttentionLayer
from ...planner.blocks.block import BlockPiece
from ...planner.blocks.experts import ExpertsLayer
from ...planner.blocks.norm import pre_norm


@FAMILIES.register()
@frozen
class Mixtral(ExpertTransformer):
    """`model mixtral { … }`: as llama, with experts in place of the SwiGLU."""

    family: str = named("mixtral")

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        return pre_norm(AttentionLayer("self_attn", qk_norm=arch.qk_norm), ExpertsLayer("mlp"))
