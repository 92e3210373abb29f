"""`model qwen3_moe { … }`: Qwen3 with experts (Yang et al. 2025, arXiv 2505.09388)."""

from typing import ClassVar

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
class Qwen3Moe(ExpertTransformer):
    """`model qwen3_moe { … }`: as qwen3, with experts in place of the SwiGLU."""

    family: str = named("qwen3_moe")
    has_qk_norm: ClassVar[bool] = True

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        return pre_norm(AttentionLayer("self_attn", qk_norm=arch.qk_norm), ExpertsLayer("mlp"))
