"""The live view on a terminal: start-up line by line, a moving line while training, a panel at the end."""

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from ...records.event import Event
from ...records.record import Record
from ..state import RunState
from .drawer import Drawer
from .lasting import PermanentLines
from .progress_line import ASCII, UNICODE, progress_line
from .status_line import StatusLine
from .summary import summary


class ConsoleView(Drawer):
    """Draws a run on `console`; `clock` gives unix time."""

    def __init__(self, console: Console, directory: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._console = console
        self._directory = directory
        self._clock = clock
        self._glyphs = ASCII if console.options.ascii_only else UNICODE
        self._line = StatusLine(console)
        self._lasting = PermanentLines(console, directory, self._glyphs)
        self._news = clock()
        self._latest: object = None

    def shows(self, record: Record) -> bool:
        """Steps only move the line, which is drawn once however many there were."""
        return isinstance(record, Event)

    def draw(self, state: RunState, record: Record) -> None:
        """Print what stays of an event."""
        if isinstance(record, Event):
            self._line.print(*self._lasting.of(state, record))

    def refresh(self, state: RunState) -> None:
        """Redraw the moving line as of now."""
        if state.end is not None:
            self._line.clear()
            return
        now = self._clock()
        latest = (state.history.last, state.ticks, state.start, state.setup)
        if latest != self._latest:
            self._latest, self._news = latest, now
        quiet = max(0.0, now - self._news)
        self._line.show(progress_line(state, width=self._console.width, now=now, quiet=quiet, glyphs=self._glyphs))

    def close(self, state: RunState) -> None:
        """The summary."""
        self._line.clear()
        self._line.print(*summary(state, self._directory, self._console))

    def leave(self) -> None:
        """Give the terminal back without a word, as when following is interrupted."""
        self._line.clear()
