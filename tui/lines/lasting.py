"""What stays on the terminal above the moving line: start-up, and what happens between steps."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...records.control_words import ControlState
from ...records.event import Event
from ...records.run_events import (
    AlertEvent,
    ControlEvent,
    FailureEvent,
    NotifyEvent,
    PausedEvent,
    RequeueEvent,
    RestartEvent,
    RunEndEvent,
    SignalEvent,
    StopEvent,
    StuckEvent,
    WarningEvent,
)
from ...records.start_events import (
    EstimateEvent,
    RunStartEvent,
    SetupBeginEvent,
    SetupDoneEvent,
    SetupEvent,
    TokeniseEvent,
)
from ...records.step_events import (
    CheckpointEvent,
    EvalEvent,
    GeneratedText,
    GenerateEvent,
    HealthEvent,
    MemorySnapshotEvent,
    NonFiniteEvent,
    PhaseEvent,
    ProfileEvent,
    RollbackEvent,
    SkippedEvent,
)
from ..event_text import cause, event_text, failed, health_text, in_one_line, phase_text, restart_text, rollback_text
from ..state import RunState
from ..words import count, decimal, perplexity, plural, printable, size, took
from .next_steps import short_path
from .progress_line import BarGlyphs, short_node

# Text is read, not measured: wider boxes than this are hard to follow.
MAX_BOX = 100
MAX_SAMPLE_LINES = 12


class PermanentLines:
    """Turns events into what `console` prints of them."""

    def __init__(self, console: Console, directory: Path, glyphs: BarGlyphs) -> None:
        self._console = console
        self._directory = directory
        self._glyphs = glyphs
        self._draw: dict[type[Event], Callable[[RunState, Any], Iterator[RenderableType]]] = {
            RunStartEvent: self._run_start,
            SetupBeginEvent: self._nothing,
            SetupEvent: self._setup,
            SetupDoneEvent: self._setup_done,
            EstimateEvent: self._estimate,
            EvalEvent: self._eval,
            GenerateEvent: self._generate,
            CheckpointEvent: self._checkpoint,
            SignalEvent: self._signal,
            StopEvent: self._stop,
            ControlEvent: self._control,
            PausedEvent: self._paused,
            RequeueEvent: self._requeue,
            NonFiniteEvent: self._nonfinite,
            RollbackEvent: self._rollback,
            RestartEvent: self._restart,
            SkippedEvent: self._skipped,
            PhaseEvent: self._phase,
            HealthEvent: self._health,
            StuckEvent: self._nothing,
            TokeniseEvent: self._tokenise,
            WarningEvent: self._warning,
            ProfileEvent: self._looked_at,
            MemorySnapshotEvent: self._looked_at,
            AlertEvent: self._alert,
            NotifyEvent: self._notify,
            FailureEvent: self._failure,
            RunEndEvent: self._nothing,
        }

    def of(self, state: RunState, event: Event) -> Iterator[RenderableType]:
        """What to print of an event, after which the run is in `state`."""
        if state.is_echo(event):
            return
        yield from self._draw.get(type(event), self._unknown)(state, event)

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

    def _setup(self, state: RunState, event: SetupEvent) -> Iterator[RenderableType]:
        node_width = 18 if self._console.width < 80 else 26
        row = Table.grid(padding=(0, 1))
        row.add_column(width=2, justify="right")
        row.add_column(width=node_width, overflow="fold")
        row.add_column(width=8, justify="right", no_wrap=True)
        row.add_column(overflow="fold")
        row.add_row(
            Text(self._glyphs.tick, "green"),
            Text(printable(short_node(event.node))),
            Text(took(event.seconds), "bold" if (event.seconds or 0) >= 1 else "dim"),
            Text(" " + printable(event.detail).replace("\n", "\n "), "dim"),
        )
        yield row

    def _setup_done(self, state: RunState, event: SetupDoneEvent) -> Iterator[RenderableType]:
        yield Text.assemble("\n ready in ", (took(event.seconds), "bold"), "\n")

    def _estimate(self, state: RunState, event: EstimateEvent) -> Iterator[RenderableType]:
        for said in event_text(event):
            yield self._tick(state, event, said.word, Text(printable(said.body)), "cyan")

    def _eval(self, state: RunState, evaluation: EvalEvent) -> Iterator[RenderableType]:
        body = Text.assemble((printable(evaluation.dataset), "bold"), "  loss ", (decimal(evaluation.loss, 4), "bold"))
        if (ppl := perplexity(evaluation.loss)) is not None:
            body.append(f"  ppl {decimal(ppl, 2)}")
        wide = self._console.width >= 80
        of = "averaged weights, " if evaluation.weights == "averaged" else ""
        over = f"{count(evaluation.tokens)} tokens, " if wide and evaluation.tokens is not None else ""
        body.append(f"  {of}{over}{took(evaluation.seconds)}", "dim")
        yield self._tick(state, evaluation, evaluation.event, body)

    def _generate(self, state: RunState, event: GenerateEvent) -> Iterator[RenderableType]:
        for index, sample in enumerate(event.samples, start=1):
            which = f" {index}/{len(event.samples)}" if len(event.samples) > 1 else ""
            yield self._box(sample, f"step {_step(event)} · sample{which}")

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

    def _checkpoint(self, state: RunState, event: CheckpointEvent) -> Iterator[RenderableType]:
        how = f"saved in {took(event.seconds)}" if event.seconds is not None else "saved"
        body = Text.assemble((how, "bold"), f"  {size(event.bytes)}  " if event.bytes is not None else "  ")
        body.append(printable(self._below(event.path)), "dim")
        yield self._tick(state, event, event.event, body)

    def _below(self, path: str) -> str:
        """A path in the run directory without the part that is known already."""
        try:
            return str(Path(path).relative_to(self._directory))
        except ValueError:
            return path

    def _signal(self, state: RunState, event: SignalEvent) -> Iterator[RenderableType]:
        yield self._tick(state, event, event.event, _named_reason(event), "yellow")

    def _stop(self, state: RunState, event: StopEvent) -> Iterator[RenderableType]:
        yield self._tick(state, event, event.event, _named_reason(event), "yellow")

    def _control(self, state: RunState, event: ControlEvent) -> Iterator[RenderableType]:
        body = Text.assemble((printable(f"{event.command} {event.state}"), "bold"), f"  {printable(event.detail)}")
        yield self._tick(state, event, event.event, body, "yellow" if event.state == ControlState.REFUSED else "")

    def _paused(self, state: RunState, event: PausedEvent) -> Iterator[RenderableType]:
        yield self._tick(state, event, event.event, Text(f"for {took(event.seconds)}"))

    def _requeue(self, state: RunState, event: RequeueEvent) -> Iterator[RenderableType]:
        yield self._tick(state, event, event.event, Text(f"Slurm was asked to start job {printable(event.job)} again"))

    def _nonfinite(self, state: RunState, event: NonFiniteEvent) -> Iterator[RenderableType]:
        loss, norm = decimal(event.loss, 4), decimal(event.grad_norm, 4)
        yield self._tick(state, event, event.event, Text(f"loss {loss}  grad_norm {norm}"), "bold red")

    def _rollback(self, state: RunState, event: RollbackEvent) -> Iterator[RenderableType]:
        yield self._tick(state, event, event.event, Text(printable(rollback_text(event))), "bold yellow")

    def _restart(self, state: RunState, event: RestartEvent) -> Iterator[RenderableType]:
        yield self._tick(state, event, event.event, Text(printable(restart_text(event))), "bold yellow")

    def _skipped(self, state: RunState, event: SkippedEvent) -> Iterator[RenderableType]:
        yield self._tick(state, event, event.event, Text(printable(event.reason)), "yellow")

    def _warning(self, state: RunState, event: WarningEvent) -> Iterator[RenderableType]:
        yield self._tick(state, event, event.event, Text(printable(event.message)), "yellow")

    def _looked_at(self, state: RunState, event: ProfileEvent | MemorySnapshotEvent) -> Iterator[RenderableType]:
        """A profile or a memory snapshot: where it lies, and how it went."""
        for said in event_text(replace(event, path=self._below(event.path))):
            yield self._tick(state, event, said.word, Text(printable(said.body)), "cyan")

    def _alert(self, state: RunState, event: AlertEvent) -> Iterator[RenderableType]:
        cleared = event.state == "cleared"
        body = Text.assemble((printable(event.kind), "bold"), f"  {printable(event.message)}")
        label = "over" if cleared else f"{self._glyphs.cross} alert"
        yield self._tick(state, event, label, body, "green" if cleared else "bold red")

    def _notify(self, state: RunState, event: NotifyEvent) -> Iterator[RenderableType]:
        said = printable(f"`{event.command}` {event.detail}")
        yield self._tick(state, event, event.event, Text.assemble((printable(event.kind), "bold"), f"  {said}"), "dim")

    def _phase(self, state: RunState, event: PhaseEvent) -> Iterator[RenderableType]:
        body = Text.assemble((printable(event.name), "bold"), "  ", printable(phase_text(event)))
        yield self._tick(state, event, event.event, body, "cyan")

    def _health(self, state: RunState, event: HealthEvent) -> Iterator[RenderableType]:
        yield self._tick(state, event, event.event, Text(health_text(event)))

    def _tokenise(self, state: RunState, event: TokeniseEvent) -> Iterator[RenderableType]:
        body = Text.assemble((printable(event.dataset), "bold"), "  ", printable(event.message))
        yield self._tick(state, event, event.event, body, "dim")

    def _failure(self, state: RunState, event: FailureEvent) -> Iterator[RenderableType]:
        body = Text(f"{failed(event)}  {printable(cause(event).strip())}")
        yield self._tick(state, event, f"{self._glyphs.cross} failure", body, "bold red")

    def _nothing(self, state: RunState, event: Event) -> Iterator[RenderableType]:
        yield from ()

    def _unknown(self, state: RunState, event: Event) -> Iterator[RenderableType]:
        """An event that has no look of its own, as of a later version: what it says, or its fields as they are."""
        yield self._tick(state, event, printable(event.event), Text(printable(in_one_line(event))))

    def _tick(self, state: RunState, event: Event, label: str, body: Text, style: str = "green") -> Table:
        """One row: step, what, and the rest, in columns that stay where they are from row to row."""
        steps = f"{state.steps:,}" if state.steps else "1,000"
        row = Table.grid(padding=(0, 2))
        row.add_column(width=len(f" step {steps}"), no_wrap=True)
        row.add_column(width=10, overflow="fold")
        row.add_column(overflow="fold")
        row.add_row(Text.assemble((" step ", "dim"), f"{_step(event):>{len(steps)}}"), Text(label, style), body)
        return row


def _named_reason(event: SignalEvent | StopEvent) -> Text:
    """What stops the run, and why."""
    reason = printable(event.reason)
    return Text.assemble((printable(event.name), "bold"), f"  {reason}" if reason else "")


def _step(event: Event) -> str:
    return "–" if event.step is None else f"{event.step:,}"
