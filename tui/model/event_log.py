"""All that a run said in words: its events and the ends of its logs, in bounded memory."""

from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path

from attrs import frozen

from xtrain.records.event import Event
from xtrain.tui.event_text import in_one_line
from xtrain.tui.model.log_tails import LogReader, LogTail

# Largest number of kept events; in a longer run the oldest are dropped, and counted.
MAX_ENTRIES = 5_000


@frozen(kw_only=True)
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
        for event in events:
            self._entries.append(_entry(self._count, event))
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


def _entry(place: int, event: Event) -> LogEntry:
    return LogEntry(
        number=place, time=event.time, step=event.step, kind=event.event, text=in_one_line(event), event=event
    )
