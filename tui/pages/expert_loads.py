"""How the tokens of the latest steps fell on the experts of each layer, and what that says."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import frozen
from numpy import ndarray

from xtrain.tui.words import number, plural

_KEY = "moe/load/"
# An expert with less than this part of an even share learns next to nothing.
DEAD_BELOW = 0.01
# Up to here, in even shares, the most loaded expert is no cause for concern.
_BALANCED, _UNEVEN = 1.5, 3.0
_NAMED = 12


@frozen(kw_only=True)
class LayerLoad:
    """Load of one layer. shares: of the assignments, by expert, NaN where unknown."""

    layer: int
    shares: ndarray

    @property
    def times(self) -> ndarray:
        """Load relative to an even load: 1 is an equal share."""
        return self.shares * self.num_experts

    @property
    def num_experts(self) -> int:
        return len(self.shares)

    @property
    def most(self) -> int:
        """The expert with the highest load; the first of several."""
        return int(np.nanargmax(self.shares))

    @property
    def least(self) -> int:
        """The expert with the lowest load; the first of several."""
        return int(np.nanargmin(self.shares))

    @property
    def imbalance(self) -> float:
        """Highest load / mean load: 1 is balanced."""
        return float(np.nanmax(self.times))

    @property
    def entropy(self) -> float:
        """Entropy of the shares / entropy of equal shares: 1 is balanced, 0 is all on one expert."""
        known = self.shares[self.shares > 0]
        if self.num_experts < 2 or not len(known):
            return 1.0
        return float(-(known * np.log(known)).sum() / math.log(self.num_experts))

    @property
    def dead(self) -> tuple[int, ...]:
        """The experts with no or nearly no load."""
        return tuple(np.flatnonzero(self.times < DEAD_BELOW).tolist())


def layer_loads(rest: Mapping[str, Any]) -> tuple[LayerLoad, ...]:
    """Return the layers in a metrics record, by number; layers without a known load are left out."""
    found = []
    for key, value in rest.items():
        layer = key.removeprefix(_KEY)
        if layer == key or not layer.isdecimal() or not isinstance(value, list) or not value:
            continue
        shares = np.array([np.nan if (one := number(each)) is None else one for each in value])
        shares = np.where(np.isfinite(shares) & (shares >= 0), shares, np.nan)
        if not np.isnan(shares).all():
            found.append(LayerLoad(layer=int(layer), shares=shares))
    return tuple(sorted(found, key=lambda load: load.layer))


def in_words(loads: tuple[LayerLoad, ...]) -> list[tuple[str, str]]:
    """Return sentences with style names: balance, highest and lowest loads, and dead experts."""
    most = max(loads, key=lambda load: load.imbalance)
    least = min(loads, key=lambda load: float(load.times[load.least]))
    verdict, style = _verdict(most.imbalance)
    dead = [(load.layer, load.dead) for load in loads if load.dead]
    total = sum(len(experts) for _, experts in dead)
    alive = ("Every expert of every layer gets tokens.", "")
    verb = "gets" if total == 1 else "get"
    lost = (f"{plural(total, 'expert')} {verb} almost no tokens: {_named(dead)}.", "bad")
    return [
        (verdict, style),
        lost if dead else alive,
        (f"Most loaded: {_one(most, most.most)}.", ""),
        (f"Least loaded: {_one(least, least.least)}.", ""),
    ]


def _verdict(imbalance: float) -> tuple[str, str]:
    if imbalance <= _BALANCED:
        return f"Balanced: no expert takes more than {imbalance:.2f} times an even share.", "good"
    if imbalance <= _UNEVEN:
        return f"Uneven: one expert takes {imbalance:.2f} times an even share.", "warn"
    return f"Far from even: one expert takes {imbalance:.2f} times an even share.", "bad"


def _one(load: LayerLoad, expert: int) -> str:
    share, times = float(load.shares[expert]), float(load.times[expert])
    return f"expert {expert} of layer {load.layer} with {share:.1%} of its tokens, {times:.2f} times an even share"


def _named(dead: list[tuple[int, tuple[int, ...]]]) -> str:
    """Return `layer 0: 2, 7; layer 3: 1 and 40 more`, the first dozen by name."""
    left, parts, unnamed = _NAMED, [], 0
    for layer, experts in dead:
        named = experts[:left]
        left -= len(named)
        if named:
            parts.append(f"layer {layer}: {', '.join(map(str, named))}")
        unnamed += len(experts) - len(named)
    return "; ".join(parts) + (f" and {unnamed} more" if unnamed else "")


def of_layer(load: LayerLoad) -> str:
    """Return the experts of one layer by load, from both ends."""
    order = [int(expert) for expert in np.argsort(-load.shares, kind="stable") if not np.isnan(load.shares[expert])]
    ends = order if len(order) <= 6 else [*order[:3], -1, *order[-3:]]
    parts = ["…" if expert < 0 else f"{expert}: {load.shares[expert]:.1%}" for expert in ends]
    dead = f", almost no tokens: {_numbers(load.dead)}" if load.dead else ""
    return f"layer {load.layer}, experts by load  {'  '.join(parts)}{dead}"


def _numbers(experts: tuple[int, ...]) -> str:
    more = f" and {len(experts) - _NAMED} more" if len(experts) > _NAMED else ""
    return ", ".join(map(str, experts[:_NAMED])) + more
