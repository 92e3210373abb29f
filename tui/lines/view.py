"""Views that follow a run directory; the live one has lines of start-up, a progress line and a closing panel."""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, TextIO, cast, get_args

from rich.console import Console, RenderableType
from rich.text import Text

from xtrain.records.lines import Event, Record
from xtrain.text.printing import Output
from xtrain.tui.feed import RecordFeed
from xtrain.tui.lines.lasting import ASCII, UNICODE, PermanentLines, progress_line, summary
from xtrain.tui.lines.plain import Drawer, JsonView, PlainView, is_short
from xtrain.tui.state import RunState, reduce_all


class ConsoleView(Drawer):
    """View that draws a run on `console`; `clock` returns unix time. verbose: with a line of every set-up node."""

    def __init__(
        self, console: Console, directory: Path, *, verbose: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self._console = console
        self._verbose = verbose
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
        if isinstance(record, Event) and (self._verbose or not is_short(record)):
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


POLL_SECONDS = 0.1

Ui = Literal["plain", "console", "json", "none"]


def choose_ui(requested: str | None, stream: TextIO) -> Ui:
    """Return the requested view, else `console` at a terminal and `plain` otherwise.

    Raises ValueError if there is no view of the requested name.
    """
    if requested is not None:
        if requested not in get_args(Ui):
            raise ValueError(f"no view is called {requested!r}: choose one of {', '.join(get_args(Ui))}")
        return cast(Ui, requested)
    watched = Output(stream).isatty() and os.environ.get("TERM") != "dumb"
    automated = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return "console" if watched and not automated else "plain"


def follow(
    directory: Path,
    *,
    ui: Ui,
    verbose: bool = False,
    offsets: Mapping[str, int] | None = None,
    finished: threading.Event,
    out: TextIO | None = None,
    quiet_until: float = 0.0,
    why_over: Callable[[RunState, float | None], str] | None = None,
) -> RunState:
    """Draw the run in `directory` on `out` (standard output) until it has ended; return the final state.

    The end is a `run_end` that no later attempt follows, or `finished`, which is set once nothing more will be written.
    `why_over` takes the state and the time of the newest record, and returns the reason why nothing more will be
    written; the returned state then has `end` None. `offsets` (file name → byte) skips earlier records; records from
    before `quiet_until` (seconds since 1970) are read and not drawn. `verbose` draws every set-up node. The directory
    may not exist yet; if it disappears, the view waits for it to return. If `out` breaks, following continues without
    output.
    """
    feed = RecordFeed(directory, offsets)
    drawer = _drawer(ui, directory, Output(sys.stdout if out is None else out), verbose=verbose)
    state = RunState()
    try:
        while True:
            # Checked before reading: records written before `finished` was set are read once more.
            last_round = finished.is_set()
            state = _read(feed, state, drawer, quiet_until)
            if (last_round or state.end is not None) and not feed.behind:
                break
            if not feed.behind:
                if why_over and (why := why_over(state, feed.newest)):
                    drawer.lost(state, why)
                    return state
                drawer.refresh(state)
                finished.wait(POLL_SECONDS)
        drawer.close(state)
    finally:
        drawer.release()
    return state


def _drawer(ui: Ui, directory: Path, out: Output, *, verbose: bool) -> Drawer:
    if ui == "none":
        return Drawer()
    stream = cast(TextIO, out)
    if ui == "console":
        return ConsoleView(Console(file=stream, highlight=False), directory, verbose=verbose)
    return PlainView(stream, directory, verbose=verbose) if ui == "plain" else JsonView(stream)


def _read(feed: RecordFeed, state: RunState, drawer: Drawer, quiet_until: float) -> RunState:
    """Read new records into the state, stopping only at records that are drawn."""
    unseen: list[Record] = []
    for record in feed.read():
        unseen.append(record)
        if drawer.shows(record) and (record.time or quiet_until) >= quiet_until:
            state = reduce_all(state, unseen)
            unseen.clear()
            drawer.draw(state, record)
    return reduce_all(state, unseen)
