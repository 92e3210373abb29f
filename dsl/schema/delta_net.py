"""Settings and config keys of families that mix gated delta nets with attention: Qwen3-Next and Qwen3.5."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from xtrain.dsl.schema.family_parts import FULL, rotary_share_key, rotary_share_setting, unfit_share
from xtrain.dsl.schema.model import TransformerSettings
from xtrain.dsl.schema.model_config import ONLY, Config, ConfigKey, Only, WrongKey, layer_count
from xtrain.dsl.schema.setting import AUTO, Auto, at_least, not_negative, setting, settings_of
from xtrain.lazy_attrs import frozen

LINEAR: Final = "linear_attention"
INTERVAL: Final = "full_attention_interval"
ROTARY_SHARE: Final = 0.25


def _attention_layers(config: Config) -> Any:
    """Return the layers with attention: the others have a delta net."""
    layers, types, interval = layer_count(config), config.get("layer_types"), config.get(INTERVAL, 4)
    if layers is None:
        return []
    if types is None:
        whole = isinstance(interval, int) and not isinstance(interval, bool) and interval > 0
        return list(range(interval - 1, layers, interval)) if whole else WrongKey(INTERVAL, "a whole number above 0")
    if not isinstance(types, list) or len(types) != layers or not all(each in (FULL, LINEAR) for each in types):
        return WrongKey("layer_types", f"{LINEAR} or {FULL} for each of the {layers} layers")
    return [layer for layer, kind in enumerate(types) if kind == FULL]


def _layer_types(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    attends = settings["attention_layers"]
    return {"layer_types": [FULL if layer in attends else LINEAR for layer in range(settings["layers"])]}


DELTA_KEYS: Final = (
    ConfigKey("attention_layers", "layer_types", computed=_attention_layers, writes=_layer_types),
    ConfigKey("delta_kernel", "linear_conv_kernel_dim", 4),
    ConfigKey("delta_key_dim", "linear_key_head_dim", 128),
    ConfigKey("delta_value_dim", "linear_value_head_dim", 128),
    ConfigKey("delta_key_heads", "linear_num_key_heads", 16),
    ConfigKey("delta_value_heads", "linear_num_value_heads", 32),
    rotary_share_key(ROTARY_SHARE),
)
# The first decides the layers without `layer_types`; no layer has a window, and states are always exact sums.
DELTA_HARMLESS: Final = frozenset((INTERVAL, "use_sliding_window", "mamba_ssm_dtype"))
DELTA_ONLY: Final = {**ONLY, "attn_output_gate": Only((True,))}
# Positions of images, which texts do not have.
ROPE_HARMLESS: Final = frozenset(("mrope_section", "mrope_interleaved"))


@frozen
class DeltaNetSettings(TransformerSettings):
    """Settings of every family whose blocks have a gated delta net or gated attention."""

    attention_layers: tuple[int, ...] | Auto = setting(
        "numbers of blocks with attention; the others have a gated delta net, and the first block is 0; auto: every "
        "fourth block",
        default=AUTO,
        check=not_negative,
        resuming="shape",
    )
    delta_key_heads: int | Auto = setting(
        "number of query and key heads of a delta net; auto: kv_heads",
        default=AUTO,
        check=at_least(1),
        resuming="width",
    )
    delta_value_heads: int | Auto = setting(
        "number of value heads of a delta net, each with a state; auto: heads",
        default=AUTO,
        check=at_least(1),
        resuming="width",
    )
    delta_key_dim: int | Auto = setting(
        "width of a query or key head of a delta net; auto: dim / heads",
        default=AUTO,
        check=at_least(1),
        resuming="width",
    )
    delta_value_dim: int | Auto = setting(
        "width of a value head of a delta net; auto: dim / heads", default=AUTO, check=at_least(1), resuming="width"
    )
    delta_kernel: int = setting(
        "positions that the causal convolution before a delta net sees", default=4, check=at_least(1), resuming="shape"
    )
    rotary_share: float = rotary_share_setting(ROTARY_SHARE)
    has_qk_norm: ClassVar[bool] = True

    def auto(self) -> dict[str, tuple[Any, str]]:
        found, width = super().auto(), max(1, self.dim // self.heads)
        kv_heads = found["kv_heads"][0] if isinstance(self.kv_heads, Auto) else self.kv_heads
        return {
            **found,
            "attention_layers": (list(range(3, self.layers, 4)), "every fourth block"),
            "delta_key_heads": (kv_heads, f"kv_heads {kv_heads}"),
            "delta_value_heads": (self.heads, f"heads {self.heads}"),
            **dict.fromkeys(("delta_key_dim", "delta_value_dim"), (width, f"dim {self.dim} / heads {self.heads}")),
        }

    def idle(self) -> dict[str, tuple[str, str]]:
        found, (values, _) = super().idle(), self.resolved()
        attends = set(values["attention_layers"])
        if len(attends) == self.layers:
            why = ("every block has attention", "leave blocks out of `attention_layers`, or remove it")
            found |= {name: why for name in settings_of(DeltaNetSettings) if name.startswith("delta_")}
        elif not attends:
            names = {"head_dim", "rope_theta", "rotary_share", "attention", "attention_bias"}
            names |= {f"rope.{name}" for name in settings_of(type(self.rope))}
            names |= set() if isinstance(self.delta_key_heads, Auto) else {"kv_heads"}
            found |= dict.fromkeys(names, ("no block has attention", "name blocks in `attention_layers`, or remove it"))
        return found

    def unfit(self) -> tuple[str, str, str] | None:
        attends = () if isinstance(self.attention_layers, Auto) else self.attention_layers
        if beyond := [layer for layer in attends if layer >= self.layers]:
            message = f"there is no block {beyond[0]}: the {self.layers} blocks are 0 to {self.layers - 1}"
            return "attention_layers", message, "name existing blocks"
        values, _ = self.resolved()
        keys, heads = values["delta_key_heads"], values["delta_value_heads"]
        if heads % keys:
            message = f"delta_value_heads {heads} is not divisible by delta_key_heads {keys}"
            return "delta_value_heads", message, f"use a number of value heads divisible by {keys}"
        return unfit_share(self, self.rotary_share) or super().unfit()
