"""Expert loads of each layer, and the Experts screen as rows."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve, field, frozen
from numpy import ndarray

from xtrain.text.units import number as as_number
from xtrain.text.units import plural
from xtrain.tui.pages.sheet import (
    BLANK,
    DEAD,
    SHADES,
    Row,
    block,
    fit,
    joined,
    restyled,
    right,
    row,
    rule,
    window,
    wrapped,
)

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
        shares = np.array([np.nan if (one := as_number(each)) is None else one for each in value])
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


# Lower edges of the map's ten levels, in multiples of an even load. Two levels share a shade; the middle one is an even
# load.
_EDGES = np.array([0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.6, 2.0, 3.0])
_NUMBERED, _BROAD = 5, 2
# Rows kept for sentences, and the height from which on they are kept.
_WORDS, _ROOM_FOR_WORDS = 3, 18
_LEAST_LAYERS = 3


@frozen(kw_only=True)
class ExpertsView:
    """The reader's choices. layer: under the cursor, None: the first; worst_first: order of the layers."""

    layer: int | None = None
    worst_first: bool = False
    top: int = 0


@frozen(kw_only=True)
class ExpertsPage:
    """Drawn rows, and the facts that keys need. layers: in the order of the map."""

    rows: tuple[Row, ...]
    view: ExpertsView
    layers: tuple[int, ...] = field(factory=tuple, repr=False)
    place: int = 0
    height: int = 0


def page(
    loads: tuple[LayerLoad, ...],
    view: ExpertsView,
    width: int,
    height: int,
    *,
    facts: Sequence[str] = (),
) -> ExpertsPage:
    """Return the rows for `width` x `height` cells. facts: facts for the heading, such as the step."""
    title = rule("Experts", width, joined(facts))
    if not loads:
        words = row((" No step has been logged yet.", "dim"))
        return ExpertsPage(rows=tuple(block([title, words], width, height)), view=view)
    sentences = [[row((line, style)) for line in wrapped(text, width, "  ")] for text, style in in_words(loads)]
    layers = sorted(loads, key=lambda load: -load.imbalance) if view.worst_first else list(loads)
    numbers = [load.layer for load in layers]
    place = numbers.index(view.layer) if view.layer in numbers else 0
    chosen = [row((line, "")) for line in wrapped(of_layer(layers[place]), width, "  ")]
    # The map comes first: with few rows, sentences are dropped from the end, then the details of one layer.
    spare = height - 3 - len(layers) - len(chosen)
    said = _whole(sentences, max(_WORDS if height >= _ROOM_FOR_WORDS else 1, spare))
    if height - 3 - len(said) - len(chosen) < min(_LEAST_LAYERS, len(layers)):
        chosen = []
    room = max(1, height - 3 - len(said) - len(chosen))
    top = window(len(layers), room, view.top, place)
    shown = layers[top : top + room]
    grid = _Grid.of(loads, width)
    rows = [title, *said, grid.head(width)]
    for number, load in enumerate(shown, start=top):
        drawn = fit(grid.line(load), width)
        rows.append(restyled(drawn, "cursor") if number == place else drawn)
    rows += [*chosen, grid.legend(width, len(layers) - len(shown))]
    rows = [*rows, *[BLANK] * (height - len(rows))]
    return ExpertsPage(
        rows=tuple(block(rows, width, height)),
        view=evolve(view, top=top),
        layers=tuple(numbers),
        place=place,
        height=room,
    )


def moved(page: ExpertsPage, by: int) -> ExpertsView:
    """Move the cursor by some layers."""
    if not page.layers:
        return page.view
    place = max(0, min(len(page.layers) - 1, page.place + by))
    return evolve(page.view, layer=page.layers[place])


def reordered(page: ExpertsPage) -> ExpertsView:
    """Sort by imbalance, or by number again; the cursor moves to the first layer."""
    return evolve(page.view, worst_first=not page.view.worst_first, layer=None, top=0)


@frozen(kw_only=True)
class _Grid:
    """Widths of the map's parts. experts_per_cell: adjacent experts that share a cell."""

    label: int
    cell: int
    experts_per_cell: int
    experts: int
    figures: bool

    @classmethod
    def of(cls, loads: Sequence[LayerLoad], width: int) -> "_Grid":
        experts = max(load.num_experts for load in loads)
        label = max(5, len(str(loads[-1].layer)))
        figures = width >= 72
        room = max(1, width - label - 2 - (24 if figures else 8))
        cell = next((size for size in (_NUMBERED, _BROAD, 1) if experts * size <= room), 1)
        return cls(
            label=label,
            cell=cell,
            experts_per_cell=-(-experts // room) if cell == 1 else 1,
            experts=experts,
            figures=figures,
        )

    @property
    def num_cells(self) -> int:
        return -(-self.experts // self.experts_per_cell)

    def head(self, width: int) -> Row:
        """Return the numbers of the experts above their cells, as many as fit, and the titles of the figures."""
        ruler = [" "] * (self.num_cells * self.cell)
        free = 0
        for cell in range(self.num_cells):
            name = str(cell * self.experts_per_cell)
            end = (cell + 1) * self.cell if self.cell == _NUMBERED else cell * self.cell + len(name)
            start = end - len(name)
            if start >= free and end <= len(ruler):
                ruler[start:end] = name
                free = end + 1
        figures = f"{'max':>7} {'entropy':>8} {'dead':>6}" if self.figures else f"{'max':>6}"
        return fit(row((f"{'layer':>{self.label}} {''.join(ruler)} {figures}", "dim")), width)

    def line(self, load: LayerLoad) -> Row:
        """Return the row of a layer: its cells, highest load, evenness and number of dead experts."""
        times = np.full(self.num_cells * self.experts_per_cell, np.nan)
        times[: load.num_experts] = load.times
        dead = np.zeros(len(times), dtype=bool)
        dead[list(load.dead)] = True
        cells = times.reshape(self.num_cells, self.experts_per_cell)
        known = ~np.isnan(cells)
        worst = np.where(known.any(axis=1), np.where(known, cells, -np.inf).max(axis=1), np.nan)
        any_dead = np.any(dead.reshape(self.num_cells, self.experts_per_cell), axis=1, keepdims=True)[:, 0]
        spans = [self._cell(*pair) for pair in zip(worst.tolist(), any_dead.tolist(), strict=True)]
        largest = "bad" if load.imbalance > 3 else "warn" if load.imbalance > 1.5 else ""
        if self.figures:
            figures = [(f" {load.imbalance:>6.2f}×", largest), (f" {load.entropy:>8.3f}", "")]
            figures.append((f" {len(load.dead):>6}" if load.dead else " " * 7, "bad"))
        else:
            figures = [(f" {load.imbalance:>5.2f}×", largest)]
            figures += [(f"{DEAD}", "bad")] if load.dead else []
        return row((right(str(load.layer), self.label) + " ", "dim"), *spans, *figures)

    def _cell(self, times: float, dead: bool) -> tuple[str, str]:
        if np.isnan(times):
            return " " * self.cell, ""
        level = int(level_of(np.array([times]))[0])
        if dead and self.cell < _NUMBERED:
            return (DEAD + " ")[: self.cell], "bad"
        if self.cell == _NUMBERED:
            return f"{min(times, 99.9):>5.2f}"[:5] if not dead else f"{DEAD:>5}", "bad" if dead else f"heat{level}"
        return SHADES[level // 2] * self.cell, f"heat{level}"

    def legend(self, width: int, hidden: int) -> Row:
        """Return the meaning of the signs, and how many layers are not on the screen."""
        more = plural(hidden, "more layer") if hidden > 0 else ""
        each = f"each cell the most loaded of {self.experts_per_cell}" if self.experts_per_cell > 1 else ""
        _, low, even, high, most = SHADES
        said = short = "cells: times an even share"
        if self.cell != _NUMBERED:
            said = f"{low} from 0.25  {even} even  {high} from 1.25  {most} from 2"
            short = f"{low} 0.25+ {even} even {high} 1.25+ {most} 2+"
        sign = f"{DEAD} dead"
        wordings = ([more, said, each, sign], [more, short, each, sign], [more, short, sign], [more, short], [short])
        lines = [joined(parts) for parts in wordings]
        return fit(row((next((line for line in lines if len(line) <= width), lines[-1]), "dim")), width)


def _whole(sentences: Sequence[Sequence[Row]], most: int) -> list[Row]:
    """Return as many whole sentences as fit in `most` rows, at least the first one."""
    said: list[Row] = []
    for rows in sentences:
        if said and len(said) + len(rows) > most:
            break
        said += rows
    return said


def level_of(times: ndarray) -> ndarray:
    """Return levels 0 to 9, from no load to three times an even load; 4 and 5 are on both sides of an even load."""
    return np.searchsorted(_EDGES, times, side="right")
