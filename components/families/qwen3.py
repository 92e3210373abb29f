"""`model qwen3 { … }`: Qwen3 (Yang et al. 2025, arXiv 2505.09388)."""

from typing import Any, ClassVar

from attrs import frozen

from ...dsl.schema.component import named
from ...dsl.schema.model import FAMILIES, TransformerSettings
from ...dsl.schema.model_config import HARMLESS, KEYS, OFF, ONLY, ConfigKey, ModelConfig, Only
from ...planner.architecture import Architecture
from ...planner.blocks.attention import AttentionLayer
from ...planner.blocks.block import BlockPiece
from ...planner.blocks.feed_forward import SwiGLULayer
from ...planner.blocks.norm import pre_norm
from ...planner.weights.stored import StoredNames


def _no_window(layers: Any) -> bool:
    return layers is None or (isinstance(layers, list) and all(each == "full_attention" for each in layers))


@FAMILIES.register()
@frozen
class Qwen3(TransformerSettings):
    """`model qwen3 { … }`: as llama, with RMSNorm on queries and keys."""

    family: str = named("qwen3")
    has_qk_norm: ClassVar[bool] = True
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="qwen3",
        architectures=("Qwen3ForCausalLM",),
        keys=(
            *KEYS,
            ConfigKey("kv_heads", "num_key_value_heads", 32),
            ConfigKey("head_dim", "head_dim", 128),
            ConfigKey("ffn", "intermediate_size"),
        ),
        constant={"qk_norm": True},
        only={
            **ONLY,
            "attention_bias": OFF,
            "use_sliding_window": OFF,
            "layer_types": Only(fits=_no_window, words="full_attention in every layer"),
        },
        # Of windows, which `use_sliding_window` turns on.
        harmless=HARMLESS | {"sliding_window", "max_window_layers"},
    )
    stored: ClassVar[StoredNames] = StoredNames()

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        return pre_norm(AttentionLayer("self_attn", qk_norm=arch.qk_norm), SwiGLULayer("mlp"))
