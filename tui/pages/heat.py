"""How much is much: a number of every rank becomes one of ten levels, and ranks that share a cell show the worst."""

from collections.abc import Callable, Sequence

import numpy as np
from attrs import field, frozen
from numpy import ndarray

LEVELS = 10


@frozen(kw_only=True)
class Scale:
    """Ten levels between nine ascending edges: a value on level n has reached n edges. words: formats a value."""

    edges: tuple[float, ...]
    words: Callable[[float], str] = field(eq=False, repr=False)

    def levels(self, values: ndarray) -> ndarray:
        """Return the level of each value, 0 to 9; -1 for NaN."""
        found = np.searchsorted(np.asarray(self.edges), np.nan_to_num(values), side="right")
        return np.where(np.isnan(values), -1, found)

    def bounds(self, groups: int) -> list[str]:
        """Return the formatted lower edges of `groups` equally wide groups of levels, without the first."""
        step = LEVELS // groups
        return [self.words(self.edges[step * group - 1]) for group in range(1, groups)]


def between(low: float, high: float, words: Callable[[float], str]) -> Scale:
    """Return a scale of ten levels of equal width from `low` to `high`."""
    width = (high - low) / LEVELS or 1.0
    return Scale(edges=tuple(low + width * number for number in range(1, LEVELS)), words=words)


def around(values: ndarray, words: Callable[[float], str], spread: float = 0.1) -> Scale:
    """Return a scale from the smallest to the largest value, at least `spread` of the median to both sides: ranks that
    hardly differ look alike."""
    known = values[~np.isnan(values)]
    if not len(known):
        return between(0.0, 1.0, words)
    middle = float(np.median(known))
    low = min(float(known.min()), middle * (1 - spread))
    return between(low, max(float(known.max()), middle * (1 + spread)), words)


def from_zero(values: ndarray, words: Callable[[float], str], least: float) -> Scale:
    """Return a scale from zero to the largest value, at least to `least`."""
    known = values[~np.isnan(values)]
    most = float(known.max()) if len(known) else 0.0
    return between(0.0, max(most, least) or 1.0, words)


@frozen(kw_only=True)
class Heat:
    """Cells of a grid: each shows the worst of its ranks, with its state, value and level.

    rank: -1 for a cell without ranks. state: the highest of its ranks. The worst rank is the one in the worst state; in
    equal states, the one with the greatest value.
    """

    rank: ndarray = field(eq=False, repr=False)
    state: ndarray = field(eq=False, repr=False)
    value: ndarray = field(eq=False, repr=False)
    level: ndarray = field(eq=False, repr=False)


def heat(cell_of: ndarray, num_cells: int, values: ndarray, states: ndarray, scale: Scale) -> Heat:
    """Return the cells from the value (NaN where unknown) and the state of every rank."""
    filled = np.where(np.isnan(values), -np.inf, values)
    # Ascending by cell, state and value, of equal ones the lowest rank last: the last one of each cell is its worst.
    order = np.lexsort((-np.arange(len(values)), filled, states, cell_of))
    cells = cell_of[order]
    last = np.append(cells[1:] != cells[:-1], True) if len(cells) else np.empty(0, dtype=bool)
    worst, place = order[last], cells[last]
    rank = np.full(num_cells, -1)
    state, value = np.zeros(num_cells, dtype=np.int64), np.full(num_cells, np.nan)
    rank[place], state[place], value[place] = worst, states[worst], values[worst]
    return Heat(rank=rank, state=state, value=value, level=scale.levels(value))


def numbers(found: Sequence[float | None]) -> ndarray:
    """Return the values as an array, NaN for None."""
    return np.array([np.nan if value is None else value for value in found], dtype=np.float64)
