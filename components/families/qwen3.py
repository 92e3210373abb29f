"""`model qwen3 { … }`: Qwen3 (Yang et al. 2025, arXiv 2505.09388)."""

from typing import ClassVar

from attrs import evolve

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, pre_norm
from xtrain.blocks.feed_forward import SwiGLULayer
from xtrain.contracts.models import PlannedModel, layer_windows
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import (
    FAMILIES,
    TransformerSettings,
    attention_biases,
    full_layers_setting,
    window_setting,
)
from xtrain.dsl.schema.model_config import (
    ATTENTION_BIAS,
    HARMLESS,
    ONLY,
    ConfigKey,
    LlamaCpp,
    ModelConfig,
    keys,
    later_layers,
    window_keys,
)
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


@FAMILIES.register()
@frozen
class Qwen3(TransformerSettings, PlannedModel):
    """`model qwen3 { … }`: llama with RMSNorm on queries and keys."""

    family: str = named("qwen3")
    attention_bias: bool = attention_biases()
    window: int | None = window_setting()
    full_layers: tuple[int, ...] = full_layers_setting()
    has_qk_norm: ClassVar[bool] = True
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="qwen3",
        architectures=("Qwen3ForCausalLM",),
        llama_cpp=LlamaCpp("qwen3"),
        keys=keys(
            ConfigKey("kv_heads", "num_key_value_heads", 32),
            ATTENTION_BIAS,
            ConfigKey("head_dim", "head_dim", 128),
            ConfigKey("ffn", "intermediate_size"),
            *window_keys(later_layers),
        ),
        constant={"qk_norm": True},
        only=ONLY,
        # Together these keys determine the layers with a window.
        harmless=HARMLESS | {"use_sliding_window", "max_window_layers"},
    )
    stored: ClassVar[StoredNames | None] = StoredNames()

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        bias = arch.own.get("attention_bias", False)
        attention = AttentionLayer("self_attn", qk_norm=arch.qk_norm, bias=bias, output_bias=bias)
        return tuple(pre_norm(evolve(attention, window=window), SwiGLULayer("mlp")) for window in layer_windows(arch))
