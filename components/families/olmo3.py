"""`model olmo3 { … }`: OLMo 3 (Team OLMo 2025, arXiv 2512.13961)."""

from typing import ClassVar

from attrs import evolve

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, post_norm
from xtrain.blocks.feed_forward import SwiGLULayer
from xtrain.contracts.models import PlannedModel, layer_windows
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.family_parts import FULL, WINDOWED, local_theta_setting, write_window, write_window_types
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
    Config,
    ConfigKey,
    LocalRope,
    ModelConfig,
    Slides,
    keys,
    window_keys,
)
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


def _slides(config: Config, layers: int) -> Slides:
    """Return for each layer whether it has the window: all but every fourth."""
    return [bool((layer + 1) % 4) for layer in range(layers)]


_WINDOW, _FULL_LAYERS = window_keys(_slides, lambda config: config.get("sliding_window", 4096))


@FAMILIES.register()
@frozen
class Olmo3(TransformerSettings, PlannedModel):
    """`model olmo3 { … }`: olmo2 with a window in most blocks, whose rotary positions are not scaled."""

    family: str = named("olmo3")
    attention_bias: bool = attention_biases()
    window: int | None = window_setting()
    full_layers: tuple[int, ...] = full_layers_setting()
    local_theta: float = local_theta_setting(500_000.0)
    has_qk_norm: ClassVar[bool] = True
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="olmo3",
        architectures=("Olmo3ForCausalLM",),
        keys=keys(
            ConfigKey("norm_eps", "rms_norm_eps", 1e-5),
            ConfigKey("ffn", "intermediate_size"),
            ATTENTION_BIAS,
            evolve(_WINDOW, writes=write_window),
            evolve(_FULL_LAYERS, writes=write_window_types),
        ),
        rope_theta=500_000.0,
        local_rope=LocalRope("local_theta", "", 500_000.0, full=FULL, local=WINDOWED),
        constant={"qk_norm": True},
        only=ONLY,
        harmless=HARMLESS,
    )
    stored: ClassVar[StoredNames | None] = StoredNames()

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        bias = arch.own.get("attention_bias", False)
        attention = AttentionLayer("self_attn", qk_norm=arch.qk_norm, wide_norm=True, bias=bias, output_bias=bias)
        local, mlp = evolve(attention, theta=arch.own["local_theta"]), SwiGLULayer("mlp")
        return tuple(
            post_norm(attention if window is None else evolve(local, window=window), mlp)
            for window in layer_windows(arch)
        )
