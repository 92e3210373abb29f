"""Views of a run as plain lines and as NDJSON, their base class, and the next steps after a run."""

import json
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TextIO

import msgspec

from xtrain.records.events import StuckEvent
from xtrain.records.lines import Event, Record, as_object, plain_value
from xtrain.records.metrics import StepMetrics
from xtrain.records.names import EndStatus
from xtrain.records.training_events import LrSweepEvent, SetupBeginEvent, SetupEvent
from xtrain.text.units import count, decimal, duration, printable
from xtrain.tui.event_text import event_text, failed, measured, or_dash
from xtrain.tui.state import RunState

LONG_SETUP: Final = 1.0
"""Seconds from which a set-up node has a line of its own; the others are in events.jsonl."""


class Drawer:
    """Base class of views, which draw a run as its records arrive; draws nothing itself."""

    def shows(self, record: Record) -> bool:
        """Return True if `draw` wants this record, with the state right after it."""
        return False

    def draw(self, state: RunState, record: Record) -> None:
        """Show one record, which led to `state`."""

    def refresh(self, state: RunState) -> None:
        """Show what changes with time; called with every poll."""

    def close(self, state: RunState) -> None:
        """Show the outcome: the run is over, or nothing more is written."""

    def lost(self, state: RunState, why: str) -> None:
        """Show that no process is left to report how the run ends; why: the evidence."""
        self.close(state)

    def release(self) -> None:
        """Release the terminal without output after an interruption."""


def short_path(path: Path) -> str:
    """Return the path as typed here: relative to the working directory if it is below it. Does not access the file
    system, which may hang."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (OSError, ValueError):
        return str(path)


def command_of_model(state: RunState, directory: Path) -> tuple[str, str, str]:
    """Return what a command does with the trained model, and the command in two parts that may stand on two lines:
    generate text, or export a reward model."""
    folder = shlex.quote(short_path(directory))
    if state.start is not None and state.start.rewards:
        return "export the model", f"xtrain export {folder}", "--to FOLDER"
    return "generate text", f"xtrain generate {folder}", '--prompt "…"'


def going_on(state: RunState) -> str:
    """Return how to continue a run that stopped before its end or has no checkpoint to resume from."""
    sweep = next((each for each in reversed(state.ticks) if isinstance(each, LrSweepEvent)), None)
    if sweep is not None and not state.failures:
        rate = sweep.steepest or sweep.minimum_tenth
        return "the loss falls at no rate" if rate is None else f"train with --set optimizer.lr={rate:.2g}"
    if state.status == EndStatus.DONE and not _saved(state):
        if state.export is not None:
            return f"what was trained is in {printable(state.export.path)}"
        return "no checkpoint was saved, so the trained model is gone"
    code = next((failure.code for failure in state.failures if failure.code), None)
    if code:
        return f"xtrain explain {code}"
    checkpoint = state.checkpoint
    if checkpoint and checkpoint.step:
        return f"run the same command again to resume from step {checkpoint.step:,}"
    if state.start and state.start.resumed_step:
        return f"run the same command again to resume from step {state.start.resumed_step:,}"
    if state.start is None:  # only the run itself knows what earlier starts have left
        return "run the same command again; it resumes from the last checkpoint, if there is one"
    return "run the same command again; no checkpoint was saved, so it starts from scratch"


def more_of_it(state: RunState) -> str:
    """Return how to extend a run that had nothing left to do; empty for others."""
    if state.status != EndStatus.COMPLETE:
        return ""
    return "a larger experiment.budget extends the run; --set checkpoint.resume=false starts from scratch"


def outcome(state: RunState) -> str:
    """Return what the status leaves open about how the run ended; may be empty."""
    if state.failures:
        first = state.failures[0]
        if state.under_way is not None:
            return f"{failed(first)} in {state.under_way.node}"
        return failed(first) if first.step is None else f"{failed(first)} at step {first.step:,}"
    if state.end is None:
        return "nothing was recorded" if state.status == "waiting" else "the run ended without reporting a reason"
    if state.status == EndStatus.COMPLETE:
        return "nothing was left to do"
    return f"by {state.signal}" if state.signal and state.status in (EndStatus.STOPPED, EndStatus.INTERRUPTED) else ""


def wants_logs(state: RunState) -> bool:
    """Return True if the logs are the next place to look."""
    return state.end is None or state.status == EndStatus.FAILED


def succeeded(state: RunState) -> bool:
    """Return True if the run directory has a trained model at the end."""
    return state.status == EndStatus.COMPLETE or (state.status == EndStatus.DONE and _saved(state))


def _saved(state: RunState) -> bool:
    resumed = state.start is not None and state.start.resumed_step is not None
    return state.checkpoint is not None or state.model is not None or resumed


# A node is printed when it has ended, not when it starts; stuck ranks are in the failure that follows.
_SUPERFLUOUS = (SetupBeginEvent, StuckEvent)


def is_short(record: Record) -> bool:
    """Return True for the end of a set-up node that took less than a second."""
    return isinstance(record, SetupEvent) and (record.seconds or 0) < LONG_SETUP


class PlainView(Drawer):
    """View that writes the lines of each record to `out`. verbose: of every set-up node."""

    def __init__(self, out: TextIO, directory: Path, *, verbose: bool = False) -> None:
        self._out = out
        self._directory = directory
        self._verbose = verbose

    def shows(self, record: Record) -> bool:
        return isinstance(record, Event) or (isinstance(record, StepMetrics) and record.loss is not None)

    def draw(self, state: RunState, record: Record) -> None:
        if state.is_echo(record) or (is_short(record) and not self._verbose):
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
    parts = (
        f"step {or_dash(metrics.step)}{f'/{state.steps}' if state.steps else ''}",
        f"epoch {state.epoch}" if state.epoch else "",
        f"loss {decimal(metrics.loss, 4)}",
        "" if metrics.objective is None else f"objective {decimal(metrics.objective, 4)}",
        "" if metrics.reward is None else f"reward {decimal(metrics.reward, 3)}",
        "" if metrics.grad_norm is None else f"grad_norm {decimal(metrics.grad_norm, 3)}",
        "" if metrics.lr is None else f"lr {metrics.lr:.2e}",
        "" if metrics.tokens_per_second is None else f"{count(metrics.tokens_per_second)} tok/s",
        "" if metrics.step_seconds is None else f"{decimal(metrics.step_seconds, 2)} s/step",
        "" if metrics.mfu is None else f"mfu {metrics.mfu:.1%}",
        "" if state.seconds_left is None else f"eta {duration(state.seconds_left)}",
    )
    return "  ".join(filter(None, parts))


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


class JsonView(Drawer):
    """View of one JSON line per record, with its fields as written, and `kind`."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def shows(self, record: Record) -> bool:
        return True

    def draw(self, state: RunState, record: Record) -> None:
        self._out.write(line(record) + "\n")

    def lost(self, state: RunState, why: str) -> None:
        self._out.write(json.dumps({"kind": "lost", "step": state.step, "why": why}) + "\n")


def line(record: Record) -> str:
    """Return `record` as one line of strict JSON."""
    found = {"kind": "event" if isinstance(record, Event) else "metrics"}
    # An alert has a kind of its own, which says less here than its message.
    found |= {key: value for key, value in as_object(record).items() if key != "kind"}
    return json.dumps(plain_value(msgspec.to_builtins(found)))
