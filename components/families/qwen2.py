"""`model qwen2 { … }`: Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv 2407.10671)."""

from typing import ClassVar

from attrs import evolve

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, pre_norm
from xtrain.blocks.feed_forward import SwiGLULayer
from xtrain.contracts.models import PlannedModel, layer_windows
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import FAMILIES, TransformerSettings, full_layers_setting, window_setting
from xtrain.dsl.schema.model_config import (
    HARMLESS,
    OFF,
    ONLY,
    ConfigKey,
    LlamaCpp,
    ModelConfig,
    keys,
    later_layers,
    query_heads,
    window_keys,
)
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


@FAMILIES.register()
@frozen
class Qwen2(TransformerSettings, PlannedModel):
    """`model qwen2 { … }`: llama with biases on queries, keys and values."""

    family: str = named("qwen2")
    window: int | None = window_setting()
    full_layers: tuple[int, ...] = full_layers_setting()
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="qwen2",
        architectures=("Qwen2ForCausalLM",),
        llama_cpp=LlamaCpp("qwen2"),
        keys=keys(
            ConfigKey("kv_heads", "num_key_value_heads", default=32, null=query_heads),
            ConfigKey("ffn", "intermediate_size"),
            *window_keys(later_layers),
        ),
        constant={"qk_norm": False},
        only={**ONLY, "use_mrope": OFF},
        # Together these keys determine the layers with a window.
        harmless=HARMLESS | {"use_sliding_window", "max_window_layers"},
    )
    stored: ClassVar[StoredNames | None] = StoredNames()

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        attention = AttentionLayer("self_attn", qk_norm=arch.qk_norm, bias=True)
        return tuple(pre_norm(evolve(attention, window=window), SwiGLULayer("mlp")) for window in layer_windows(arch))
