"""All that a run said in words: its events and the ends of its logs, in bounded memory."""

from collections.abc import Collection, Mapping
from typing import Any

from attrs import frozen

# Most events that are kept; of a longer run the oldest are let go, and counted.
MAX_ENTRIES = 20_000
# Of each file of logs/ the last so many bytes are looked at.
LOG_BYTES = 64 << 10


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
