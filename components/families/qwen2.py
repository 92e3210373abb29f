"""`model qwen2 { … }`: Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv 2407.10671)."""

from typing import ClassVar

from attrs import frozen

from ...dsl.schema.component import named
from ...dsl.schema.model import FAMILIES, TransformerSettings
from ...dsl.schema.model_config import (
    FULL_ATTENTION,
    HARMLESS,
    KEYS,
    OFF,
    ONLY,
    ConfigKey,
    ModelConfig,
    head_width,
    query_heads,
)
from ...planner.architecture import Architecture
from ...planner.blocks.attention import AttentionLayer
from ...planner.blocks.block import BlockPiece
from ...planner.blocks.feed_forward import SwiGLULayer
from ...planner.blocks.norm import pre_norm
from ...planner.weights.stored import StoredNames


@FAMILIES.register()
@frozen
class Qwen2(TransformerSettings):
    """`model qwen2 { … }`: as llama, with biases on queries, keys and values."""

    family: str = named("qwen2")
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="qwen2",
        architectures=("Qwen2ForCausalLM",),
        keys=(
            *KEYS,
            ConfigKey("kv_heads", "num_key_value_heads", default=32, null=query_heads),
            ConfigKey("head_dim", "head_dim", default=head_width),
            ConfigKey("ffn", "intermediate_size"),
        ),
        constant={"qk_norm": False},
        only={**ONLY, "use_sliding_window": OFF, "use_mrope": OFF, "layer_types": FULL_ATTENTION},
        # Of windows, which `use_sliding_window` turns on.
        harmless=HARMLESS | {"sliding_window", "max_window_layers"},
    )
    stored: ClassVar[StoredNames] = StoredNames()

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        return pre_norm(AttentionLayer("self_attn", qk_norm=arch.qk_norm, bias=True), SwiGLULayer("mlp"))
