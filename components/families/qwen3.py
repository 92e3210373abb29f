"""`model qwen3 { … }`: Qwen3 (Yang et al. 2025, arXiv 2505.09388)."""

from collections.abc import Mapping
from typing import ClassVar

from attrs import frozen

from ...dsl.schema.component import named
from ...dsl.schema.model import FAMILIES, Resuming, TransformerSettings, attention_biases
from ...dsl.schema.model_config import (
    ATTENTION_BIAS,
    FULL_ATTENTION,
    HARMLESS,
    KEYS,
    OFF,
    ONLY,
    ConfigKey,
    ModelConfig,
)
from ...planner.architecture import Architecture
from ...planner.blocks.attention import AttentionLayer
from ...planner.blocks.block import BlockPiece
from ...planner.blocks.feed_forward import SwiGLULayer
from ...planner.blocks.norm import pre_norm
from ...planner.weights.stored import StoredNames


@FAMILIES.register()
@frozen
class Qwen3(TransformerSettings):
    """`model qwen3 { … }`: as llama, with RMSNorm on queries and keys."""

    family: str = named("qwen3")
    attention_bias: bool = attention_biases()
    has_qk_norm: ClassVar[bool] = True
    resuming: ClassVar[Mapping[str, Resuming]] = {
        **TransformerSettings.resuming,
        "attention_bias": "shape",
    }
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="qwen3",
        architectures=("Qwen3ForCausalLM",),
        keys=(
            *KEYS,
            ConfigKey("kv_heads", "num_key_value_heads", 32),
            ATTENTION_BIAS,
            ConfigKey("head_dim", "head_dim", 128),
            ConfigKey("ffn", "intermediate_size"),
        ),
        constant={"qk_norm": True},
        only={
            **ONLY,
            "use_sliding_window": OFF,
            "layer_types": FULL_ATTENTION,
        },
        # Of windows, which `use_sliding_window` turns on.
        harmless=HARMLESS | {"sliding_window", "max_window_layers"},
    )
    stored: ClassVar[StoredNames] = StoredNames()

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        bias = arch.own.get("attention_bias", False)
        return pre_norm(
            AttentionLayer("self_attn", qk_norm=arch.qk_norm, bias=bias, output_bias=bias), SwiGLULayer("mlp")
        )
