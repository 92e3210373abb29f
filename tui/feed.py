"""Records of a run directory as one stream in time order, read as its files grow, and a bounded history of steps."""

import heapq
import os
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from itertools import islice
from operator import itemgetter
from pathlib import Path
from statistics import median
from time import time as clock
from typing import Any

from attrs import frozen

from xtrain.records.events import event_of
from xtrain.records.lines import Record, objects, read
from xtrain.records.metrics import StepMetrics
from xtrain.records.names import EVENTS_FILE, METRICS_FILE
from xtrain.regular_files import open_regular

# Most bytes parsed in one read: catching up with a long run stays bounded in memory.
CHUNK_BYTES = 4 << 20
LONGEST_LINE = 64 << 20  # bytes


class Tail:
    """Reader of the JSON objects in complete lines appended to `path` since the last read, beginning at byte `offset`.

    The offset only moves past whole lines, so a partial line (or partial character) is read again once the rest has
    been written. A file that shrank or was replaced is another file, read from its start.
    """

    def __init__(self, path: Path, offset: int = 0, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.path = path
        self.offset = offset
        self.chunk_bytes = chunk_bytes
        self.damaged = 0
        """Complete lines without a JSON object."""
        self.behind = False
        """True if the last read stopped at `chunk_bytes` with more already written."""
        self.begun_anew = 0
        """Number of times the file was replaced by another one."""
        self._inode: tuple[int, int] | None = None

    def read(self) -> list[dict[str, Any]]:
        """Return new objects in file order; empty if there are none or the file cannot be read now."""
        try:
            block = self._read_lines()
        except OSError:
            # Not there yet, gone with its directory, or a file system that hiccups: the next read decides.
            self.behind = False
            return []
        found, damaged = objects(block)
        self.damaged += damaged
        return found

    def _read_lines(self) -> bytes:
        """Return whole lines after the offset, at most `chunk_bytes` unless one line alone is longer."""
        with open_regular(self.path) as file:
            status = os.fstat(file.fileno())
            inode = (status.st_dev, status.st_ino)
            if status.st_size < self.offset or self._inode not in (None, inode):
                self.offset = 0
                self.begun_anew += 1
            self._inode = inode
            file.seek(self.offset)
            data = file.read(self.chunk_bytes)
            end = data.rfind(b"\n") + 1
            while not end and len(data) < LONGEST_LINE and (more := file.read(self.chunk_bytes)):
                end = len(data) + more.rfind(b"\n") + 1 if b"\n" in more else 0
                data += more
            if not end and len(data) >= LONGEST_LINE:  # no record, nor what follows, which may be without end
                self.offset, self.behind = status.st_size, False
                self.damaged += 1
                return b""
            self.behind = file.tell() < status.st_size
        self.offset += end
        return data[:end]


_Timed = tuple[float, Record]


class _Lane:
    """Reader of one file, whose records get the times that order them."""

    def __init__(self, tail: Tail, typed: Callable[[dict[str, Any]], Record]) -> None:
        self.tail = tail
        self._typed = typed
        self.waiting: list[_Timed] = []
        self._latest = float("-inf")
        self._begun_anew = 0
        self._known = float("-inf")
        # Records before the offset were written earlier and are not wanted.
        self._unwanted = clock() if tail.offset else float("-inf")

    def take(self) -> bool:
        """Read on, unless records are still held back (so that memory stays bounded). Says whether any came."""
        if self.waiting and self.tail.behind:
            return False
        records = [self._typed(found) for found in self.tail.read()]
        if self.tail.begun_anew != self._begun_anew:
            # A run that goes back takes the discarded steps out of its file: those that are left have been read before.
            self._begun_anew, self._known = self.tail.begun_anew, max(self._latest, self._unwanted)
        for record in records:
            when = record.time
            if when is not None and when <= self._known:
                continue
            self._known = float("-inf")
            # A clock set back must not reorder a file: its own order is what happened.
            self._latest = max(self._latest, when or self._latest)
            self.waiting.append((self._latest, record))
        return bool(records)

    @property
    def horizon(self) -> float:
        """Lower bound on the times of unread records of this file, among those written so far."""
        return self._latest if self.tail.behind else float("inf")

    def release(self, until: float) -> list[_Timed]:
        ready = [timed for timed in self.waiting if timed[0] <= until]
        del self.waiting[: len(ready)]
        return ready


class RecordFeed:
    """Reader of `metrics.jsonl` and `events.jsonl` of `directory`, starting at `offsets` (file name → byte)."""

    def __init__(
        self, directory: Path, offsets: Mapping[str, int] | None = None, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        first = offsets or {}
        metrics, events = (
            Tail(directory / name, first.get(name, 0), chunk_bytes=chunk_bytes) for name in (METRICS_FILE, EVENTS_FILE)
        )
        self._metrics = _Lane(metrics, lambda found: read(StepMetrics, found))
        self._events = _Lane(events, event_of)
        self.newest: float | None = None
        """Time of the newest record returned."""

    @property
    def damaged(self) -> int:
        """Lines in both files that held no JSON object."""
        return self._metrics.tail.damaged + self._events.tail.damaged

    @property
    def behind(self) -> bool:
        """True if more was already written than the last read returned."""
        lanes = (self._metrics, self._events)
        return any(lane.tail.behind or lane.waiting for lane in lanes)

    def read(self) -> list[Record]:
        """Return the next records in time order; at equal times a step comes before the events that followed it."""
        self._metrics.take()
        if self._events.take():
            # An event may close over steps logged between the two reads above: `run_end` must not overtake the last.
            self._metrics.take()
        until = min(self._metrics.horizon, self._events.horizon)
        lanes = (self._metrics.release(until), self._events.release(until))
        merged = list(heapq.merge(*lanes, key=itemgetter(0)))
        if merged and merged[-1][0] > float("-inf"):
            self.newest = merged[-1][0]
        return [record for _, record in merged]


MAX_POINTS = 2000
RECENT_STEPS = 64

Point = tuple[int, float]
NOTHING = StepMetrics(step=None, time=None)


@frozen(kw_only=True)
class History:
    """The logged steps of one attempt so far."""

    last: StepMetrics = NOTHING
    """The metrics record with the highest step of those with a loss."""
    at: tuple[int, float] | None = None
    """The highest step of any record, with a loss or without, and the time of that record."""
    curve: tuple[Point, ...] = ()
    """(step, loss), finite losses only, every `stride`-th one: at most `MAX_POINTS`."""
    stride: int = 1
    num_seen: int = 0
    recent: tuple[float, ...] = ()
    """Seconds per step, by the wall clock, between each of the latest records and the one before it."""
    gap: float | None = None
    """Seconds between the latest two records: how long the next one may be expected to take."""
    origin: StepMetrics | None = None
    """The first metrics record of this attempt."""

    @property
    def step(self) -> int | None:
        return self.at[0] if self.at else None

    @property
    def seconds_per_step(self) -> float | None:
        """Median seconds per step over recent steps, so that an evaluation or a checkpoint in between has little
        effect."""
        return median(self.recent) if self.recent else self.last.step_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second over all steps of this attempt, including the time between them."""
        first, last = self.origin or NOTHING, self.last
        if None not in (first.time, last.time, first.tokens, last.tokens) and last.time > first.time:  # type: ignore[operator]
            return (last.tokens - first.tokens) / (last.time - first.time)  # type: ignore[operator]
        return last.tokens_per_second

    def points(self) -> tuple[Point, ...]:
        """Return the curve up to the latest loss, which the stride may have left out."""
        loss, step = self.last.loss, self.last.step
        if step is None or loss is None or loss - loss != 0 or (self.curve and self.curve[-1][0] >= step):
            return self.curve
        return (*self.curve, (step, loss))

    def rewound(self, step: int | None) -> "History":
        """Return the history that remains when an attempt resumes after `step` (None: from scratch), without a measured
        pace."""
        if step is None:
            return History()
        curve = tuple(point for point in self.curve if point[0] <= step)
        last = self.last if (self.last.step or 0) <= step else NOTHING
        at = self.at if self.at and self.at[0] <= step else None
        return History(last=last, at=at, curve=curve, stride=self.stride, num_seen=self.num_seen)


class HistoryRecorder:
    """Recorder that adds metrics records to a `History`; mutable, so that a million of them cost little."""

    def __init__(self, history: History) -> None:
        self._last, self._at, self._gap, self._origin = history.last, history.at, history.gap, history.origin
        self._curve, self._recent = list(history.curve), list(history.recent)
        self._stride, self._num_seen = history.stride, history.num_seen

    def history(self) -> History:
        """Return the history so far, as a value."""
        return History(
            last=self._last,
            at=self._at,
            curve=tuple(self._curve),
            stride=self._stride,
            num_seen=self._num_seen,
            recent=tuple(self._recent[-RECENT_STEPS:]),
            gap=self._gap,
            origin=self._origin,
        )

    def add(self, record: StepMetrics) -> None:
        """Take one record in.

        A step that is not ahead of the last one is a straggler if it is also older, and only completes the curve. If
        it is newer the run went back (it was resumed from an earlier checkpoint), and what came after it is forgotten.
        One without a loss, of a step that was left out, counts for how far the run is and how fast; it is on no curve.
        """
        step = record.step
        if step is None:
            return
        now = record.time or 0.0
        if self._at is not None:
            last_step, before = self._at
            elapsed = now - before
            if step > last_step:
                self._pace(elapsed, step - last_step)
            elif elapsed < 0:
                self._plot(step, record.loss)
                return
            else:
                self._go_back(step)
        if self._origin is None:
            self._origin = record
        self._at = step, now
        if record.loss is not None:
            self._last = record
            self._plot(step, record.loss)

    def _pace(self, elapsed: float, num_steps: int) -> None:
        # Without an origin the last record is another attempt's: the time since then was not spent training.
        if elapsed <= 0 or self._origin is None:
            return
        self._gap = elapsed
        self._recent.append(elapsed / num_steps)
        if len(self._recent) > 4 * RECENT_STEPS:
            del self._recent[:-RECENT_STEPS]

    def _go_back(self, step: int) -> None:
        del self._curve[bisect_left(self._curve, (step,)) :]
        if (self._last.step or 0) >= step:
            self._last = NOTHING
        self._recent.clear()
        self._gap = None
        self._origin = None

    def _plot(self, step: int, value: float | None) -> None:
        if value is None or value - value != 0:  # infinities and NaN have no place on a curve
            return
        self._num_seen += 1
        if (self._num_seen - 1) % self._stride:
            return
        curve = self._curve
        if not curve or step > curve[-1][0]:
            curve.append((step, value))
        elif curve[bisect_left(curve, (step,))][0] != step:  # a straggler that has not come before
            insort(curve, (step, value))
        if len(curve) > MAX_POINTS:
            self._curve = list(islice(curve, 0, None, 2))
            self._stride *= 2
