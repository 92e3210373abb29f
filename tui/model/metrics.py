"""Follower of `metrics.jsonl`, newest lines first, for a run and for all trials of a sweep."""

import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from attrs import frozen

from xtrain.records.lines import objects
from xtrain.records.names import METRICS_FILE
from xtrain.records.sweep import SweepState
from xtrain.regular_files import open_regular
from xtrain.text.units import number
from xtrain.tui.model.columns import Values
from xtrain.tui.model.series import Series

CHUNK = 512 << 10
BIG = 8 << 20
# Bytes of the end of a long file, and lines of the rest, that are read before anything is drawn.
END = 512 << 10
SAMPLES = 1024
SAMPLE_SECONDS = 0.25  # a file system may be slow: then there are fewer
# Bytes before an offset by which the file is recognized as the same up to there.
PRINT = 256


@frozen
class _Mark:
    """Number of steps before a byte offset; seal: digest of the bytes before it."""

    offset: int
    rows: int
    seal: int


class Metrics:
    """Reader of `path` into `series`. damaged: complete lines without a JSON object."""

    def __init__(self, path: Path, series: Series) -> None:
        self.path = path
        self.series = series
        self.damaged = 0
        self.begun_anew = 0
        """Number of times the file was replaced by another one."""
        self.behind = False
        """True if the last poll left records that it did not return."""
        self.newest = float("-inf")
        """Latest time of the returned records."""
        self._state: tuple[int, int, int, int] | None = None
        self._marks = [_Mark(0, 0, 0)]
        self._offset = 0  # bytes already in the columns
        self._front = 0  # bytes already returned as new records
        self._seal = 0
        self._known = float("-inf")  # records up to this time have been given out before

    @property
    def loading(self) -> float | None:
        """Share of the file that is in the columns; None once that is all of it."""
        size = self._state[2] if self.behind and self._state else self._front
        return self._offset / size if self._offset < size else None

    def poll(self, deadline: float) -> list[Values]:
        """Return new records in file order; for a long file first a sample and its end, and no more. Reads until
        `deadline` (`time.monotonic()`), and at least a little. Never raises because of the file."""
        try:
            with open_regular(self.path) as file:
                return self._read(file.fileno(), deadline)
        except OSError:
            return []  # not there yet, gone with its directory, or a file system that hiccups

    def _read(self, fd: int, deadline: float) -> list[Values]:
        status = os.fstat(fd)
        state, size = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns), status.st_size
        if self._state is not None and state != self._state:
            same = state[:2] == self._state[:2] and size >= self._front and _seal(fd, self._front) == self._seal
            if not same:
                self._begin_anew(fd, size)
        self._state = state
        new: list[Values] = []
        if size - self._front > BIG:
            new += self._look_ahead(fd, size)
            deadline = 0.0  # this is to be seen first
        while True:
            got = self._read_new(fd)
            new += got
            if not got or time.monotonic() >= deadline:
                break
        self.behind = bool(got)
        self._catch_up(fd, deadline)
        return list(self._unknown(new))

    def _begin_anew(self, fd: int, size: int) -> None:
        """Start over with another file; rows from the bytes that both have in common are kept."""
        self.begun_anew += 1
        while self._marks[-1].offset > size or self._marks[-1].seal != _seal(fd, self._marks[-1].offset):
            self._marks.pop()  # never the first one: any two files are the same up to byte 0
        mark = self._marks[-1]
        self.series.go_back(mark.rows)
        self._offset = self._front = mark.offset
        self._seal = mark.seal
        self._known = self.newest

    def _look_ahead(self, fd: int, size: int) -> list[Values]:
        """Return sampled lines of a long file, and its end in full."""
        end = os.pread(fd, END, size - END)
        begin = end.find(b"\n") + 1
        whole = end[begin : end.rfind(b"\n") + 1]
        if not begin or not whole:
            return []  # a line longer than all that: read it from the start
        last, _ = objects(whole)
        width = 3 * len(whole) // max(1, len(last))
        sample: dict[int, Values] = {}
        until = time.monotonic() + SAMPLE_SECONDS
        for place in _spread(SAMPLES):
            offset = self._front + int(place * (size - END - self._front))
            lines = os.pread(fd, max(width, 512), offset).split(b"\n")
            # The first is the rest of a line, unless one begins there, and the last one is cut.
            for record in objects(b"".join(lines[offset > self._front : -1][:1]))[0]:
                sample[offset] = record
            if time.monotonic() > until:
                break
        found = [sample[offset] for offset in sorted(sample)] + last
        self.series.glance(found)
        self._front = size - END + begin + len(whole)
        self._seal = _seal(fd, self._front)
        return found

    def _read_new(self, fd: int) -> list[Values]:
        """Return newly appended records, from at most one chunk."""
        block = _lines(fd, self._front, CHUNK)
        if not block:
            return []
        found, damaged = objects(block)
        if self._offset == self._front:
            self._take(fd, block, found, damaged)
        else:
            self.series.glance(found)
        self._front += len(block)
        self._seal = _seal(fd, self._front)
        return found

    def _catch_up(self, fd: int, deadline: float) -> None:
        """Read columns as time allows: first those of all records, then dropped ones that are viewed again."""
        while self._offset < self._front and time.monotonic() < deadline:
            block = _lines(fd, self._offset, min(CHUNK, self._front - self._offset))
            if not block:
                return
            self._take(fd, block, *objects(block))
        while self._offset == self._front and time.monotonic() < deadline and (wanted := self.series.wanting()):
            rows, keys = wanted
            place = next(i for i in reversed(range(len(self._marks))) if self._marks[i].rows <= rows)
            mark, following = self._marks[place], self._marks[place + 1 : place + 2]
            end, upto = (following[0].offset, following[0].rows) if following else (self._offset, len(self.series))
            found, _ = objects(os.pread(fd, end - mark.offset, mark.offset))
            self.series.complete(mark.rows, found, keys, upto)

    def _take(self, fd: int, block: bytes, found: list[Values], damaged: int) -> None:
        self.damaged += damaged
        self.series.extend(found)
        self._offset += len(block)
        if self._offset - self._marks[-1].offset >= CHUNK // 2:
            self._marks.append(_Mark(self._offset, len(self.series), _seal(fd, self._offset)))

    def _unknown(self, found: list[Values]) -> Iterator[Values]:
        """Yield the records that have not been returned before: a new file may repeat those of the previous one."""
        for record in found:
            when = number(record.get("time"))
            if when is not None and when <= self._known:
                continue
            self._known = float("-inf")
            self.newest = max(self.newest, when or self.newest)
            yield record


def _lines(fd: int, offset: int, size: int) -> bytes:
    """Return whole lines from a byte on: at most `size` bytes, unless the first line alone is longer."""
    block = os.pread(fd, size, offset)
    end = block.rfind(b"\n") + 1
    while not end and len(block) % size == 0 and (more := os.pread(fd, size, offset + len(block))):
        end = len(block) + more.rfind(b"\n") + 1 if b"\n" in more else 0
        block += more
    return block[:end]


def _seal(fd: int, offset: int) -> int:
    """Return a checksum of the bytes before `offset`."""
    begin = max(0, offset - PRINT)
    return zlib.crc32(os.pread(fd, offset - begin, begin))


def _spread(count: int) -> Iterator[float]:
    """Yield `count` positions from 0 to 1, of which the first few are already spread out."""
    bits = (count - 1).bit_length()
    for place in range(1 << bits):
        yield int(format(place, f"0{bits}b")[::-1], 2) / (1 << bits)


# Bytes of the columns of one trial: for a long one, drawn columns are kept, and a sketch of the others.
TRIAL_BYTES: Final = 4 << 20
# Seconds between two reads of a trial that is not training: its metrics no longer change.
REST_SECONDS: Final = 10.0


class TrialCurves:
    """Curves of the trials of the sweep in a folder. All polls must come from one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._readers: dict[str, Metrics] = {}
        self._looked: dict[str, float] = {}
        self.series: dict[str, Series] = {}
        """Series of the trials' runs, by name of the run; each is changed in place."""

    @property
    def version(self) -> int:
        """Changes whenever a curve does."""
        return len(self.series) + sum(each.version for each in self.series.values())

    def poll(self, sweep: SweepState, deadline: float) -> None:
        """Read until `deadline` (`time.monotonic()`), starting with the trial read longest ago."""
        now = time.monotonic()
        going = {each.name for each in sweep.trials.values() if each.status == "training"}
        names = (each.name for each in sweep.trials.values() if each.same_as is None and not each.reason)
        pause = {name: 0.0 if name in going else REST_SECONDS for name in names}
        due = [name for name, seconds in pause.items() if self._unread(name) or now - self._looked[name] >= seconds]
        for name in sorted(due, key=lambda name: self._looked.get(name, 0.0)):
            if name not in self._readers:
                self.series = {**self.series, name: Series(TRIAL_BYTES)}
                self._readers[name] = Metrics(self._folder / name / METRICS_FILE, self.series[name])
            self._readers[name].poll(deadline)
            self._looked[name] = time.monotonic()
            if self._looked[name] >= deadline:
                return

    def _unread(self, name: str) -> bool:
        return name not in self._looked or self._readers[name].loading is not None
