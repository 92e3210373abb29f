"""The Experts screen as rows of text: a map of layers and experts, with what stands out in words."""

from collections.abc import Sequence

import numpy as np
from attrs import evolve, field, frozen
from numpy import ndarray

from xtrain.tui.pages.expert_loads import LayerLoad, in_words, of_layer
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
from xtrain.tui.words import plural

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
