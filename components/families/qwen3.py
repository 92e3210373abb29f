"""`model qwen3 { … }`: Qwen3 (Yang et al. 2025, arXiv 2505.09388)."""

from typing import ClassVar

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
class Qwen3(TransformerSettings):
    """`model qwen3 { … }`: as llama, with RMSNorm on queries and keys."""

    family: str = named("qwen3")
    has_qk_norm: ClassVar[bool] = True

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        return pre_norm(AttentionLayer("self_attn", qk_norm=arch.qk_norm), SwiGLULayer("mlp"))
