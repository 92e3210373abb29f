"""`model smollm3 { … }`: SmolLM3 (Hugging Face 2025), of which some layers have no positions (Yang et al. 2025, arXiv
2501.18795)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from ...dsl.schema.component import named
from ...dsl.schema.model import FAMILIES, Resuming, TransformerSettings, attention_biases, mlp_biases
from ...dsl.schema.model_config import (
    ATTENTION_BIAS,
    FULL_ATTENTION,
    HARMLESS,
    KEYS,
    MLP_BIAS,
    OFF,
    ONLY,
    REFUSED,
    Config,
    ConfigKey,
    ModelConfig,
    Only,
    head_width,
    layer_count,
    query_heads,
)
from ...dsl.schema.setting import AUTO, Auto, not_negative, setting
from ...planner.architecture import Architecture
from ...planner.blocks.attention import AttentionLayer
from ...planner.blocks.block import BlockPiece
from ...planner.blocks.feed_forward import SwiGLULayer
from ...planner.blocks.norm import pre_norm
from ...planner.weights.stored import StoredNames


def _numbers(flags: Any) -> Any:
    """The layers whose flag is 0; REFUSED for what is no list of 0 and 1."""
    if not isinstance(flags, list) or any(isinstance(flag, bool) or flag not in (0, 1) for flag in flags):
        return REFUSED
    return [layer for layer, flag in enumerate(flags) if not flag]


def _flags(numbers: list[int], layers: int) -> list[int]:
    return [int(layer not in numbers) for layer in range(layers)]


def _is_interval(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _by_interval(config: Config) -> list[int] | None:
    layers, interval = layer_count(config), config.get("no_rope_layer_interval", 4)
    if layers is None or not _is_interval(interval):
        return None
    return list(range(interval - 1, layers, interval))


@FAMILIES.register()
@frozen
class SmolLM3(TransformerSettings):
    """`model smollm3 { … }`: as llama, with layers whose attention knows no positions."""

    family: str = named("smollm3")
    no_rope: tuple[int, ...] | Auto = setting(
        "numbers of the layers without rotary positions, the first layer being 0; auto: every fourth layer",
        default=AUTO,
        check=not_negative,
    )
    attention_bias: bool = attention_biases()
    mlp_bias: bool = mlp_biases()
    resuming: ClassVar[Mapping[str, Resuming]] = {
        **TransformerSettings.resuming,
        "no_rope": "meaning",
        "attention_bias": "shape",
        "mlp_bias": "shape",
    }
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="smollm3",
        architectures=("SmolLM3ForCausalLM",),
        keys=(
            *(key for key in KEYS if key.setting != "tie_embeddings"),
            ConfigKey("tie_embeddings", "tie_word_embeddings", default=True),
            ConfigKey("kv_heads", "num_key_value_heads", default=4, null=query_heads),
            ConfigKey("head_dim", "head_dim", default=head_width),
            ConfigKey("ffn", "intermediate_size", default=11008),
            ConfigKey(
                "no_rope",
                "no_rope_layers",
                default=_by_interval,
                null=_by_interval,
                read=_numbers,
                words="a list with 0 or 1 for every layer",
                write=_flags,
            ),
            ATTENTION_BIAS,
            MLP_BIAS,
        ),
        rope_theta=2e6,
        constant={"qk_norm": False},
        only={
            **ONLY,
            "use_sliding_window": OFF,
            "layer_types": FULL_ATTENTION,
            # What `no_rope_layers` is made of where that is absent.
            "no_rope_layer_interval": Only(fits=_is_interval, words="a whole number above 0"),
        },
        # Of windows.
        harmless=HARMLESS | {"sliding_window", "max_window_layers"},
    )
    stored: ClassVar[StoredNames] = StoredNames()

    def auto(self) -> dict[str, tuple[Any, str]]:
        return {**super().auto(), "no_rope": (list(range(3, self.layers, 4)), "every fourth layer")}

    def unfit(self) -> tuple[str, str, str] | None:
        beyond = [] if isinstance(self.no_rope, Auto) else [layer for layer in self.no_rope if layer >= self.layers]
        if not beyond:
            return None
        message = f"there is no layer {beyond[0]}: the {self.layers} layers are 0 to {self.layers - 1}"
        return "no_rope", message, "name layers that there are"

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        bias, mlp = arch.own.get("attention_bias", False), SwiGLULayer("mlp", bias=arch.own.get("mlp_bias", False))

        def block(rope: bool) -> BlockPiece:
            attention = AttentionLayer("self_attn", qk_norm=arch.qk_norm, bias=bias, output_bias=bias, rope=rope)
            return pre_norm(attention, mlp)

        rotary, plain, without = block(True), block(False), set(arch.own["no_rope"])
        return tuple(plain if layer in without else rotary for layer in range(arch.layers))
