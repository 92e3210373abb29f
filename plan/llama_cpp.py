"""Models that llama.cpp does not compute as they are."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from xtrain.dsl.schema.model_config import LlamaCpp

SUFFIX: Final = ".gguf"
NO_FILE: Final = "no GGUF file is written of this model"
# Settings of YaRN that llama.cpp computes with, whatever the model.
YARN: Final = {"beta_fast": 32, "beta_slow": 1, "truncate": True}


def computed_otherwise(config: Mapping[str, Any], form: "LlamaCpp | None") -> str | None:
    """Return the reason why llama.cpp would not compute the model of a config.json, or None. form: of the family;
    None: unknown."""
    if form is None:
        return f"llama.cpp's form of {config['architectures'][0]} is unknown here"
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return f"llama.cpp computes {form.name} without the sliding window of {config['sliding_window']:,}"
    rope = rope_of(config)
    if (kind := rope["rope_type"]) not in ("default", "linear", "llama3", "yarn"):
        return f"RoPE of kind {kind} has no place in it"
    yarn = YARN | {"attention_factor": 1 + 0.1 * math.log(rope["factor"])} if kind == "yarn" else {}
    for name, value in yarn.items():
        if (own := rope.get(name)) is not None and not math.isclose(own, value):
            return f"RoPE with {name} {rope[name]} has no place in it"
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        return "its layers with experts and without are mixed"
    if experts_of(config) and not config.get("norm_topk_prob"):
        return "llama.cpp divides the weights of a token's experts by their sum, and `norm_topk_prob` is false"
    if config.get("attention_bias") and not form.biases:
        return f"llama.cpp computes attention of {form.name} without biases"
    return None


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of RoPE by their names in transformers 5."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    return rope


def experts_of(config: Mapping[str, Any]) -> int:
    """Return the number of experts of a layer."""
    return config.get("num_experts") or config.get("num_local_experts") or 0
