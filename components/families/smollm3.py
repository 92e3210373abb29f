"""`model smollm3 { … }`: SmolLM3 (Hugging Face 2025), with some layers without RoPE (Yang et al. 2025, arXiv
2501.18795)."""

from typing import Any, ClassVar

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
    mlp_biases,
    window_setting,
)
from xtrain.dsl.schema.model_config import (
    ATTENTION_BIAS,
    HARMLESS,
    MLP_BIAS,
    ONLY,
    REFUSED,
    Config,
    ConfigKey,
    ModelConfig,
    Only,
    Slides,
    keys,
    layer_count,
    query_heads,
    switched_window,
    window_keys,
)
from xtrain.dsl.schema.setting import AUTO, Auto, not_negative, setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


def _numbers(flags: Any) -> Any:
    """Return the layers whose flag is 0; REFUSED if `flags` is not a list of 0 and 1."""
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


def _without_positions(config: Config, layers: int) -> Slides:
    """Return for each layer whether it has the window: the layers without RoPE do."""
    flags = config.get("no_rope_layers")
    plain = _by_interval(config) if flags is None else _numbers(flags)
    without = set() if plain is None or plain is REFUSED else set(plain)
    return [layer in without for layer in range(layers)]


@FAMILIES.register()
@frozen
class SmolLM3(TransformerSettings, PlannedModel):
    """`model smollm3 { … }`: llama with some layers without RoPE."""

    family: str = named("smollm3")
    no_rope: tuple[int, ...] | Auto = setting(
        "layers without RoPE, counted from 0; auto: every fourth layer",
        default=AUTO,
        check=not_negative,
        resuming="meaning",
    )
    window: int | None = window_setting()
    full_layers: tuple[int, ...] = full_layers_setting()
    attention_bias: bool = attention_biases()
    mlp_bias: bool = mlp_biases()
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="smollm3",
        architectures=("SmolLM3ForCausalLM",),
        keys=keys(
            ConfigKey("tie_embeddings", "tie_word_embeddings", default=True),
            ConfigKey("kv_heads", "num_key_value_heads", default=4, null=query_heads),
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
            *window_keys(_without_positions, lambda config: switched_window(config, None)),
        ),
        rope_theta=2e6,
        constant={"qk_norm": False},
        only={
            **ONLY,
            # Default of `no_rope_layers`.
            "no_rope_layer_interval": Only(fits=_is_interval, words="a whole number above 0"),
        },
        # Keys that enable the window, and keys that no class reads.
        harmless=HARMLESS | {"use_sliding_window", "max_window_layers"},
    )
    stored: ClassVar[StoredNames | None] = StoredNames()

    def auto(self) -> dict[str, tuple[Any, str]]:
        return {**super().auto(), "no_rope": (list(range(3, self.layers, 4)), "every fourth layer")}

    def unfit(self) -> tuple[str, str, str] | None:
        beyond = [] if isinstance(self.no_rope, Auto) else [layer for layer in self.no_rope if layer >= self.layers]
        if not beyond:
            return super().unfit()
        message = f"there is no layer {beyond[0]}: the {self.layers} layers are 0 to {self.layers - 1}"
        return "no_rope", message, "name existing layers"

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        bias, mlp = arch.own.get("attention_bias", False), SwiGLULayer("mlp", bias=arch.own.get("mlp_bias", False))

        attention = AttentionLayer("self_attn", qk_norm=arch.qk_norm, bias=bias, output_bias=bias)
        without = set(arch.own["no_rope"])
        return tuple(
            pre_norm(evolve(attention, window=window, rope=layer not in without), mlp)
            for layer, window in enumerate(layer_windows(arch))
        )
