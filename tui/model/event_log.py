"""Events of a run and the ends of its logs, in bounded memory."""

import os
import re
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path

from attrs import frozen

from xtrain.records.lines import Event
from xtrain.regular_files import open_regular
from xtrain.text.units import printable
from xtrain.tui.event_text import in_one_line

# Bytes read from the end of each log, and the largest number of logs: those of failed ranks, then the newest.
LOG_BYTES = 64 << 10
MAX_LOGS = 16
# Files that one look takes in, entries of a folder, and how deep below the folder of an attempt it goes.
MAX_LOOKED = 1000
MAX_RANKS = 20_000
DEPTH = 4
# Seconds between two scans for logs; and, for slow disks, at least this multiple of the last scan's time.
LOOK_SECONDS = 1.0
REST = 20.0

_ATTEMPT = re.compile(r"\d{8}-\d{6}-\d+")


@frozen(kw_only=True)
class LogTail:
    """End of a log. name: `rank 3 stderr`, `launcher.log`. cut: the file has earlier lines. size: bytes of the file."""

    name: str
    lines: tuple[str, ...]
    cut: bool
    size: int


@frozen
class _LogFile:
    """Existing log file. state: its size and modification time in nanoseconds."""

    path: str
    name: str
    rank: int | None
    state: tuple[int, int]


class LogReader:
    """Reader of the logs of a run."""

    def __init__(self, directory: Path) -> None:
        self._folder = str(directory / "logs")
        self._known: dict[str, tuple[tuple[int, int], LogTail]] = {}
        self._next = float("-inf")
        self.tails: tuple[LogTail, ...] = ()
        """Logs of failed ranks first, then by name, ranks by number; without empty logs."""

    def look(self, failed: Collection[int] = ()) -> bool:
        """Read the logs, at limited intervals; return True if anything is new. failed: ranks whose logs matter most.
        Unreadable files are left out."""
        now = time.monotonic()
        if now < self._next:
            return False
        files = self._chosen(failed)
        self._known = {each.path: self._tail(each) for each in files}
        took = time.monotonic() - now
        self._next = now + max(LOOK_SECONDS, REST * took)
        before, self.tails = self.tails, tuple(tail for _, tail in self._known.values())
        return self.tails != before

    def _chosen(self, failed: Collection[int]) -> list[_LogFile]:
        files = [each for each in islice(self._files(failed), MAX_LOOKED) if each.state[0]]
        files.sort(key=lambda each: (each.rank not in failed, -each.state[1]))
        return sorted(files[:MAX_LOGS], key=lambda each: (each.rank not in failed, each.rank or 0, each.name))

    def _files(self, failed: Collection[int]) -> Iterator[_LogFile]:
        """Yield the logs next to the attempts, and all of the newest attempt, those of failed ranks first."""
        attempts = []
        for entry in _entries(self._folder):
            if _is_folder(entry):
                attempts += [entry] if _ATTEMPT.fullmatch(entry.name) else []
            elif found := _log(entry, None):
                yield found
        if attempts:
            newest = max(attempts, key=lambda entry: entry.name)
            yield from _below(newest.path, None, failed, DEPTH)

    def _tail(self, file: _LogFile) -> tuple[tuple[int, int], LogTail]:
        known = self._known.get(file.path)
        if known is not None and known[0] == file.state:
            return known
        try:
            with open_regular(file.path) as log:
                size = os.fstat(log.fileno()).st_size
                block = os.pread(log.fileno(), LOG_BYTES, max(0, size - LOG_BYTES))
        except OSError:
            size, block = file.state[0], b""
        cut = size > LOG_BYTES
        text = printable(block.decode("utf-8", "replace"))
        lines = text.removesuffix("\n").split("\n")[cut:] if text else []
        return file.state, LogTail(name=file.name, lines=tuple(lines), cut=cut, size=size)


def _below(folder: str, rank: int | None, failed: Collection[int], depth: int) -> Iterator[_LogFile]:
    """Yield the logs below a folder. rank: owner of the folder; a folder named by a number belongs to that rank."""

    def first(entry: os.DirEntry[str]) -> tuple[bool, int, str]:
        number = _number(entry.name)
        return number not in failed, -1 if number is None else number, entry.name

    for entry in sorted(_entries(folder), key=first):
        if _is_folder(entry):
            if depth > 1:
                number = _number(entry.name)
                yield from _below(entry.path, rank if number is None else number, failed, depth - 1)
        elif found := _log(entry, rank):
            yield found


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(islice(entries, MAX_RANKS))
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _number(name: str) -> int | None:
    return int(name) if name.isascii() and name.isdigit() else None


def _log(entry: os.DirEntry[str], rank: int | None) -> _LogFile | None:
    """Return a file that is a log, else None."""
    if not entry.name.endswith(".log"):
        return None
    try:
        status = entry.stat()
    except OSError:
        return None
    name = entry.name if rank is None else f"rank {rank} {entry.name.removesuffix('.log')}"
    return _LogFile(entry.path, name, rank, (status.st_size, status.st_mtime_ns))


# Largest number of kept events; in a longer run the oldest are dropped, and counted.
MAX_ENTRIES = 5_000


@frozen
class LogEntry:
    """Event in the log. kind: `checkpoint`, `eval`, …; text: its text in one line."""

    number: int
    time: float | None
    step: int | None
    kind: str
    text: str
    event: Event


@frozen(kw_only=True)
class EventLog:
    """Events of a run, oldest first, and the ends of its logs. forgotten: number of older events that were dropped.

    version: changes with every change.
    """

    entries: tuple[LogEntry, ...] = ()
    logs: tuple[LogTail, ...] = ()
    forgotten: int = 0
    version: int = 0

    @property
    def kinds(self) -> dict[str, int]:
        """The kinds of events with their counts, in order of first occurrence."""
        found: dict[str, int] = {}
        for entry in self.entries:
            found[entry.kind] = found.get(entry.kind, 0) + 1
        return found

    def filtered(self, *, kinds: Collection[str] | None = None, text: str = "") -> tuple[LogEntry, ...]:
        """Return the entries of some kinds (None: all) that contain a text, ignoring case, oldest first."""
        wanted = text.casefold()
        return tuple(
            entry
            for entry in self.entries
            if (kinds is None or entry.kind in kinds)
            and (not wanted or wanted in entry.text.casefold() or wanted in entry.kind.casefold())
        )


class EventReader:
    """Reader of event logs: takes records as they arrive, and reads the files of `logs/`."""

    def __init__(self, directory: Path) -> None:
        self._entries: deque[LogEntry] = deque(maxlen=MAX_ENTRIES)
        self._count = 0
        self._logs = LogReader(directory)
        self._log = EventLog()

    def log(self) -> EventLog:
        """Return the event log so far; the same object while nothing is new."""
        return self._log

    def forget(self) -> None:
        """Drop all entries: another run is in the directory."""
        self._entries.clear()
        self._count = 0
        self._renew()

    def take(self, events: Iterable[Event]) -> None:
        """Take in events, in their order."""
        before = self._count
        for number, event in enumerate(events, start=before):
            self._entries.append(LogEntry(number, event.time, event.step, event.event, in_one_line(event), event))
            self._count += 1
        if self._count > before:
            self._renew()

    def look(self, failed: Collection[int] = ()) -> None:
        """Look at the logs, if that was not done just now. failed: ranks whose logs come first."""
        if self._logs.look(failed):
            self._renew()

    def _renew(self) -> None:
        self._log = EventLog(
            entries=tuple(self._entries),
            logs=self._logs.tails,
            forgotten=self._count - len(self._entries),
            version=self._log.version + 1,
        )
