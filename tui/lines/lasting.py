"""What stays on the terminal above the moving line: start-up, and what happens between steps."""

from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..event_text import event_text, in_one_line
from ..events import (
    Checkpoint,
    Evaluation,
    Failure,
    Health,
    PhaseBegin,
    Restart,
    Rollback,
    RunStart,
    Sample,
    text,
    whole,
)
from ..raised import Raised, is_cleared
from ..state import RunState
from ..tail import Record
from ..words import count, decimal, number, perplexity, plural, printable, size, took
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
        self._draw: dict[str, Callable[[RunState, Record], Iterator[RenderableType]]] = {
            "run_start": self._run_start,
            "setup_begin": self._nothing,
            "setup": self._setup,
            "setup_done": self._setup_done,
            "estimate": self._estimate,
            "eval": self._eval,
            "generate": self._generate,
            "checkpoint": self._checkpoint,
            "signal": self._signal,
            "stop": self._stop,
            "control": self._control,
            "paused": self._paused,
            "requeue": self._requeue,
            "nonfinite": self._nonfinite,
            "rollback": self._rollback,
            "restart": self._restart,
            "skipped": self._skipped,
            "phase": self._phase,
            "health": self._health,
            "stuck": self._nothing,
            "tokenise": self._tokenise,
            "warning": self._warning,
            "profile": self._looked_at,
            "memory_snapshot": self._looked_at,
            "alert": self._alert,
            "notify": self._notify,
            "failure": self._failure,
            "run_end": self._nothing,
        }

    def of(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        """What to print of the event `record`, after which the run is in `state`."""
        if state.is_echo(record):
            return
        event = text(record.get("event"))
        yield from self._draw.get(event, self._unknown)(state, record)

    def _run_start(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        start = RunStart.of(record)
        facts = [plural(start.world_size, "rank") if start.world_size else "", start.device]
        facts.append(plural(start.steps, "step") if start.steps else "unknown length")
        if start.attempt > 1:
            facts.append(f"attempt {start.attempt}")
        if start.resumed_step is not None:
            facts.append(f"resumed from step {start.resumed_step:,}")
        name = (printable(start.name or start.run_id), "bold cyan")
        yield Text.assemble("\n ", name, "  ", printable(" · ".join(filter(None, facts))))
        yield Text(f" {printable(short_path(self._directory))}\n", "dim", overflow="fold")

    def _setup(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        seconds = number(record.get("seconds"))
        node_width = 18 if self._console.width < 80 else 26
        row = Table.grid(padding=(0, 1))
        row.add_column(width=2, justify="right")
        row.add_column(width=node_width, overflow="fold")
        row.add_column(width=8, justify="right", no_wrap=True)
        row.add_column(overflow="fold")
        row.add_row(
            Text(self._glyphs.tick, "green"),
            Text(printable(short_node(text(record.get("node"))))),
            Text(took(seconds), "bold" if seconds is not None and seconds >= 1 else "dim"),
            Text(" " + printable(text(record.get("detail"))).replace("\n", "\n "), "dim"),
        )
        yield row

    def _setup_done(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        yield Text.assemble("\n ready in ", (took(number(record.get("seconds"))), "bold"), "\n")

    def _estimate(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        for said in event_text(record):
            yield self._tick(state, record, said.word, Text(printable(said.body)), "cyan")

    def _eval(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        evaluation = Evaluation.of(record)
        body = Text.assemble((printable(evaluation.dataset), "bold"), "  loss ", (decimal(evaluation.loss, 4), "bold"))
        if (ppl := perplexity(evaluation.loss)) is not None:
            body.append(f"  ppl {decimal(ppl, 2)}")
        wide = self._console.width >= 80
        of = "averaged weights, " if evaluation.averaged else ""
        over = f"{count(evaluation.tokens)} tokens, " if wide and evaluation.tokens is not None else ""
        body.append(f"  {of}{over}{took(evaluation.seconds)}", "dim")
        yield self._tick(state, record, "eval", body)

    def _generate(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        samples = Sample.all_of(record)
        for index, sample in enumerate(samples, start=1):
            which = f" {index}/{len(samples)}" if len(samples) > 1 else ""
            yield self._box(sample, f"step {_step(record)} · sample{which}")

    def _box(self, sample: Sample, title: str) -> RenderableType:
        width = min(self._console.width, MAX_BOX)
        prompt, written = printable(sample.prompt), printable(sample.text)
        body = Text.assemble((prompt, "bold"), written.removeprefix(prompt))
        body.rstrip()
        lines = body.wrap(self._console, width - 4)
        shown = Text("\n").join(lines[:MAX_SAMPLE_LINES])
        if hidden := max(0, len(lines) - MAX_SAMPLE_LINES):
            shown.append(f"\n… {plural(hidden, 'more line')} in events.jsonl", "dim")
        return Panel(shown, title=title, title_align="left", border_style="dim", width=width)

    def _checkpoint(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        saved = Checkpoint.of(record)
        how = f"saved in {took(saved.seconds)}" if saved.seconds is not None else "saved"
        body = Text.assemble((how, "bold"), f"  {size(saved.num_bytes)}  " if saved.num_bytes is not None else "  ")
        body.append(printable(self._below(saved.path)), "dim")
        yield self._tick(state, record, "checkpoint", body)

    def _below(self, path: str) -> str:
        """A path in the run directory without the part that is known already."""
        try:
            return str(Path(path).relative_to(self._directory))
        except ValueError:
            return path

    def _signal(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        yield self._tick(state, record, "signal", _named_reason(record), "yellow")

    def _stop(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        yield self._tick(state, record, "stop", _named_reason(record), "yellow")

    def _control(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        what, said = (printable(text(record.get(key))) for key in ("command", "state"))
        body = Text.assemble((f"{what} {said}", "bold"), f"  {printable(text(record.get('detail')))}")
        yield self._tick(state, record, "control", body, "yellow" if said == "refused" else "")

    def _paused(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        yield self._tick(state, record, "paused", Text(f"for {took(number(record.get('seconds')))}"))

    def _requeue(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        job = printable(text(record.get("job")))
        yield self._tick(state, record, "requeue", Text(f"Slurm was asked to start job {job} again"))

    def _nonfinite(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        loss, norm = (decimal(number(record.get(key)), 4) for key in ("loss", "grad_norm"))
        yield self._tick(state, record, "nonfinite", Text(f"loss {loss}  grad_norm {norm}"), "bold red")

    def _rollback(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        yield self._tick(state, record, "rollback", Text(printable(Rollback.of(record).in_words)), "bold yellow")

    def _restart(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        yield self._tick(state, record, "restart", Text(printable(Restart.of_record(record).in_words)), "bold yellow")

    def _skipped(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        yield self._tick(state, record, "skipped", Text(printable(text(record.get("reason")))), "yellow")

    def _warning(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        yield self._tick(state, record, "warning", Text(printable(text(record.get("message")))), "yellow")

    def _looked_at(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        """A profile or a memory snapshot: where it lies, and how it went."""
        below = {**record, "path": self._below(text(record.get("path")))}
        for said in event_text(below):
            yield self._tick(state, record, said.word, Text(printable(said.body)), "cyan")

    def _alert(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        alert, cleared = Raised.of(record), is_cleared(record)
        body = Text.assemble((printable(alert.kind), "bold"), f"  {printable(alert.message)}")
        label = "over" if cleared else f"{self._glyphs.cross} alert"
        yield self._tick(state, record, label, body, "green" if cleared else "bold red")

    def _notify(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        kind, command, detail = (printable(text(record.get(key))) for key in ("kind", "command", "detail"))
        yield self._tick(state, record, "notify", Text.assemble((kind, "bold"), f"  `{command}` {detail}"), "dim")

    def _phase(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        phase = PhaseBegin.of(record)
        body = Text.assemble((printable(phase.name), "bold"), "  ", printable(phase.in_words))
        yield self._tick(state, record, "phase", body, "cyan")

    def _health(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        yield self._tick(state, record, "health", Text(Health.of(record).in_words))

    def _tokenise(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        dataset, message = (printable(text(record.get(key))) for key in ("dataset", "message"))
        body = Text.assemble((dataset, "bold"), "  ", message)
        yield self._tick(state, record, "tokenise", body, "dim")

    def _failure(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        failure = Failure.of(record)
        body = Text(f"{failure.who}  {printable(failure.message.strip())}")
        yield self._tick(state, record, f"{self._glyphs.cross} failure", body, "bold red")

    def _nothing(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        yield from ()

    def _unknown(self, state: RunState, record: Record) -> Iterator[RenderableType]:
        """An event that has no look of its own, as of a later version: what it says, or its fields as they are."""
        yield self._tick(state, record, printable(record.get("event")), Text(printable(in_one_line(record))))

    def _tick(self, state: RunState, record: Record, label: str, body: Text, style: str = "green") -> Table:
        """One row: step, what, and the rest, in columns that stay where they are from row to row."""
        steps = f"{state.steps:,}" if state.steps else "1,000"
        row = Table.grid(padding=(0, 2))
        row.add_column(width=len(f" step {steps}"), no_wrap=True)
        row.add_column(width=10, overflow="fold")
        row.add_column(overflow="fold")
        row.add_row(Text.assemble((" step ", "dim"), f"{_step(record):>{len(steps)}}"), Text(label, style), body)
        return row


def _named_reason(record: Record) -> Text:
    """What stops the run, and why."""
    reason = printable(text(record.get("reason")))
    return Text.assemble((printable(text(record.get("name"))), "bold"), f"  {reason}" if reason else "")


def _step(record: Record) -> str:
    step = whole(record.get("step"))
    return "–" if step is None else f"{step:,}"
