"""Parts of the live view: the progress line, lasting lines above it, and the closing panel."""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from attrs import frozen
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from xtrain.records import events
from xtrain.records import training_events as training
from xtrain.records.lines import Event
from xtrain.records.names import ControlState, EndStatus
from xtrain.text.units import count, decimal, duration, plural, printable, size, took
from xtrain.tui.event_text import cause, event_text, failed, quality
from xtrain.tui.feed import Point
from xtrain.tui.lines.plain import command_of_model, going_on, more_of_it, outcome, short_path, succeeded, wants_logs
from xtrain.tui.state import RunState

MIN_BAR, GOOD_BAR, MAX_BAR = 8, 20, 60
# Parts of a higher rank are left out rather than make the bar shorter than a good one.
LAST_ESSENTIAL_RANK = 4
# Without a record for this many times the usual gap (and this many seconds), the line says how long it has been.
QUIET_GAPS, QUIET_SECONDS = 5, 10


@frozen(kw_only=True)
class BarGlyphs:
    """Characters of progress lines; done and remaining differ in shape, so that they can be distinguished without
    color."""

    spinner: str
    done: str
    to_do: str
    tick: str
    cross: str


UNICODE = BarGlyphs(spinner="⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", done="━", to_do="─", tick="✓", cross="✗")
ASCII = BarGlyphs(spinner="|/-\\", done="=", to_do="-", tick="+", cross="x")


def progress_line(state: RunState, *, width: int, now: float, quiet: float, glyphs: BarGlyphs = UNICODE) -> Text:
    """Return the line at unix time `now`, `quiet` seconds after the last record, in fewer than `width` cells."""
    if state.failures:
        return _spinning(f"{failed(state.failures[0])} failed, waiting for the others to end", quiet, now, glyphs)
    if state.restarting:
        return _spinning("restarting the ranks", quiet, now, glyphs)
    if not state.history.origin:
        return _waiting(state, now=now, quiet=quiet, glyphs=glyphs)
    return _training(state, width=width, now=now, quiet=quiet, glyphs=glyphs)


def _waiting(state: RunState, *, now: float, quiet: float, glyphs: BarGlyphs) -> Text:
    """Return a spinner, what is running, and for how long."""
    node = state.under_way
    if node is not None:
        what, since = short_node(node.node), node.began
    elif state.seconds_left is not None:
        what, since = (
            f"training, about {duration(state.seconds_left)} left at step {state.step:,}",
            state.setup_done_time,
        )
    elif state.setup_seconds is not None:
        what, since = "waiting for the first step", state.setup_done_time
    else:
        what, since = ("starting" if state.start else "waiting for the run to start"), None
    # A clock that differs between machines must not show a start-up node as hours old or yet to come.
    elapsed = quiet if since is None or not 0 <= now - since < 86400 else now - since
    return _spinning(what, elapsed, now, glyphs)


def _spinning(what: str, elapsed: float, now: float, glyphs: BarGlyphs) -> Text:
    turn = int(now * 10) if math.isfinite(now * 10) else 0  # a clock that a record claims can be anything
    spinner = glyphs.spinner[turn % len(glyphs.spinner)]
    return Text.assemble(" ", (spinner, "cyan"), " ", (printable(what), "bold"), "  ", (duration(elapsed), "dim"))


def _training(state: RunState, *, width: int, now: float, quiet: float, glyphs: BarGlyphs) -> Text:
    parts = _parts(state, quiet=quiet)
    # One blank for the cursor at the left, one unused column at the right.
    room = width - 2 - MIN_BAR
    fitting: list[tuple[int, Text]] = []
    for part in sorted(parts, key=lambda part: part[0]):
        rank, text = part
        cells = cell_len(text.plain) + 2
        spare = 0 if rank <= LAST_ESSENTIAL_RANK else GOOD_BAR - MIN_BAR
        if cells + spare > room:
            break
        room -= cells
        fitting.append(part)
    bar_width = min(MAX_BAR, MIN_BAR + room)
    bar = _bar(state.progress, bar_width, glyphs) if state.progress is not None else _pulse(now, bar_width, glyphs)
    shown = [part[1] for part in parts if part in fitting]
    return Text("  ").join([Text(" ").append_text(bar), *shown])


def _parts(state: RunState, *, quiet: float) -> list[tuple[int, Text]]:
    """Return all parts of a wide line, in order; parts with the lowest ranks are kept when the line is narrow."""
    last = state.history.last
    steps = f"{state.steps:,}" if state.steps else ""
    at = f"{state.step:,}"
    lr, grad, mfu, reward = last.lr, last.grad_norm, last.mfu, last.reward
    parts = (
        (0, Text(f"{at:>{len(steps)}}/{steps}" if steps else f"step {at}", "bold")),
        (5, "" if state.progress is None else f"{state.progress:>4.0%}"),
        (1, _labelled("loss", decimal(last.loss, 4), 6)),
        (1, "" if reward is None else _labelled("reward", decimal(reward, 3), 5)),
        (4, f"epoch {state.epoch}" if state.epoch else ""),
        (4, "" if lr is None else _labelled("lr", f"{lr:.2e}", 8)),
        (6, "" if grad is None else _labelled("grad", decimal(grad, 2), 4)),
        (3, "" if last.tokens_per_second is None else f"{count(last.tokens_per_second):>6} tok/s"),
        (7, "" if mfu is None else _labelled("mfu", f"{mfu:.0%}", 3)),
        (8, size(last.memory_bytes) if last.memory_bytes else ""),
        (9, Text(printable(last.phase), "dim") if last.phase else ""),
        (2, _pace(state, quiet)),
    )
    return [(rank, text if isinstance(text, Text) else Text(text)) for rank, text in parts if text]


def _pace(state: RunState, quiet: float) -> Text:
    """Return the end of the line: a stop, the time without a step, the time left, or the time of a step."""
    if state.signal:
        return Text(f"{printable(state.signal)}, stopping", "yellow")
    if quiet > max(QUIET_SECONDS, QUIET_GAPS * (state.history.gap or 0)):
        return Text(f"no step for {duration(quiet)}", "yellow")
    if state.seconds_left is not None:
        return Text(f"{duration(state.seconds_left):>6} left", "cyan")
    pace = state.history.seconds_per_step
    return Text("" if pace is None else f"{took(pace)}/step", "cyan")


def _labelled(label: str, value: str, width: int) -> Text:
    """Return `label value`, the value padded so that the line does not move from step to step."""
    return Text.assemble((f"{label} ", "dim"), f"{value:>{width}}")


def _bar(progress: float, width: int, glyphs: BarGlyphs) -> Text:
    done = int(progress * width)
    return Text.assemble((glyphs.done * done, "cyan"), (glyphs.to_do * (width - done), "dim"))


def _pulse(now: float, width: int, glyphs: BarGlyphs) -> Text:
    """Return a block that moves back and forth: running, with an unknown end."""
    block = max(2, width // 5)
    way = width - block
    at = int(now * 10) % (2 * way)
    before = at if at <= way else 2 * way - at
    return Text.assemble(
        (glyphs.to_do * before, "dim"), (glyphs.done * block, "cyan"), (glyphs.to_do * (way - before), "dim")
    )


def short_node(node: str) -> str:
    """Return a start-up node's id without `setup.`, which they all share."""
    return node.removeprefix("setup.")


# Text is read, not measured: wider boxes than this are hard to follow.
MAX_BOX = 100
MAX_SAMPLE_LINES = 12
# The failure after stuck ranks reports their state, and the summary how the run ended.
_NOT_DRAWN = (training.SetupBeginEvent, events.StuckEvent, events.RunEndEvent)
_EVENT_STYLES: dict[type[Event], str] = {
    training.NonFiniteEvent: "bold red", events.NotifyEvent: "dim", training.TokeniseEvent: "dim",
    **dict.fromkeys((events.SignalEvent, events.StopEvent, training.SkippedEvent, events.WarningEvent), "yellow"),
    **dict.fromkeys((training.RollbackEvent, events.RestartEvent, events.ReplicaGroupEvent), "bold yellow"),
    **dict.fromkeys((training.PhaseEvent, training.EstimateEvent), "cyan"),
    **dict.fromkeys((training.ProfileEvent, training.MemorySnapshotEvent), "cyan"),
}  # fmt: skip


class PermanentLines:
    """Lines that `console` prints for events."""

    def __init__(self, console: Console, directory: Path, glyphs: BarGlyphs) -> None:
        self._console = console
        self._directory = directory
        self._glyphs = glyphs

    def of(self, state: RunState, event: Event) -> Iterator[RenderableType]:
        """Yield what to print for an event that led to `state`."""
        if state.is_echo(event) or isinstance(event, _NOT_DRAWN):
            return
        match event:
            case training.RunStartEvent():
                yield from self._run_start(state, event)
            case training.SetupEvent():
                yield self._setup(event)
            case training.SetupDoneEvent():
                yield Text.assemble("\n ready in ", (took(event.seconds), "bold"), "\n")
            case training.GenerateEvent():
                for index, sample in enumerate(event.samples, start=1):
                    which = f" {index}/{len(event.samples)}" if len(event.samples) > 1 else ""
                    yield self._box(sample, f"step {_step(event)} · sample{which}")
            case training.EvalEvent():
                yield self._row(state, event, event.event, self._eval(event))
            case training.CheckpointEvent():
                yield self._row(state, event, event.event, self._checkpoint(event))
            case events.FailureEvent():
                body = Text(f"{failed(event)}  {printable(cause(event).strip())}")
                yield self._row(state, event, f"{self._glyphs.cross} failure", body, "bold red")
            case _:
                yield from self._others(state, event)

    def _others(self, state: RunState, event: Event) -> Iterator[RenderableType]:
        """Yield the line of a log file, with its subject in bold."""
        style = _EVENT_STYLES.get(type(event), "green")
        sign = ""
        match event:
            case events.AlertEvent() if event.state != "cleared":
                sign, style = f"{self._glyphs.cross} ", "bold red"
            case events.ControlEvent():
                style = "yellow" if event.state == ControlState.REFUSED else ""
            case training.ProfileEvent() | training.MemorySnapshotEvent():
                event = replace(event, path=self._below(event.path))
        for said in event_text(event):
            body = Text(printable("\n".join((said.body, *said.more))))
            body.stylize("bold", 0, len(printable(said.subject)))
            yield self._row(state, event, f"{sign}{printable(said.word)}", body, style)

    def _run_start(self, state: RunState, start: training.RunStartEvent) -> Iterator[RenderableType]:
        facts = [plural(start.world_size, "rank") if start.world_size else "", start.device]
        facts.append(plural(start.steps, "step") if start.steps else "unknown length")
        if state.attempt > 1:
            facts.append(f"attempt {state.attempt}")
        if start.resumed_step is not None:
            facts.append(f"resumed from step {start.resumed_step:,}")
        name = (printable(start.name or start.run_id), "bold cyan")
        yield Text.assemble("\n ", name, "  ", printable(" · ".join(filter(None, facts))))
        yield Text(f" {printable(short_path(self._directory))}\n", "dim", overflow="fold")

    def _setup(self, event: training.SetupEvent) -> Table:
        row = Table.grid(padding=(0, 1))
        row.add_column(width=2, justify="right")
        row.add_column(width=18 if self._console.width < 80 else 26, overflow="fold")
        row.add_column(width=8, justify="right", no_wrap=True)
        row.add_column(overflow="fold")
        row.add_row(
            Text(self._glyphs.tick, "green"),
            Text(printable(short_node(event.node))),
            Text(took(event.seconds), "bold" if (event.seconds or 0) >= 1 else "dim"),
            Text(" " + printable(event.detail).replace("\n", "\n "), "dim"),
        )
        return row

    def _eval(self, event: training.EvalEvent) -> Text:
        wide = self._console.width >= 80
        of = "averaged weights, " if event.weights == "averaged" else ""
        over = f"{count(event.tokens)} tokens, " if wide and event.tokens is not None else ""
        return Text.assemble(
            (printable(event.dataset), "bold"),
            f"  {quality(event)}",
            (f"  {of}{over}{took(event.seconds)}", "dim"),
        )

    def _checkpoint(self, event: training.CheckpointEvent) -> Text:
        how = f"saved in {took(event.seconds)}" if event.seconds is not None else "saved"
        of_size = f"  {size(event.bytes)}  " if event.bytes is not None else "  "
        return Text.assemble((how, "bold"), of_size, (printable(self._below(event.path)), "dim"))

    def _below(self, path: str) -> str:
        """Return a path without the run directory."""
        try:
            return str(Path(path).relative_to(self._directory))
        except ValueError:
            return path

    def _box(self, sample: training.GeneratedText, title: str) -> RenderableType:
        width = min(self._console.width, MAX_BOX)
        prompt, written = printable(sample.prompt), printable(sample.text)
        body = Text.assemble((prompt, "bold"), written.removeprefix(prompt))
        body.rstrip()
        lines = body.wrap(self._console, width - 4)
        shown = Text("\n").join(lines[:MAX_SAMPLE_LINES])
        if hidden := max(0, len(lines) - MAX_SAMPLE_LINES):
            shown.append(f"\n… {plural(hidden, 'more line')} in events.jsonl", "dim")
        return Panel(shown, title=title, title_align="left", border_style="dim", width=width)

    def _row(self, state: RunState, event: Event, label: str, body: Text, style: str = "green") -> Table:
        """Return step, label and text, in columns that do not move from row to row."""
        steps = f"{state.steps:,}" if state.steps else "1,000"
        row = Table.grid(padding=(0, 2))
        row.add_column(width=len(f" step {steps}"), no_wrap=True)
        row.add_column(width=10, overflow="fold")
        row.add_column(overflow="fold")
        row.add_row(Text.assemble((" step ", "dim"), f"{_step(event):>{len(steps)}}"), Text(label, style), body)
        return row


def _step(event: Event) -> str:
    return "–" if event.step is None else f"{event.step:,}"


MAX_TRACEBACK_LINES = 40
_SPARKS = "▁▂▃▄▅▆▇█"
_STATUS_STYLES: dict[str, str] = {
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
    style = _STATUS_STYLES.get(state.status, "red")
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
