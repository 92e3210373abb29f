"""What stays on the terminal above the moving line: start-up, and what happens between steps."""

from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from xtrain.records.control_words import ControlState
from xtrain.records.event import Event
from xtrain.records.run_events import (
    AlertEvent,
    ControlEvent,
    FailureEvent,
    NotifyEvent,
    ReplicaGroupEvent,
    RestartEvent,
    RunEndEvent,
    SignalEvent,
    StopEvent,
    StuckEvent,
    WarningEvent,
)
from xtrain.records.start_events import (
    EstimateEvent,
    RunStartEvent,
    SetupBeginEvent,
    SetupDoneEvent,
    SetupEvent,
    TokeniseEvent,
)
from xtrain.records.step_events import (
    CheckpointEvent,
    EvalEvent,
    GeneratedText,
    GenerateEvent,
    MemorySnapshotEvent,
    NonFiniteEvent,
    PhaseEvent,
    ProfileEvent,
    RollbackEvent,
    SkippedEvent,
)
from xtrain.tui.event_text import cause, event_text, failed, quality
from xtrain.tui.lines.next_steps import short_path
from xtrain.tui.lines.progress_line import BarGlyphs, short_node
from xtrain.tui.state import RunState
from xtrain.tui.words import count, plural, printable, size, took

# Text is read, not measured: wider boxes than this are hard to follow.
MAX_BOX = 100
MAX_SAMPLE_LINES = 12
# The failure after stuck ranks reports their state, and the summary how the run ended.
_NOT_DRAWN = (SetupBeginEvent, StuckEvent, RunEndEvent)
_STYLES: dict[type[Event], str] = {
    NonFiniteEvent: "bold red", NotifyEvent: "dim", TokeniseEvent: "dim",
    **dict.fromkeys((SignalEvent, StopEvent, SkippedEvent, WarningEvent), "yellow"),
    **dict.fromkeys((RollbackEvent, RestartEvent, ReplicaGroupEvent), "bold yellow"),
    **dict.fromkeys((PhaseEvent, EstimateEvent, ProfileEvent, MemorySnapshotEvent), "cyan"),
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
            case RunStartEvent():
                yield from self._run_start(state, event)
            case SetupEvent():
                yield self._setup(event)
            case SetupDoneEvent():
                yield Text.assemble("\n ready in ", (took(event.seconds), "bold"), "\n")
            case GenerateEvent():
                for index, sample in enumerate(event.samples, start=1):
                    which = f" {index}/{len(event.samples)}" if len(event.samples) > 1 else ""
                    yield self._box(sample, f"step {_step(event)} · sample{which}")
            case EvalEvent():
                yield self._row(state, event, event.event, self._eval(event))
            case CheckpointEvent():
                yield self._row(state, event, event.event, self._checkpoint(event))
            case FailureEvent():
                body = Text(f"{failed(event)}  {printable(cause(event).strip())}")
                yield self._row(state, event, f"{self._glyphs.cross} failure", body, "bold red")
            case _:
                yield from self._others(state, event)

    def _others(self, state: RunState, event: Event) -> Iterator[RenderableType]:
        """Yield the line of a log file, with its subject in bold."""
        style = _STYLES.get(type(event), "green")
        sign = ""
        match event:
            case AlertEvent() if event.state != "cleared":
                sign, style = f"{self._glyphs.cross} ", "bold red"
            case ControlEvent():
                style = "yellow" if event.state == ControlState.REFUSED else ""
            case ProfileEvent() | MemorySnapshotEvent():
                event = replace(event, path=self._below(event.path))
        for said in event_text(event):
            body = Text(printable("\n".join((said.body, *said.more))))
            body.stylize("bold", 0, len(printable(said.subject)))
            yield self._row(state, event, f"{sign}{printable(said.word)}", body, style)

    def _run_start(self, state: RunState, start: RunStartEvent) -> Iterator[RenderableType]:
        facts = [plural(start.world_size, "rank") if start.world_size else "", start.device]
        facts.append(plural(start.steps, "step") if start.steps else "unknown length")
        if state.attempt > 1:
            facts.append(f"attempt {state.attempt}")
        if start.resumed_step is not None:
            facts.append(f"resumed from step {start.resumed_step:,}")
        name = (printable(start.name or start.run_id), "bold cyan")
        yield Text.assemble("\n ", name, "  ", printable(" · ".join(filter(None, facts))))
        yield Text(f" {printable(short_path(self._directory))}\n", "dim", overflow="fold")

    def _setup(self, event: SetupEvent) -> Table:
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

    def _eval(self, event: EvalEvent) -> Text:
        wide = self._console.width >= 80
        of = "averaged weights, " if event.weights == "averaged" else ""
        over = f"{count(event.tokens)} tokens, " if wide and event.tokens is not None else ""
        return Text.assemble(
            (printable(event.dataset), "bold"),
            f"  {quality(event)}",
            (f"  {of}{over}{took(event.seconds)}", "dim"),
        )

    def _checkpoint(self, event: CheckpointEvent) -> Text:
        how = f"saved in {took(event.seconds)}" if event.seconds is not None else "saved"
        of_size = f"  {size(event.bytes)}  " if event.bytes is not None else "  "
        return Text.assemble((how, "bold"), of_size, (printable(self._below(event.path)), "dim"))

    def _below(self, path: str) -> str:
        """Return a path without the run directory."""
        try:
            return str(Path(path).relative_to(self._directory))
        except ValueError:
            return path

    def _box(self, sample: GeneratedText, title: str) -> RenderableType:
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
