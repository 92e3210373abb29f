"""`model glm4_moe_lite { … }`: GLM-4.7-Flash (GLM Team 2026)."""

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from xtrain.components.families.deepseek_v3 import DeepseekV3
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.model_config import PARTIAL, Config, ConfigKey, ModelConfig, Only, WrongKey, layer_count
from xtrain.lazy_attrs import frozen
from xtrain.plan.weight_files import StoredNames

_TYPES = "mlp_layer_types"
_BEFORE = "first_k_dense_replace"  # in published configs; transformers does not read it


def first_dense_key(default: int) -> ConfigKey:
    """Return the key of the number of first layers without experts. default: used unless a config has the number, or
    the type of every layer."""

    def computed(config: Config) -> Any:
        return _first_dense(config, config.get(_BEFORE, default))

    return ConfigKey("first_dense", _TYPES, computed=computed, writes=_write_types)


def _first_dense(config: Config, default: int = 1) -> Any:
    """Return the number of first layers without experts: the default unless the type of every layer is given."""
    layers, types = layer_count(config), config.get(_TYPES)
    if layers is None:
        return default
    count = min(default, layers) if types is None else types.count("dense") if isinstance(types, list) else -1
    if types not in (None, _typed(count, layers)):
        return WrongKey(_TYPES, f"dense for the first of the {layers} layers, and sparse for all others")
    return (
        count if config.get(_BEFORE, count) in (None, count) else WrongKey(_BEFORE, f"{count}, as transformers has it")
    )


def _typed(dense: int, layers: int) -> list[str]:
    return ["dense"] * dense + ["sparse"] * (layers - dense)


def _write_types(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    return {_TYPES: _typed(settings["first_dense"], settings["layers"])}


# Setting → key, or the default of a key that deepseek_v3 has too.
_OWN: dict[str, Any] = {
    "norm_eps": 1e-5,
    "q_rank": 768,
    "nope_dim": 192,
    "value_dim": 256,
    "ffn": ConfigKey("ffn", "intermediate_size", 10240, when=lambda config: _first_dense(config) != 0),
    "first_dense": ConfigKey("first_dense", _TYPES, computed=_first_dense, writes=_write_types),
    "experts": 64,
    "experts_per_token": 4,
    "expert_ffn": 1536,
    "expert_groups": 1,
    "groups_per_token": 1,
    "expert_scale": 1.8,
}


def _config(base: ModelConfig) -> ModelConfig:
    def own(key: ConfigKey) -> ConfigKey:
        found = _OWN.get(key.setting, key)
        return found if isinstance(found, ConfigKey) else attrs.evolve(key, default=found)

    return attrs.evolve(
        base,
        model_type="glm4_moe_lite",
        architectures=("Glm4MoeLiteForCausalLM",),
        scores=None,
        keys=tuple(map(own, base.keys)),
        only={**base.only, PARTIAL: Only((1.0, 1))},
        harmless=base.harmless | {_BEFORE},
        aliases=(),
        whole=None,
    )


@FAMILIES.register()
@frozen
class Glm4MoeLite(DeepseekV3):
    """`model glm4_moe_lite { … }`: deepseek_v3 with other defaults in its files."""

    family: str = named("glm4_moe_lite")
    assert DeepseekV3.config is not None
    config: ClassVar[ModelConfig | None] = _config(DeepseekV3.config)
    stored: ClassVar[StoredNames | None] = StoredNames(
        buffers=("e_score_correction_bias",), further_tokens="eh_proj.weight"
    )
