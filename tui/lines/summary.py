"""The panel that closes a run on a terminal: what it came to and what to do next."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from xtrain.records.end_status import EndStatus
from xtrain.tui.event_text import cause, failed, quality
from xtrain.tui.history import Point
from xtrain.tui.lines.lasting import MAX_BOX
from xtrain.tui.lines.next_steps import (
    command_of_model,
    going_on,
    more_of_it,
    outcome,
    short_path,
    succeeded,
    wants_logs,
)
from xtrain.tui.lines.progress_line import short_node
from xtrain.tui.state import RunState
from xtrain.tui.words import count, decimal, duration, plural, printable

MAX_TRACEBACK_LINES = 40
_SPARKS = "▁▂▃▄▅▆▇█"
_STYLES: dict[str, str] = {
    EndStatus.DONE: "green",
    EndStatus.COMPLETE: "green",
    EndStatus.STOPPED: "yellow",
    EndStatus.INTERRUPTED: "yellow",
}


def summary(state: RunState, directory: Path, console: Console) -> Iterator[RenderableType]:
    """Yield the traceback of the first failure if there is one, the panel, and the next command."""
    width = min(console.width, MAX_BOX)
    if state.failures:
        yield _traceback(state, width)
    style = _STYLES.get(state.status, "red")
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for label, value in _rows(state, directory, sparks=not console.options.ascii_only):
        rows.add_row(label, value)
    title = Text(" · ").join(Text(printable(word)) for word in (state.status, outcome(state)) if word)
    title.stylize(f"bold {style}", 0, len(state.status))
    yield Text()
    if more := more_of_it(state):
        rows.add_row("more", Text(more))
    yield Panel(rows, title=title, title_align="left", border_style=style, width=width)
    yield _next(state, directory, console.width)


def _rows(state: RunState, directory: Path, *, sparks: bool) -> Iterator[tuple[str, RenderableType]]:
    last = state.history.last
    yield "steps", Text(f"{state.step:,} of {state.steps:,}" if state.steps else f"{state.step:,}")
    if state.loss is not None:
        loss = Text(decimal(state.loss, 4), "bold")
        if sparks and (curve := spark(state.history.points())):
            loss.append(f"  {curve}", "not bold cyan")
        yield "loss", loss
    if state.evaluations:
        yield "held out", _held_out(state)
    if last.tokens is not None:
        speed = state.history.tokens_per_second
        rate = f"  {count(speed)} tok/s" if speed is not None else ""
        yield "tokens", Text.assemble(count(last.tokens), (rate, "dim"))
    if state.end and state.end.seconds is not None:
        yield "time", Text(duration(state.end.seconds))
    mishaps = (
        (state.num_skipped, "skipped step"),
        (state.num_nonfinite, "non-finite step"),
        (state.num_rollbacks, "rollback"),
        (state.num_restarts, "restart"),
    )
    if seen := [plural(number, noun) for number, noun in (*mishaps, (state.num_warnings, "warning")) if number]:
        yield "note", Text(", ".join(seen), "yellow")
    if state.under_way is not None and not state.failures:
        yield "during", Text(printable(short_node(state.under_way.node)))
    yield "run", Text(printable(short_path(directory)))
    if wants_logs(state):
        yield "logs", Text(printable(short_path(directory / "logs")))


def _held_out(state: RunState) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    for evaluation in state.evaluations.values():
        first, *others = quality(evaluation).split("  ")
        measured = Text.assemble((first, "bold"), *(f"  {each}" for each in others))
        if evaluation.step is not None and evaluation.step != state.step:
            measured.append(f"  at step {evaluation.step:,}", "dim")
        table.add_row(Text(printable(evaluation.dataset)), measured)
    return table


def _next(state: RunState, directory: Path, width: int) -> RenderableType:
    """Return the next command, outside the panel, so that copying it includes no border."""
    if not succeeded(state):
        row = Table.grid(padding=(0, 2, 1, 0))
        row.add_row(Text(" next", "dim"), Text(going_on(state)))
        return row
    _, command, rest = command_of_model(state, directory)
    one_line = f"{command} {rest}"
    if cell_len(one_line) + 7 >= width:
        # Two lines that the shell reads as one; a longer path is left for the terminal to fold.
        one_line = f"{command} \\\n           {rest}"
    return Text.assemble((" next  ", "dim"), (one_line, "bold"), "\n", overflow="fold")


def _traceback(state: RunState, width: int) -> RenderableType:
    first, *others = state.failures
    lines = printable(first.traceback.strip("\n")).split("\n")
    shown: list[RenderableType] = []
    if hidden := max(0, len(lines) - MAX_TRACEBACK_LINES):
        shown.append(Text(f"… {plural(hidden, 'earlier line')} in events.jsonl", "dim"))
    if first.traceback and first.code:  # of the user's own code: the place in one line
        shown.append(Text(printable(cause(first)), overflow="fold"))
    if first.traceback:
        shown.append(Text("\n".join(lines[-MAX_TRACEBACK_LINES:]), overflow="fold"))
    else:
        shown.append(Text(printable(cause(first)), overflow="fold"))
    if others:
        who = ", ".join(failed(failure) for failure in others[:8]) + (", …" if len(others) > 8 else "")
        shown.append(Text(f"failed as well: {who}", "dim"))
    return Panel(Group(*shown), title=f"{failed(first)} failed", title_align="left", border_style="red", width=width)


def spark(points: tuple[Point, ...], width: int = 24) -> str:
    """Return the curve as `width` blocks, each the mean of its share of the points; empty for too few points."""
    if len(points) < 4:
        return ""
    width = min(width, len(points))
    edges = [index * len(points) // width for index in range(width + 1)]
    means = [sum(loss for _, loss in points[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(_SPARKS[int((mean - low) / span * 7.999) if span > 0 else 0] for mean in means)
