"""`model exaone4 { … }`: EXAONE 4.0 (LG AI Research 2025, arXiv 2507.11407)."""

from typing import Any, ClassVar

from attrs import evolve

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, post_norm
from xtrain.blocks.feed_forward import SwiGLULayer
from xtrain.contracts.models import PlannedModel, layer_windows
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.family_parts import write_window_types
from xtrain.dsl.schema.model import FAMILIES, TransformerSettings, full_layers_setting, window_setting
from xtrain.dsl.schema.model_config import (
    HARMLESS,
    ONLY,
    Config,
    ConfigKey,
    ModelConfig,
    Slides,
    WrongKey,
    keys,
    window_keys,
)
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames

_PATTERN = "sliding_window_pattern"


def _slides(config: Config, layers: int) -> Slides:
    """Return for each layer whether it has the window: all but the last of each `sliding_window_pattern` layers."""
    pattern = config.get(_PATTERN, 4)
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
        return WrongKey(_PATTERN, "a whole number above 0, or `layer_types`")
    return [bool((layer + 1) % pattern) for layer in range(layers)]


_WINDOW, _FULL_LAYERS = window_keys(_slides, lambda config: config.get("sliding_window", 4096))


def _window(config: Config) -> Any:
    """Return the window. With a window that no layer has, no layer would have positions."""
    assert _WINDOW.computed is not None
    found = _WINDOW.computed(config)
    idle = found is None and config.get("sliding_window", 4096) is not None
    return WrongKey("sliding_window", "null, as no layer has the window") if idle else found


@FAMILIES.register()
@frozen
class Exaone4(TransformerSettings, PlannedModel):
    """`model exaone4 { … }`: olmo2 with norms of single heads; if some blocks have a window, the others have no
    positions."""

    family: str = named("exaone4")
    window: int | None = window_setting()
    full_layers: tuple[int, ...] = full_layers_setting()
    has_qk_norm: ClassVar[bool] = True
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="exaone4",
        architectures=("Exaone4ForCausalLM",),
        keys=keys(
            ConfigKey("norm_eps", "rms_norm_eps", 1e-5),
            ConfigKey("kv_heads", "num_key_value_heads", 32),
            ConfigKey("ffn", "intermediate_size", 16384),
            ConfigKey("vocab", "vocab_size", 102_400),
            evolve(_WINDOW, computed=_window, writes=lambda values: {"sliding_window": values.get("window")}),
            evolve(_FULL_LAYERS, writes=write_window_types),
        ),
        constant={"qk_norm": True},
        only=ONLY,
        harmless=HARMLESS | {_PATTERN},  # it determines the layers with the window if `layer_types` does not
    )
    stored: ClassVar[StoredNames | None] = StoredNames()

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        attention, window = AttentionLayer("self_attn", qk_norm=arch.qk_norm), arch.own.get("window")
        local, mlp = evolve(attention, window=window), SwiGLULayer("mlp")
        full = attention if window is None else evolve(attention, rope=False)
        return tuple(post_norm(full if own is None else local, mlp) for own in layer_windows(arch))
