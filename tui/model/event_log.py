"""All that a run said in words: its events and the ends of its logs, in bounded memory."""

import os
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from attrs import frozen

from ..events import text as plain
from ..events import whole
from ..tail import Record
from ..telling import in_one_line
from ..words import number, printable

# Most events that are kept; of a longer run the oldest are let go, and counted.
MAX_ENTRIES = 5_000
# Of each file of logs/ the last so many bytes are looked at, of at most so many files, those written last.
LOG_BYTES = 64 << 10
MAX_LOGS = 16
# Between two looks for log files.
LOOK_SECONDS = 1.0


@frozen(kw_only=True)
class Entry:
    """One event. kind: `checkpoint`, `eval`, …; text: what it says, in one line; record: as it was written."""

    number: int
    time: float | None
    step: int | None
    kind: str
    text: str
    record: Mapping[str, Any]


@frozen(kw_only=True)
class LogTail:
    """The end of a file of `logs/`. cut: whether there is more before it. size: bytes of the file."""

    name: str
    lines: tuple[str, ...]
    cut: bool
    size: int


@frozen(kw_only=True)
class EventLog:
    """The events of a run, oldest first, and its logs by name. forgotten: how many older events were let go.

    version: changes with every change.
    """

    entries: tuple[Entry, ...] = ()
    logs: tuple[LogTail, ...] = ()
    forgotten: int = 0
    version: int = 0

    @property
    def kinds(self) -> dict[str, int]:
        """The kinds of events that are there, and how many of each, in the order of their first."""
        found: dict[str, int] = {}
        for entry in self.entries:
            found[entry.kind] = found.get(entry.kind, 0) + 1
        return found

    def filtered(self, *, kinds: Collection[str] | None = None, text: str = "") -> tuple[Entry, ...]:
        """The entries of some kinds (None: of all) that hold a text, in whatever case, oldest first."""
        wanted = text.casefold()
        return tuple(
            entry
            for entry in self.entries
            if (kinds is None or entry.kind in kinds)
            and (not wanted or wanted in entry.text.casefold() or wanted in entry.kind.casefold())
        )


class EventReader:
    """Makes event logs: takes records as they come, and looks at the files of `logs/`."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "logs"
        self._entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)
        self._count = 0
        self._logs: dict[str, tuple[tuple[int, int], LogTail]] = {}
        self._looked = -LOOK_SECONDS
        self._made = EventLog()

    def log(self) -> EventLog:
        """Everything so far, as a value; the same one while nothing is new."""
        return self._made

    def forget(self) -> None:
        """The run in the directory is another one."""
        self._entries.clear()
        self._count = 0
        self._make()

    def take(self, records: Iterable[Record]) -> None:
        """Take in events, in their order."""
        before = self._count
        for record in records:
            self._entries.append(_entry(self._count, record))
            self._count += 1
        if self._count > before:
            self._make()

    def look(self) -> None:
        """Look at the logs, if that was not done just now. What cannot be read is left out."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        found = {name: self._tail(name, state) for name, state in self._files()}
        if found != self._logs:
            self._logs = found
            self._make()

    def _files(self) -> list[tuple[str, tuple[int, int]]]:
        """Names, sizes and times of the logs written last, by name."""
        try:
            with os.scandir(self._folder) as entries:
                states = [(each.name, each.stat()) for each in islice(entries, 1000) if each.name.endswith(".log")]
        except OSError:
            return []
        states.sort(key=lambda each: -each[1].st_mtime_ns)
        return sorted((name, (state.st_size, state.st_mtime_ns)) for name, state in states[:MAX_LOGS])

    def _tail(self, name: str, state: tuple[int, int]) -> tuple[tuple[int, int], LogTail]:
        known = self._logs.get(name)
        if known is not None and known[0] == state:
            return known
        try:
            with (self._folder / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                block = os.pread(file.fileno(), LOG_BYTES, max(0, size - LOG_BYTES))
        except OSError:
            size, block = state[0], b""
        cut = size > LOG_BYTES
        text = printable(block.decode("utf-8", "replace"))
        lines = text.removesuffix("\n").split("\n")[cut:] if text else []
        return state, LogTail(name=name, lines=tuple(lines), cut=cut, size=size)

    def _make(self) -> None:
        self._made = EventLog(
            entries=tuple(self._entries),
            logs=tuple(tail for _, tail in self._logs.values()),
            forgotten=self._count - len(self._entries),
            version=self._made.version + 1,
        )


def _entry(place: int, record: Record) -> Entry:
    return Entry(
        number=place,
        time=number(record.get("time")),
        step=whole(record.get("step")),
        kind=plain(record.get("event")),
        text=in_one_line(record),
        record=record,
    )
