"""Follows a run directory and draws it, in whichever view is asked for."""

import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, TextIO, cast, get_args

from rich.console import Console

from xtrain.records.record import Record
from xtrain.tui.feed import RecordFeed
from xtrain.tui.lines.console import ConsoleView
from xtrain.tui.lines.drawer import Drawer
from xtrain.tui.lines.jsonlines import JsonView
from xtrain.tui.lines.output import Output
from xtrain.tui.lines.plain import PlainView
from xtrain.tui.state import RunState, reduce_all

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
    before `quiet_until` (seconds since 1970) are read and not drawn. The directory may not exist yet; if it disappears,
    the view waits for it to return. If `out` breaks, following continues without output.
    """
    feed = RecordFeed(directory, offsets)
    drawer = _drawer(ui, directory, Output(sys.stdout if out is None else out))
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


def _drawer(ui: Ui, directory: Path, out: Output) -> Drawer:
    if ui == "none":
        return Drawer()
    stream = cast(TextIO, out)
    if ui == "console":
        return ConsoleView(Console(file=stream, highlight=False), directory)
    return PlainView(stream, directory) if ui == "plain" else JsonView(stream)


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
