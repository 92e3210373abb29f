"""Numbers in columns: what grows by a step now and then, is drawn again and again, and must not be copied for it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy import ndarray

from xtrain.text.units import number

FLOAT = np.float64
_WORDS = frozenset({"nan", "inf", "-inf"})
# Points of a sketch, and how many of the newest are never thinned.
SKETCH_POINTS = 4096
SKETCH_RECENT = 1024


class Growing:
    """Growing array. Views handed out earlier do not change."""

    def __init__(self, dtype: type = FLOAT) -> None:
        self._room = np.empty(256, dtype)
        self.size = 0

    @property
    def view(self) -> ndarray:
        return self._room[: self.size]

    @property
    def num_bytes(self) -> int:
        # Room that was never written to takes no memory yet.
        return self.size * self._room.itemsize

    def extend(self, values: ndarray) -> None:
        size = self.size + len(values)
        if size > len(self._room):
            room = np.empty(max(size, 2 * len(self._room)), self._room.dtype)
            room[: self.size] = self.view
            self._room = room
        self._room[self.size : size] = values
        self.size = size

    def cut(self, size: int) -> None:
        """Keep the first `size` values. Views handed out earlier keep their values."""
        if size < self.size:
            self._room = self._room[:size].copy()
            self.size = size


class Column:
    """Finite numbers of one key, each at its row. A key that every record has stores no rows.

    upto: number of rows read for this key; the column is complete if that is all of them.
    """

    def __init__(self) -> None:
        self.values = Growing()
        self._rows: Growing | None = None
        self.upto = 0

    @property
    def dense(self) -> bool:
        """True if row i has value i."""
        return self._rows is None

    @property
    def rows(self) -> ndarray:
        return np.arange(self.values.size) if self._rows is None else self._rows.view

    @property
    def num_bytes(self) -> int:
        return self.values.num_bytes + (self._rows.num_bytes if self._rows else 0)

    def extend(self, rows: ndarray, values: ndarray, upto: int) -> None:
        """Append values at ascending rows, none before the last one; a value at the last row replaces it."""
        finite = np.isfinite(values)
        if not finite.all():
            rows, values = rows[finite], values[finite]
        if len(rows):
            self._append(rows, values)
        self.upto = upto

    def _append(self, rows: ndarray, values: ndarray) -> None:
        if len(rows) > 1 and (rows[1:] == rows[:-1]).any():  # of one row the last word counts
            final = np.append(rows[1:] != rows[:-1], True)
            rows, values = rows[final], values[final]
        size = self.values.size
        last = -1 if not size else (size - 1 if self._rows is None else int(self._rows.view[-1]))
        if rows[0] == last:
            self.cut_at(last)
            size -= 1
        if self._rows is None and (rows[0] != size or rows[-1] != size + len(rows) - 1):
            self._rows = Growing(np.int32)
            self._rows.extend(np.arange(size))
        self.values.extend(values)
        if self._rows is not None:
            self._rows.extend(rows)

    def cut_at(self, row: int) -> None:
        """Drop that row and all later ones."""
        size = row if self._rows is None else int(np.searchsorted(self._rows.view, row))
        self.values.cut(size)
        if self._rows is not None:
            self._rows.cut(size)
        self.upto = min(self.upto, row)

    def with_inserted(self, row: int, new: bool, value: float) -> "Column":
        """Return this column with a late record. new: the row is inserted between existing ones. An existing value is
        kept."""
        rows, values = self.rows.copy(), self.values.view
        if new:
            rows[rows >= row] += 1
        place = int(np.searchsorted(rows, row))
        if np.isfinite(value) and not (place < len(rows) and rows[place] == row):
            rows, values = np.insert(rows, place, row), np.insert(values, place, value)
        column = Column()
        column.extend(rows, values, self.upto + new)
        return column


class Sketch:
    """Subset of the points of a key by step: as many as a plot can show, the newest exactly."""

    def __init__(self, steps: ndarray | None = None, values: ndarray | None = None) -> None:
        self.steps, self.values = Growing(), Growing()
        if steps is not None and values is not None:
            stride = max(1, -(-len(steps) // (SKETCH_POINTS // 2)))
            self._take(steps, values, stride)

    def add(self, steps: ndarray, values: ndarray) -> None:
        """Append points after the existing ones."""
        if self.steps.size:
            ahead = steps > self.steps.view[-1]
            steps, values = steps[ahead], values[ahead]
        self.steps.extend(steps)
        self.values.extend(values)
        if self.steps.size > SKETCH_POINTS:
            self._take(self.steps.view, self.values.view, 2)

    def cut(self, step: float) -> None:
        """Drop that step and all later ones."""
        size = int(np.searchsorted(self.steps.view, step))
        self.steps.cut(size)
        self.values.cut(size)

    def _take(self, steps: ndarray, values: ndarray, stride: int) -> None:
        recent = max(0, len(steps) - SKETCH_RECENT)
        self.steps, self.values = Growing(), Growing()
        self.steps.extend(np.concatenate([steps[:recent:stride], steps[recent:]]))
        self.values.extend(np.concatenate([values[:recent:stride], values[recent:]]))


def floats(values: Sequence[Any]) -> ndarray | None:
    """Return the values of a key as float64, NaN where one is not a number; None if the key is not numeric."""
    first = values[0]
    if isinstance(first, list | dict):
        return None
    found = None
    if not isinstance(first, str):
        with suppress(ValueError, OverflowError):  # of uneven lengths, or beyond all floats
            found = np.array(values)
    if found is not None and found.ndim == 1:
        if found.dtype == FLOAT:
            return found
        if found.dtype.kind in "iuf":
            return found.astype(FLOAT)
    if not any(map(_is_meant_as_number, values)):
        return None
    return np.array([_float(value) for value in values], FLOAT)


def _is_meant_as_number(value: Any) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)) or (
        isinstance(value, str) and value in _WORDS
    )


def _float(value: Any) -> float:
    if not _is_meant_as_number(value):
        return float("nan")
    try:
        return float(value)
    except OverflowError:  # an integer beyond all floats
        return float("nan")


# A record of `metrics.jsonl` as it stands there: of a column all keys are alike.
Values = dict[str, Any]


def by_key(run: list[Values]) -> list[tuple[str, Any, ndarray]]:
    """Return each key with numbers, the indices of its records, and its values."""
    shapes = dict.fromkeys(map(tuple, run))
    keys = dict.fromkeys(key for shape in shapes for key in shape if key != "step")
    found: list[tuple[str, Any, ndarray]] = []
    for key in keys:
        if all(key in shape for shape in shapes):
            where, values = slice(None), [record[key] for record in run]
        else:
            pairs = [(place, record[key]) for place, record in enumerate(run) if key in record]
            where, values = np.array([place for place, _ in pairs]), [value for _, value in pairs]
        numbers = floats(values)
        if numbers is not None:
            found.append((key, where, numbers))
    return found


EVALUATIONS = ("eval/", "eval_", "final/")  # beginnings of keys


def is_evaluation(record: Values) -> bool:
    """Return True if a record holds only losses of evaluations, and nothing of a step."""
    return all(key in ("step", "time") or key.startswith(EVALUATIONS) for key in record)


def last_own(records: Sequence[Values]) -> int:
    """Return the index of the first record of the last step that has more than an evaluation."""
    place = len(records) - 1
    while place > 0 and is_evaluation(records[place]):
        place -= 1
    while place > 0 and records[place - 1]["step"] == records[place]["step"]:
        place -= 1
    return max(place, 0)


def seconds_after(record: Values, last: Mapping[str, Any]) -> float:
    """Return how much later `record` was written than `last`, by the clock of its writer."""
    return (number(record.get("time")) or 0.0) - (number(last.get("time")) or 0.0)
