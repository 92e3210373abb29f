"""The live view on a terminal: start-up line by line, a moving line while training, a panel at the end."""

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from xtrain.records.event import Event
from xtrain.records.record import Record
from xtrain.tui.lines.drawer import Drawer
from xtrain.tui.lines.lasting import PermanentLines
from xtrain.tui.lines.progress_line import ASCII, UNICODE, progress_line
from xtrain.tui.lines.summary import summary
from xtrain.tui.state import RunState


class ConsoleView(Drawer):
    """View that draws a run on `console`; `clock` returns unix time."""

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
        """Return True for events: steps only move the line, which is drawn once for any number of them."""
        return isinstance(record, Event)

    def draw(self, state: RunState, record: Record) -> None:
        """Print what stays of an event."""
        if isinstance(record, Event):
            self._line.print(*self._lasting.of(state, record))

    def refresh(self, state: RunState) -> None:
        """Redraw the progress line as of now."""
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
        """Print the summary."""
        self._line.clear()
        self._line.print(*summary(state, self._directory, self._console))

    def release(self) -> None:
        """Release the terminal without output, as when following is interrupted."""
        self._line.clear()


_ERASE_BELOW = "\x1b[J"
# While the line is written the terminal must not wrap: it may have become narrower than it last said.
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"


class StatusLine:
    """Progress line at the bottom of `console`; not shown without a terminal.

    The cursor rests at the start of the line, on a blank. So erasing from the cursor downwards removes the whole line
    after any resize (a terminal folds a line that no longer fits). A `^C` echoed by the terminal, or the end of this
    process at any moment, leaves the terminal ready for a prompt.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = ""
        self._size = console.size

    def show(self, line: Text) -> None:
        """Draw `line`, cut to the width, instead of the previous one."""
        if not self._console.is_terminal:
            return
        # The last column stays empty: a terminal may wrap as soon as it is written to.
        line.truncate(self._console.width - 1, overflow="ellipsis")
        drawn = f"{_NO_WRAP}{self._rendered(line, end='')}{_WRAP}"
        if drawn == self._shown and self._console.size == self._size:
            return
        self._shown, self._size = drawn, self._console.size
        self._write(f"\r{drawn}{_ERASE_BELOW}\r")

    def print(self, *lasting: RenderableType) -> None:
        """Write what stays, above the line."""
        drawn = "".join(self._rendered(renderable) for renderable in lasting)
        if not self._shown:
            self._write(drawn)
        else:
            # One write for both, or the line would flicker.
            self._write(f"\r{_ERASE_BELOW}{drawn}{self._shown}\r")

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            self._shown = ""
            self._write(f"\r{_ERASE_BELOW}")

    def _rendered(self, renderable: RenderableType, *, end: str = "\n") -> str:
        with self._console.capture() as captured:
            self._console.print(renderable, end=end, highlight=False)
        return captured.get()

    def _write(self, drawn: str) -> None:
        self._console.file.write(drawn)
        self._console.file.flush()
