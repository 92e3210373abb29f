"""Small sizes of a model with every kind of its layers, and settings of its optimizer."""

import re
from typing import Any, Final

import attrs

from xtrain.dsl.schema.component import UserComponent
from xtrain.dsl.schema.model import Model
from xtrain.dsl.schema.optimizers import Optimizer
from xtrain.dsl.schema.setting import AUTO, settings_of
from xtrain.plan.architecture import Architecture

# Sizes by setting, of families with such a setting. Windows are shorter than the documents of small experiments.
SIZES: Final = {
    "dim": 32, "head_dim": 8, "ffn": 48, "expert_ffn": 24, "shared_ffn": 24, "q_rank": 20, "kv_rank": 16, "nope_dim": 6,
    "rope_dim": 4, "value_dim": 8, "delta_key_dim": 8, "delta_value_dim": 8, "window": 6, "score_width": 8,
    "experts": 8, "experts_per_token": 2, "shared_experts": 1, "expert_groups": 4, "groups_per_token": 2, "mtp": 1,
}  # fmt: skip
SHARED: Final = "shared_kv"
"""Setting of the number of last layers that compute with the keys and values of layers before them."""
HEADS: Final = 8
# Above it an integer of an unknown setting is taken for a width, which is divided by a number that keeps it even.
WIDE: Final = 256
DIVISOR: Final = 64
STD: Final = 0.2
"""Standard deviation of initial weights: large enough that every part of the model counts."""

# The learning rate is high, so that every part moves. A large eps keeps the optimizer smooth: with a tiny one an
# element whose gradient is all rounding error would move by the whole learning rate to one side or the other.
RATE: Final = 1e-2
EPSILON: Final = 1e-3
CLIP: Final = 0.5
IN_FP64: Final = {"stochastic_rounding": False, "states": "auto"}


def small_model(model: Model, arch: Architecture, layers: int) -> Model:
    """Return a small model of the same family. layers: the number of its layers, the first ones of the model."""
    own = settings_of(type(model))
    heads = min(HEADS, arch.heads)
    changes: dict[str, Any] = {}
    for name, (attribute, _) in own.items():
        value = getattr(model, attribute.name)
        known = arch.own.get(name, getattr(arch, name, None)) if not isinstance(value, int | tuple) else value
        found = value
        if name == SHARED and type(known) is int:
            found = max(0, layers - (arch.layers - known)) if known else 0
        elif name in SIZES and type(known) is int:
            found = min(known, SIZES[name]) if known else known
        elif type(value) is int and value > WIDE:
            found = max(2, value // DIVISOR // 2 * 2)
        elif isinstance(value, tuple) and value and all(type(each) is int for each in value):
            found = tuple(each for each in value if each < layers)
        if found != value:
            changes[attribute.name] = found
    fixed: dict[str, Any] = {
        "layers": layers,
        "heads": heads,
        "kv_heads": _kv_heads(arch, heads),
        "vocab": AUTO,
        "init_std": STD,
        "weights": "auto",
        "coding": "plain",
        "attention": "auto",
        "frozen": tuple(dict.fromkeys(near_layers(each, layers) for each in model.frozen)),
    }
    changes |= {own[name][0].name: value for name, value in fixed.items() if name in own}
    return attrs.evolve(model, folder=None, **changes)


def _kv_heads(arch: Architecture, heads: int) -> int:
    """Return the number of heads of keys and values: one, as many as heads, or half of them."""
    if arch.kv_heads in (1, arch.heads):
        return 1 if arch.kv_heads == 1 else heads
    return max(1, heads // 2)


def near_layers(pattern: str, layers: int, *, alone: bool = False) -> str:
    """Return a pattern of names with numbers of layers that a model with fewer layers has. alone: it is only them."""

    def least(found: re.Match[str]) -> str:
        return re.sub(r"\d+", lambda number: str(min(int(number[0]), layers - 1)), found[0])

    return re.sub(r"^[\d\-]+$" if alone else r"(?<=layers\.)[\d\-]+", least, pattern)


def small_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer with a learning rate, eps and clipping for small experiments, its state in fp64."""
    own = settings_of(type(optimizer))
    changes: dict[str, Any] = {"lr": RATE} if "lr" in own else {}
    if "eps" in own and not isinstance(optimizer, UserComponent):
        changes["eps"] = EPSILON
    if "clip" in own and optimizer.clip is not None:
        changes["clip"] = CLIP
    changes |= {name: value for name, value in IN_FP64.items() if name in own}
    return attrs.evolve(optimizer, **changes)
