"""The records of a run directory, both files as one stream in time order."""

import heapq
from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from time import time as clock
from typing import Any

from xtrain.records.events import event_of
from xtrain.records.lines import read
from xtrain.records.metrics import StepMetrics
from xtrain.records.paths import EVENTS_FILE, METRICS_FILE
from xtrain.records.record import Record
from xtrain.tui.tail import CHUNK_BYTES, Tail

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
