"""Plain lines, for pipes and log files: one per logged step and per event, without colours or cursor movement.

Each line starts with a word that says what it is, at step `N` where it belongs to one (`grep '^eval'`); what does not
fit one line follows indented by four spaces.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

from ..events import (
    Checkpoint,
    Evaluation,
    Failure,
    Health,
    PhaseBegin,
    Restart,
    Rollback,
    RunEnd,
    RunStart,
    Sample,
    text,
    whole,
)
from ..raised import Raised, is_cleared
from ..state import RunState
from ..tail import Record
from ..words import count, decimal, duration, number, perplexity, plural, printable, size, took
from .drawer import Drawer
from .next_steps import generate_command, going_on, more_of_it, outcome, short_path, succeeded, wants_logs


class PlainView(Drawer):
    """Writes the lines of each record to `out`."""

    def __init__(self, out: TextIO, directory: Path) -> None:
        self._out = out
        self._directory = directory

    def shows(self, record: Record) -> bool:
        return "event" in record or "loss" in record

    def draw(self, state: RunState, record: Record) -> None:
        if state.is_echo(record):
            return
        lines = event_lines(record) if "event" in record else (step_line(state, record),)
        self._write(lines)

    def close(self, state: RunState) -> None:
        self._write(closing_lines(state, self._directory))

    def _write(self, lines: Iterable[str]) -> None:
        # A line end inside a name or a path must not start a line that claims to be something else.
        self._out.write("".join(printable(line).replace("\n", " ") + "\n" for line in lines))


def step_line(state: RunState, record: Record) -> str:
    """`step 120/600  loss 2.3456  grad_norm 0.812  lr 3.00e-03  12.3k tok/s  0.85 s/step  eta 6m48s`."""
    step = whole(record.get("step"))
    parts = [f"step {'–' if step is None else step}{f'/{state.steps}' if state.steps else ''}"]
    parts.append(f"loss {decimal(number(record.get('loss')), 4)}")
    if (norm := number(record.get("grad_norm"))) is not None:
        parts.append(f"grad_norm {decimal(norm, 3)}")
    if (rate := number(record.get("lr"))) is not None:
        parts.append(f"lr {rate:.2e}")
    if (speed := number(record.get("tokens_per_second"))) is not None:
        parts.append(f"{count(speed)} tok/s")
    if (seconds := number(record.get("step_seconds"))) is not None:
        parts.append(f"{decimal(seconds, 2)} s/step")
    if (mfu := number(record.get("mfu"))) is not None:
        parts.append(f"mfu {mfu:.1%}")
    if state.seconds_left is not None:
        parts.append(f"eta {duration(state.seconds_left)}")
    return "  ".join(parts)


def event_lines(record: Record) -> Iterator[str]:
    """The lines of one event; none for those that another event of the same thing makes superfluous."""
    event = text(record.get("event"))
    draw = _LINES.get(event)
    yield from draw(record) if draw else _unknown(event, record)


def closing_lines(state: RunState, directory: Path) -> Iterator[str]:
    """What the run came to, and what to do next."""
    if state.end is None:
        of = f"/{state.steps}" if state.steps else ""
        yield f"end  {state.status}  step {state.step}{of}  {outcome(state)}"
    for evaluation in state.evaluations.values():
        yield f"final  {_measured(evaluation)}  (step {_or_dash(evaluation.step)})"
    yield f"directory  {short_path(directory)}"
    if wants_logs(state):
        yield f"logs  {short_path(directory / 'logs')}"
    if succeeded(state):
        if more := more_of_it(state):
            yield f"more  {more}"
        yield f"next  {' '.join(generate_command(directory))}"
    else:
        yield f"next  {going_on(state)}"


def _run_start(record: Record) -> Iterator[str]:
    start = RunStart.of(record)
    parts = [f"run  {start.name or start.run_id}", f"attempt {start.attempt}"]
    if start.world_size:
        parts.append(f"{plural(start.world_size, 'rank')} on {start.device or 'unknown devices'}")
    parts.append(f"{start.steps} steps" if start.steps else "open end")
    if start.resumed_step is not None:
        parts.append(f"resumed at step {start.resumed_step}")
    yield "  ".join(parts)


def _setup(record: Record) -> Iterator[str]:
    line = f"setup  {text(record.get('node')):<28}  {took(number(record.get('seconds'))):>8}"
    detail = text(record.get("detail"))
    yield f"{line}  {detail}" if detail else line


def _setup_done(record: Record) -> Iterator[str]:
    yield f"ready  {took(number(record.get('seconds')))}"


def _measured(evaluation: Evaluation) -> str:
    parts = [evaluation.dataset, f"loss {decimal(evaluation.loss, 4)}"]
    if (ppl := perplexity(evaluation.loss)) is not None:
        parts.append(f"ppl {decimal(ppl, 2)}")
    if evaluation.averaged:
        parts.append("averaged weights")
    return "  ".join(parts)


def _eval(record: Record) -> Iterator[str]:
    evaluation = Evaluation.of(record)
    parts = [f"eval  step {_or_dash(evaluation.step)}", _measured(evaluation)]
    if evaluation.tokens is not None:
        parts.append(f"{count(evaluation.tokens)} tokens")
    parts.append(took(evaluation.seconds))
    yield "  ".join(parts)


def _generate(record: Record) -> Iterator[str]:
    samples = Sample.all_of(record)
    for index, sample in enumerate(samples, start=1):
        yield f"sample  step {_at(record)}  {index}/{len(samples)}  prompt {sample.prompt!r}"
        yield from _indented(sample.text)


def _checkpoint(record: Record) -> Iterator[str]:
    """A full state, or the weights alone: the event has the name of what was saved."""
    saved = Checkpoint.of(record)
    parts = [f"{text(record.get('event'))}  step {_or_dash(saved.step)}", saved.path]
    if saved.num_bytes is not None:
        parts.append(size(saved.num_bytes))
    parts.append(took(saved.seconds))
    yield "  ".join(parts)


def _signal(record: Record) -> Iterator[str]:
    yield f"signal  step {_at(record)}  {text(record.get('name'))}"


def _stop(record: Record) -> Iterator[str]:
    yield f"stop  step {_at(record)}  {text(record.get('name'))}: {text(record.get('reason'))}"


def _control(record: Record) -> Iterator[str]:
    detail = f": {said}" if (said := text(record.get("detail"))) else ""
    yield f"control  step {_at(record)}  {text(record.get('command'))} {text(record.get('state'))}{detail}"


def _paused(record: Record) -> Iterator[str]:
    yield f"paused  step {_at(record)}  for {took(number(record.get('seconds')))}"


def _requeue(record: Record) -> Iterator[str]:
    yield f"requeue  step {_at(record)}  Slurm was asked to start job {text(record.get('job'))} again"


def _nonfinite(record: Record) -> Iterator[str]:
    loss, norm = (decimal(number(record.get(key)), 4) for key in ("loss", "grad_norm"))
    yield f"nonfinite  step {_at(record)}  loss {loss}  grad_norm {norm}"


def _rollback(record: Record) -> Iterator[str]:
    yield f"rollback  step {_at(record)}  {Rollback.of(record).in_words}"


def _resumed(record: Record) -> Iterator[str]:
    """With the groups of the state that do not simply go on."""
    groups = record.get("groups")
    found = groups.items() if isinstance(groups, dict) else ()
    others = ", ".join(f"{name} {word}" for name, word in found if word not in ("read", "own"))
    yield from _headed(f"resumed  step {_at(record)}", "  ".join(filter(None, (text(record.get("path")), others))))


def _restart(record: Record) -> Iterator[str]:
    yield from _headed(f"restart  step {_at(record)}", Restart.of_record(record).in_words)


def _skipped(record: Record) -> Iterator[str]:
    yield from _headed(f"skipped  step {_at(record)}", text(record.get("reason")))


def _warning(record: Record) -> Iterator[str]:
    yield from _headed(f"warning  step {_at(record)}", text(record.get("message")))


def _alert(record: Record) -> Iterator[str]:
    alert = Raised.of(record)
    over = "over: " if is_cleared(record) else ""
    yield from _headed(f"alert  step {_at(record)}  {alert.kind}", over + alert.message)


def _notify(record: Record) -> Iterator[str]:
    yield from _headed(f"notify  step {_at(record)}  {text(record.get('kind'))}", text(record.get("detail")))


def _phase(record: Record) -> Iterator[str]:
    phase = PhaseBegin.of(record)
    yield f"phase  step {_at(record)}  {phase.name}  {phase.in_words}".rstrip()


def _health(record: Record) -> Iterator[str]:
    yield f"health  step {_at(record)}  {Health.of(record).in_words}"


def _tokenise(record: Record) -> Iterator[str]:
    yield from _headed(f"tokenise  {text(record.get('dataset'))}", text(record.get("message")))


def _failure(record: Record) -> Iterator[str]:
    failure = Failure.of(record)
    yield from _headed(f"failure  step {_or_dash(failure.step)}  {failure.who}", failure.message)
    yield from _indented(failure.traceback)


def _run_end(record: Record) -> Iterator[str]:
    end = RunEnd.of(record)
    parts = [f"end  {end.status}  step {_or_dash(end.step)}"]
    if end.loss is not None:
        parts.append(f"loss {decimal(end.loss, 4)}")
    if end.seconds is not None:
        parts.append(duration(end.seconds))
    yield "  ".join(parts)


def _nothing(record: Record) -> Iterator[str]:
    yield from ()


def _unknown(event: str, record: Record) -> Iterator[str]:
    """An event of a later version: its fields as they are."""
    fields = (f"{key} {value}" for key, value in record.items() if key not in ("event", "time", "step"))
    yield from _headed(f"{event}  step {_at(record)}", "  ".join(fields))


def _headed(head: str, body: str) -> Iterator[str]:
    first, *rest = body.strip().split("\n")
    yield f"{head}  {first}".rstrip()
    yield from (f"    {line}" for line in rest)


def _indented(body: str) -> Iterator[str]:
    stripped = body.strip("\n")
    yield from (f"    {line}".rstrip() for line in stripped.split("\n") if stripped)


def _at(record: Record) -> str:
    return _or_dash(whole(record.get("step")))


def _or_dash(step: int | None) -> str:
    return "–" if step is None else str(step)


_LINES: dict[str, Callable[[Record], Iterator[str]]] = {
    "run_start": _run_start,
    "setup_begin": _nothing,
    "setup": _setup,
    "setup_done": _setup_done,
    "eval": _eval,
    "generate": _generate,
    "checkpoint": _checkpoint,
    "model": _checkpoint,
    "signal": _signal,
    "stop": _stop,
    "control": _control,
    "paused": _paused,
    "requeue": _requeue,
    "nonfinite": _nonfinite,
    "resumed": _resumed,
    "rollback": _rollback,
    "restart": _restart,
    "skipped": _skipped,
    "phase": _phase,
    "health": _health,
    "stuck": _nothing,
    "tokenise": _tokenise,
    "warning": _warning,
    "alert": _alert,
    "notify": _notify,
    "failure": _failure,
    "run_end": _run_end,
}
