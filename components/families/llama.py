"""`model llama { … }`: Llama (Grattafiori et al. 2024, arXiv 2407.21783)."""

from attrs import frozen

from ...dsl.schema.component import named
from ...dsl.schema.model import FAMILIES, TransformerSettings
from ...planner.architecture import Architecture
from ...planner.blocks.attention import AttentionLayer
from ...planner.blocks.block import BlockPiece
from ...planner.blocks.feed_forward import SwiGLULayer
from ...planner.blocks.norm import pre_norm


@FAMILIES.register()
@frozen
class Llama(TransformerSettings):
    """`model llama { … }`: grouped-query attention, SwiGLU, RMSNorm before both."""

    family: str = named("llama")

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        return pre_norm(AttentionLayer("self_attn", qk_norm=arch.qk_norm), SwiGLULayer("mlp"))
