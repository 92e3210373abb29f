"""Plain lines, for pipes and log files: one per logged step and per event, without colours or cursor movement.

Each line starts with a word that says what it is, at step `N` where it belongs to one (`grep '^eval'`); what does not
fit one line follows indented by four spaces.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from xtrain.records.event import Event
from xtrain.records.metrics import StepMetrics
from xtrain.records.record import Record
from xtrain.records.run_events import StuckEvent
from xtrain.records.start_events import SetupBeginEvent
from xtrain.tui.event_text import event_text, measured, or_dash
from xtrain.tui.lines.drawer import Drawer
from xtrain.tui.lines.next_steps import (
    command_of_model,
    going_on,
    more_of_it,
    outcome,
    short_path,
    succeeded,
    wants_logs,
)
from xtrain.tui.state import RunState
from xtrain.tui.words import count, decimal, duration, printable

# A node is printed when it has ended, not when it starts; stuck ranks are in the failure that follows.
_SUPERFLUOUS = (SetupBeginEvent, StuckEvent)


class PlainView(Drawer):
    """View that writes the lines of each record to `out`."""

    def __init__(self, out: TextIO, directory: Path) -> None:
        self._out = out
        self._directory = directory

    def shows(self, record: Record) -> bool:
        return isinstance(record, Event) or (isinstance(record, StepMetrics) and record.loss is not None)

    def draw(self, state: RunState, record: Record) -> None:
        if state.is_echo(record):
            return
        if isinstance(record, Event):
            self._write(event_lines(record))
        elif isinstance(record, StepMetrics):
            self._write((step_line(state, record),))

    def close(self, state: RunState) -> None:
        self._write(closing_lines(state, self._directory))

    def lost(self, state: RunState, why: str) -> None:
        self._write(closing_lines(state, self._directory, why))

    def _write(self, lines: Iterable[str]) -> None:
        # A line end inside a name or a path must not start a line that claims to be something else.
        self._out.write("".join(printable(line).replace("\n", " ") + "\n" for line in lines))


def step_line(state: RunState, metrics: StepMetrics) -> str:
    """Return `step 120/600 loss 2.3456 grad_norm 0.812 lr 3.00e-03 12.3k tok/s 0.85 s/step eta 6m48s`."""
    parts = [f"step {or_dash(metrics.step)}{f'/{state.steps}' if state.steps else ''}"]
    parts += [f"epoch {state.epoch}"] if state.epoch else []
    parts.append(f"loss {decimal(metrics.loss, 4)}")
    if metrics.objective is not None:
        parts.append(f"objective {decimal(metrics.objective, 4)}")
    if metrics.reward is not None:
        parts.append(f"reward {decimal(metrics.reward, 3)}")
    if metrics.grad_norm is not None:
        parts.append(f"grad_norm {decimal(metrics.grad_norm, 3)}")
    if metrics.lr is not None:
        parts.append(f"lr {metrics.lr:.2e}")
    if metrics.tokens_per_second is not None:
        parts.append(f"{count(metrics.tokens_per_second)} tok/s")
    if metrics.step_seconds is not None:
        parts.append(f"{decimal(metrics.step_seconds, 2)} s/step")
    if metrics.mfu is not None:
        parts.append(f"mfu {metrics.mfu:.1%}")
    if state.seconds_left is not None:
        parts.append(f"eta {duration(state.seconds_left)}")
    return "  ".join(parts)


def event_lines(event: Event) -> Iterator[str]:
    """Yield the lines of one event; none for an event that another one makes redundant."""
    if isinstance(event, _SUPERFLUOUS):
        return
    for said in event_text(event):
        yield "  ".join(filter(None, (said.word, said.at, said.body))).rstrip()
        yield from (f"    {line}".rstrip() for line in said.more)


def closing_lines(state: RunState, directory: Path, why_lost: str = "") -> Iterator[str]:
    """Yield the outcome of a run and what to do next. why_lost: reason why a run counts as lost."""
    if state.end is None:
        of = f"/{state.steps}" if state.steps else ""
        lost = why_lost and not state.failures
        yield f"end  {'lost' if lost else state.status}  step {state.step}{of}  {why_lost if lost else outcome(state)}"
    for evaluation in state.evaluations.values():
        yield f"final  {measured(evaluation)}  (step {or_dash(evaluation.step)})"
    yield f"directory  {short_path(directory)}"
    if wants_logs(state):
        yield f"logs  {short_path(directory / 'logs')}"
    if succeeded(state):
        if more := more_of_it(state):
            yield f"more  {more}"
        _, *command = command_of_model(state, directory)
        yield f"next  {' '.join(command)}"
    else:
        yield f"next  {going_on(state)}"
