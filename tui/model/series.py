"""The logged steps of a run as columns: exact, up to millions of them, in bounded memory.

All columns are kept as long as they fit in a number of bytes. Of a longer run those are kept whole that somebody looks
at; of the others a sketch remains, which is drawn until the column has been read again from the file (`metrics.py`).
"""

import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy import ndarray

from xtrain.records.lines import read
from xtrain.records.metrics import StepMetrics
from xtrain.tui.model.columns import (
    Column,
    Growing,
    Sketch,
    Values,
    by_key,
    floats,
    is_evaluation,
    last_own,
    seconds_after,
)

By = Literal["step", "tokens", "time"]

# Bytes of all columns together: at a million steps, this is four columns in addition to the steps.
LIMIT_BYTES = 40 << 20
# A column requested within this many seconds is not dropped for another one.
ASKED_SECONDS = 10.0
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_EMPTY = np.empty(0)


class Series:
    """Numbers of `metrics.jsonl`, one column per key, ordered by step.

    Each step occurs once: records of the same step are merged (in runs of earlier versions an evaluation may have its
    own), and when the run goes back, later steps are dropped. One thread changes the series in place while others read
    it; `version` changes with every change.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.version = 0
        self._limit = limit_bytes
        self._lock = threading.RLock()
        self._steps = Growing()
        self._columns: dict[str, Column] = {}
        self._sketches: dict[str, Sketch] = {}
        self._asked: dict[str, float] = {}
        self._latest: dict[str, tuple[float, float]] = {}  # step and value
        self._keys: dict[str, None] = {}
        self._gone: set[str] = set()
        self._drawn: dict[tuple[str, By], tuple[int, ndarray, ndarray]] = {}
        self._last: Mapping[str, Any] = _NOTHING
        self._last_read = _NOTHING, StepMetrics(step=None, time=None)

    def __len__(self) -> int:
        """Return the number of steps."""
        return self._steps.size

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys with numbers, in order of first occurrence, without `step` and `time`."""
        return tuple(key for key in self._keys if key != "time")

    @property
    def last(self) -> StepMetrics:
        """Newest record of a step, including lists and texts, with evaluations of that step.

        An evaluation in a step that was not logged does not count: see `latest`.
        """
        values, record = self._last_read
        if values is not self._last:
            values = self._last
            record = read(StepMetrics, {**values})
            self._last_read = values, record
        return record

    def xy(self, key: str, by: By = "step") -> tuple[ndarray, ndarray]:
        """Return positions and values: two float64 arrays of equal length, positions ascending, all values finite.

        by: steps, tokens since the beginning, or seconds since 1970. Both are empty for an unknown key. The arrays are
        read-only and do not change later. For a long run they may hold a part of the points at first.
        """
        with self._lock:
            self._asked[key] = time.monotonic()
            if by == "step":
                return self._points(key)
            self._asked[by] = self._asked[key]
            version, *drawn = self._drawn.get((key, by), (-1, _EMPTY, _EMPTY))
            if version != self.version:
                drawn = self._along(key, by)
                self._drawn[key, by] = self.version, *drawn
            return drawn[0], drawn[1]

    def latest(self, key: str) -> float | None:
        """Return the newest finite value of a key, of any age; None without one."""
        found = self._latest.get(key)
        return None if found is None else found[1]

    def extend(self, records: Sequence[Values]) -> None:
        """Take in records in the order of the file; those without a whole `step` are left out."""
        found = [record for record in records if type(record.get("step")) is int]
        if not found:
            return
        with self._lock:
            steps = np.array([record["step"] for record in found], np.float64)
            begins = [0, *(np.flatnonzero(steps[1:] < steps[:-1]) + 1).tolist(), len(found)]
            for begin, end in pairwise(begins):
                self._take(found[begin:end], steps[begin:end])
            self._let_go()
            self.version += 1

    def glance(self, records: Sequence[Values]) -> None:
        """Add some records of a long run, in order, before all are read: to the sketches, and as the newest."""
        found = [record for record in records if type(record.get("step")) is int]
        if not found:
            return
        with self._lock:
            steps = np.array([record["step"] for record in found], np.float64)
            for key, rows, values in by_key(found):
                self._sketches.setdefault(key, Sketch()).add(steps[rows], values)
                self._note(key, steps[rows], values)
            self._renew_last(found)
            self.version += 1

    def go_back(self, rows: int) -> None:
        """Keep the first `rows` steps, of those that have been read, and nothing that was glanced at."""
        with self._lock:
            self._cut(min(rows, len(self)))
            self.version += 1

    def wanting(self) -> tuple[int, tuple[str, ...]] | None:
        """Return the viewed columns that are incomplete and for which there is room, and the number of rows they all
        have; None without such columns."""
        with self._lock:
            now, size = time.monotonic(), len(self)
            missing = [key for key in self._gone if now - self._asked.get(key, -np.inf) < ASKED_SECONDS]
            missing.sort(key=self._upto, reverse=True)  # finish started columns first
            if not missing:
                return None
            self._let_go(room=8 * size * len(missing))
            room = self._limit - self._num_bytes()
            fitting: list[str] = []
            for key in missing:
                room -= 8 * (size - self._upto(key))
                if room >= 0:
                    fitting.append(key)
            if not fitting:
                return None
            rows = min(map(self._upto, fitting))
            return rows, tuple(key for key in fitting if self._upto(key) == rows)

    def complete(self, rows: int, records: Sequence[Values], keys: Sequence[str], upto: int) -> None:
        """Add `keys` of records at or after row `rows`, up to row `upto`, which were dropped before."""
        found = [record for record in records if type(record.get("step")) is int]
        with self._lock:
            upto = min(upto, len(self))
            places = np.searchsorted(self._steps.view, [record["step"] for record in found]).tolist()
            # A record may belong to the row before: an evaluation that came after the step's own.
            inside = [pair for pair in zip(found, places, strict=True) if rows - 1 <= pair[1] < upto]
            for key in keys:
                column = self._columns.setdefault(key, Column())
                column.cut_at(rows)
                values = {place: record[key] for record, place in inside if key in record}
                numbers = floats(list(values.values())) if values else None
                if numbers is None:
                    column.upto = upto
                else:
                    order = np.argsort(list(values), kind="stable")
                    column.extend(np.array(list(values))[order], numbers[order], upto)
                if column.upto == len(self):
                    self._gone.discard(key)
            self.version += 1

    def _along(self, key: str, by: By) -> tuple[ndarray, ndarray]:
        """Return values over another axis than steps, interpolated where the axis has no value of its own."""
        steps, values = self._points(key)
        where, axis = self._points(by)
        if not len(where):
            return _EMPTY, _EMPTY
        if not np.array_equal(where, steps):
            axis = np.interp(steps, where, axis)
        return np.maximum.accumulate(axis), values  # a clock may have been set back between two starts of the run

    def _points(self, key: str) -> tuple[ndarray, ndarray]:
        """Return steps and values, from the sketch as long as it has more than has been read."""
        column, sketch = self._columns.get(key), self._sketches.get(key)
        if sketch is not None and (self._upto(key) < len(self) or self._is_behind(sketch)):
            return sketch.steps.view, sketch.values.view
        if column is None:
            return _EMPTY, _EMPTY
        if column.dense:
            return self._steps.view[: column.values.size], column.values.view
        return self._steps.view[column.rows], column.values.view

    def _is_behind(self, sketch: Sketch) -> bool:
        """Return True if the sketch has steps that have not been read yet."""
        return sketch.steps.size > 0 and (not len(self) or sketch.steps.view[-1] > self._steps.view[-1])

    def _upto(self, key: str) -> int:
        column = self._columns.get(key)
        return 0 if column is None else column.upto

    def _take(self, run: list[Values], steps: ndarray) -> None:
        """Add records with ascending steps."""
        size = len(self)
        last = self._steps.view[-1] if size else -np.inf
        late = 0
        while late < len(run) and steps[late] < last and seconds_after(run[late], self._last) < 0:
            late += 1
        if late:
            self._insert(run[:late])
            run, steps, size = run[late:], steps[late:], len(self)
            if not run:
                return
        if steps[0] < last:
            self._cut(int(np.searchsorted(self._steps.view, steps[0])))
            size = len(self)
            last = self._steps.view[-1] if size else -np.inf
        new = np.append(steps[0] != last, steps[1:] != steps[:-1])
        rows = np.cumsum(new) + (size - 1)
        self._steps.extend(steps[new])
        for key, places, values in by_key(run):
            if key not in self._columns and key not in self._gone:
                self._columns[key] = Column()
                self._columns[key].upto = size
            if key not in self._gone:
                self._columns[key].extend(rows[places], values, len(self))
            elif key in self._sketches:
                finite = np.isfinite(values)
                self._sketches[key].add(steps[places][finite], values[finite])
            self._note(key, steps[places], values)
        for key, column in self._columns.items():
            if key not in self._gone:
                column.upto = len(self)
        self._renew_last(run)

    def _note(self, key: str, steps: ndarray, values: ndarray) -> None:
        self._keys.setdefault(key)
        finite = np.flatnonzero(np.isfinite(values))
        if len(finite):
            step = float(steps[finite[-1]])
            if key not in self._latest or step >= self._latest[key][0]:
                self._latest[key] = step, float(values[finite[-1]])

    def _renew_last(self, records: Sequence[Values]) -> None:
        for record in records[last_own(records) :]:
            before = self._last.get("step", -1)
            if record["step"] == before:
                self._last = MappingProxyType({**self._last, **record})
            elif record["step"] > before and not is_evaluation(record):
                self._last = MappingProxyType(record)

    def _insert(self, records: list[Values]) -> None:
        """Insert late records: each completes its step, or becomes a step between others."""
        for record in records:
            row = int(np.searchsorted(self._steps.view, record["step"]))
            missing = self._steps.view[row] != record["step"]
            if missing:
                steps = np.insert(self._steps.view, row, record["step"])
                self._steps = Growing()
                self._steps.extend(steps)
            numbers = {key: float(value[0]) for key, _, value in by_key([record])}
            for key in numbers.keys() - self._gone - self._columns.keys():
                self._columns[key] = Column()
                self._columns[key].upto = len(self) - missing
            for key, column in list(self._columns.items()):
                if row <= column.upto:
                    self._columns[key] = column.with_inserted(row, missing, numbers.get(key, np.nan))
            for key, value in numbers.items():
                if record["step"] > self._latest.get(key, (-1, 0))[0]:
                    self._note(key, np.array([record["step"]]), np.array([value]))

    def _cut(self, rows: int) -> None:
        """Drop all rows from that one on, and everything after them."""
        step = self._steps.view[rows] if rows < len(self) else self._steps.view[-1] + 0.5 if rows else -np.inf
        self._steps.cut(rows)
        for column in self._columns.values():
            column.cut_at(rows)
        for sketch in self._sketches.values():
            sketch.cut(step)
        self._latest = {key: found for key, found in self._latest.items() if found[0] < step}
        for key in self._keys.keys() - self._latest.keys():
            steps, values = self._points(key)
            if len(steps):
                self._latest[key] = float(steps[-1]), float(values[-1])
        if self._last.get("step", -1) >= step:
            self._last = _NOTHING

    def _num_bytes(self) -> int:
        return self._steps.num_bytes + sum(column.num_bytes for column in self._columns.values())

    def _let_go(self, room: int = 0) -> None:
        """Drop columns that were not requested lately, largest first, until the others and `room` fit."""
        excess = self._num_bytes() + room - self._limit
        if excess <= 0:
            return
        now = time.monotonic()
        # Among equals, keys that a record names last are dropped: the most viewed keys come first.
        idle = [key for key in reversed(self._keys) if now - self._asked.get(key, -np.inf) > ASKED_SECONDS]
        idle = [key for key in idle if key in self._columns]
        for key in sorted(idle, key=lambda key: -self._columns[key].num_bytes):
            if excess <= 0:
                return
            column = self._columns[key]
            steps = self._steps.view[column.rows]
            sketch = Sketch(steps, column.values.view)
            if (known := self._sketches.get(key)) is not None:  # the sketch's points for steps that are not read yet
                sketch.add(known.steps.view, known.values.view)
            self._sketches[key] = sketch
            excess -= column.num_bytes
            del self._columns[key]
            self._gone.add(key)
