"""What each event says, in words: the same for a line of a log file and for a list on a screen."""

from collections.abc import Callable, Iterator
from typing import Any

from attrs import frozen

from ..records.event import Event
from ..records.lines import as_object
from ..records.run_events import (
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
from ..records.start_events import (
    DataEvent,
    DeviceEvent,
    EstimateEvent,
    HorizonEvent,
    ResumedEvent,
    RunStartEvent,
    SetupBeginEvent,
    SetupDoneEvent,
    SetupEvent,
    TokeniseEvent,
)
from ..records.step_events import (
    CheckpointEvent,
    EvalEvent,
    GenerateEvent,
    HealthEvent,
    MemorySnapshotEvent,
    ModelEvent,
    NonFiniteEvent,
    PhaseEvent,
    ProfileEvent,
    RollbackEvent,
    SkippedEvent,
)
from .words import brief, count, decimal, duration, perplexity, plural, size, took


@frozen
class EventText:
    """One thing that is said. at: `step 120`, empty where it belongs to none; body: what it says, in one line; more:
    what does not fit one."""

    word: str
    at: str
    body: str
    more: tuple[str, ...] = ()


def event_text(event: Event) -> tuple[EventText, ...]:
    """What an event says; nothing for one without a name."""
    return tuple(_TELLERS.get(type(event), _others)(event)) if event.event else ()


def in_one_line(event: Event) -> str:
    """What an event says beside its kind and its step."""
    first, *others = event_text(event) or (EventText("", "", ""),)
    return f"{first.body}  and {plural(len(others), 'more sample')}" if others else first.body


def measured(evaluation: EvalEvent) -> str:
    """`stdlib  loss 1.4895  ppl 4.43`."""
    parts = [evaluation.dataset, f"loss {decimal(evaluation.loss, 4)}"]
    if (ppl := perplexity(evaluation.loss)) is not None:
        parts.append(f"ppl {decimal(ppl, 2)}")
    if evaluation.weights == "averaged":
        parts.append("averaged weights")
    return "  ".join(parts)


def failed(failure: FailureEvent) -> str:
    """Who: `rank 3`."""
    return "a rank" if failure.rank is None else f"rank {failure.rank}"


def cause(failure: FailureEvent) -> str:
    """What went wrong, with the code that `xtrain explain` knows more about, if it has one."""
    return f"[{failure.code}] {failure.error}" if failure.code else failure.error


def health_text(event: HealthEvent) -> str:
    """`an all-reduce takes 0.6 ms; rank 3 came last, after 1.2 ms`."""
    late = "" if event.slowest is None else f"; rank {event.slowest} came last, after {brief(event.late_seconds)}"
    return f"an all-reduce takes {brief(event.seconds)}{late}"


def rollback_text(event: RollbackEvent) -> str:
    """`from step 12 to ckpt-s000000000010, time 1 of 3; 24 rows left out`."""
    time = "" if event.number is None else f", time {event.number} of {event.of}"
    rows = "" if event.rows_left_out is None else f"; {event.rows_left_out:,} rows left out"
    return f"from step {event.from_step} to {event.checkpoint}{time}{rows}"


def phase_text(event: PhaseEvent) -> str:
    """Its mixture, the largest share first, and what it does to the learning rate."""
    largest = sorted(event.shares.items(), key=lambda pair: -pair[1])
    parts = [", ".join(f"{name} {share:.1%}" for name, share in largest)]
    parts += [f"lr × {event.lr_scale:g}"] if event.lr_scale not in (None, 1) else []
    return "  ".join(filter(None, parts))


def restart_text(event: RestartEvent) -> str:
    """`1 of 3  rank 1 was ended by SIGKILL; continues from step 20 on 2 ranks`."""
    place = f"from step {event.step:,}" if event.step else "from the beginning"
    world = f" on {plural(event.world, 'rank')}" if event.world else ""
    count = "" if event.number is None else f"{event.number} of {event.of}  " if event.of else f"{event.number}  "
    return f"{count}{event.reason}; continues {place}{world}"


def or_dash(step: int | None) -> str:
    """A step, or what stands for one that is not known."""
    return "–" if step is None else str(step)


def _run_start(start: RunStartEvent) -> Iterator[EventText]:
    parts = [start.name or start.run_id, f"attempt {start.attempt or 1}"]
    if start.world_size:
        parts.append(f"{plural(start.world_size, 'rank')} on {start.device or 'unknown devices'}")
    parts.append(f"{start.steps} steps" if start.steps else "unknown length")
    if start.resumed_step is not None:
        parts.append(f"resumed at step {start.resumed_step}")
    yield EventText("run", "", "  ".join(parts))


def _setup_begin(event: SetupBeginEvent) -> Iterator[EventText]:
    yield EventText("begins", "", event.node)


def _setup(event: SetupEvent) -> Iterator[EventText]:
    line = f"{event.node:<28}  {took(event.seconds):>8}"
    yield EventText(event.event, "", f"{line}  {event.detail}" if event.detail else line)


def _device(event: DeviceEvent) -> Iterator[EventText]:
    parts = [event.device]
    parts += [plural(event.threads, "thread")] if event.threads else []
    parts += [f"fp32 products {event.matmul}"] if event.matmul else []
    parts += [f"torch {event.torch}"] if event.torch else []
    yield from _headed(event.event, "", "", "  ".join(parts))


def _data(event: DataEvent) -> Iterator[EventText]:
    """`code 12,345 rows  drills 400 rows`."""
    parts = [f"{name} {plural(rows, 'row')}" for name, rows in event.rows.items()]
    yield from _headed(event.event, "", "", "  ".join(parts))


def _horizon(event: HorizonEvent) -> Iterator[EventText]:
    """`17 steps, 33 rows an epoch`."""
    steps = "" if event.steps is None else plural(event.steps, "step")
    rows = "" if event.epoch_rows is None else f"{event.epoch_rows:,g} rows an epoch"
    parts = ["  ".join(filter(None, (steps, rows)))]
    parts += [f"stops at step {event.stop_at}"] if event.stop_at else []
    parts += [f"{name} from step {first + 1:,}" for name, first in event.phases.items() if first]
    yield from _headed("counted", "", "", "  ".join(parts))


def _setup_done(event: SetupDoneEvent) -> Iterator[EventText]:
    yield EventText("ready", "", took(event.seconds))


def _estimate(event: EstimateEvent) -> Iterator[EventText]:
    """`about 4m43s for the 593 steps that are left`, and what that was measured on."""
    left = f"about {duration(event.seconds_left)} for the {plural(event.steps_left or 0, 'step')} that are left"
    pace = f"{took(event.step_seconds)} a step on this machine"
    pace += f", measured over {plural(event.measured_steps or 0, 'step')}"
    first = f", after {took(event.first_step_seconds)} for the first" if event.first_step_seconds else ""
    yield EventText(event.event, _at(event), f"{left}: {pace}{first}; evaluations and saves come on top")


def _eval(evaluation: EvalEvent) -> Iterator[EventText]:
    parts = [measured(evaluation)]
    if evaluation.tokens is not None:
        parts.append(f"{count(evaluation.tokens)} tokens")
    parts.append(took(evaluation.seconds))
    yield EventText(evaluation.event, _at(evaluation), "  ".join(parts))


def _generate(event: GenerateEvent) -> Iterator[EventText]:
    for index, sample in enumerate(event.samples, start=1):
        head = f"{index}/{len(event.samples)}  prompt {sample.prompt!r}"
        yield EventText("sample", _at(event), head, _lines(sample.text))


def _saved(event: CheckpointEvent | ModelEvent) -> Iterator[EventText]:
    """A full state, or the weights alone: the event has the name of what was saved."""
    parts = [event.path]
    if event.bytes is not None:
        parts.append(size(event.bytes))
    parts.append(took(event.seconds))
    yield EventText(event.event, _at(event), "  ".join(parts))


def _signal(event: SignalEvent) -> Iterator[EventText]:
    yield EventText(event.event, _at(event), f"{event.name}: {event.reason}" if event.reason else event.name)


def _stop(event: StopEvent) -> Iterator[EventText]:
    yield EventText(event.event, _at(event), f"{event.name}: {event.reason}")


def _control(event: ControlEvent) -> Iterator[EventText]:
    detail = f": {event.detail}" if event.detail else ""
    yield EventText(event.event, _at(event), f"{event.command} {event.state}{detail}")


def _paused(event: PausedEvent) -> Iterator[EventText]:
    yield EventText(event.event, _at(event), f"for {took(event.seconds)}")


def _requeue(event: RequeueEvent) -> Iterator[EventText]:
    yield EventText(event.event, _at(event), f"Slurm was asked to start job {event.job} again")


def _nonfinite(event: NonFiniteEvent) -> Iterator[EventText]:
    yield EventText(event.event, _at(event), f"loss {decimal(event.loss, 4)}  grad_norm {decimal(event.grad_norm, 4)}")


def _rollback(event: RollbackEvent) -> Iterator[EventText]:
    yield EventText(event.event, _at(event), rollback_text(event))


def _resumed(event: ResumedEvent) -> Iterator[EventText]:
    """With the groups of the state that do not simply go on."""
    others = ", ".join(f"{name} {word}" for name, word in event.groups.items() if word not in ("read", "own"))
    yield from _headed(event.event, _at(event), "", "  ".join(filter(None, (event.path, others))))


def _restart(event: RestartEvent) -> Iterator[EventText]:
    yield from _headed(event.event, _at(event), "", restart_text(event))


def _skipped(event: SkippedEvent) -> Iterator[EventText]:
    yield from _headed(event.event, _at(event), "", event.reason)


def _warning(event: WarningEvent) -> Iterator[EventText]:
    yield from _headed(event.event, _at(event), "", event.message)


def _profile(event: ProfileEvent) -> Iterator[EventText]:
    one = event.first == event.last
    steps = f"step {or_dash(event.first)}" if one else f"steps {or_dash(event.first)} to {or_dash(event.last)}"
    yield EventText(event.event, _at(event), "  ".join((steps, *_looked_at(event))))


def _memory_snapshot(event: MemorySnapshotEvent) -> Iterator[EventText]:
    yield EventText("memory", _at(event), "  ".join(_looked_at(event)))


def _looked_at(event: ProfileEvent | MemorySnapshotEvent) -> Iterator[str]:
    """Of how many ranks something was written, where it lies, and how it went."""
    if event.ranks is not None:
        yield plural(event.ranks, "rank")
    yield event.path
    if event.bytes is not None:
        yield size(event.bytes)
    yield took(event.seconds)
    if event.note:
        yield event.note


def _alert(event: AlertEvent) -> Iterator[EventText]:
    over = "over: " if event.state == "cleared" else ""
    yield from _headed(event.event, _at(event), event.kind, over + event.message)


def _notify(event: NotifyEvent) -> Iterator[EventText]:
    yield from _headed(event.event, _at(event), event.kind, f"`{event.command}` {event.detail}")


def _phase(event: PhaseEvent) -> Iterator[EventText]:
    yield EventText(event.event, _at(event), f"{event.name}  {phase_text(event)}".rstrip())


def _health(event: HealthEvent) -> Iterator[EventText]:
    yield EventText(event.event, _at(event), health_text(event))


def _stuck(event: StuckEvent) -> Iterator[EventText]:
    """`ranks 1, 3 frozen  in step.forward_backward  for 62.0 s`."""
    names = ", ".join(map(str, event.ranks)) or "unknown"
    parts = [f"{'rank' if len(event.ranks) < 2 else 'ranks'} {names} {event.state}".rstrip()]
    parts += [f"in {event.node}"] if event.node else []
    parts += [f"for {took(event.seconds)}"] if event.seconds is not None else []
    yield EventText(event.event, _at(event), "  ".join(parts))


def _tokenise(event: TokeniseEvent) -> Iterator[EventText]:
    yield from _headed(event.event, "", event.dataset, event.message)


def _failure(failure: FailureEvent) -> Iterator[EventText]:
    for said in _headed(failure.event, f"step {or_dash(failure.step)}", failed(failure), cause(failure)):
        yield EventText(said.word, said.at, said.body, (*said.more, *_lines(failure.traceback)))


def _run_end(end: RunEndEvent) -> Iterator[EventText]:
    parts = [f"{end.status or 'ended'}  step {or_dash(end.step)}"]
    if end.loss is not None:
        parts.append(f"loss {decimal(end.loss, 4)}")
    if end.seconds is not None:
        parts.append(duration(end.seconds))
    yield EventText("end", "", "  ".join(parts))


def _others(event: Event) -> Iterator[EventText]:
    """An event that has no words of its own, as of a later version: its fields as they are."""
    fields = (f"{key} {value}" for key, value in as_object(event).items() if key not in ("event", "time", "step"))
    yield from _headed(event.event, _at(event), "", "  ".join(fields))


def _headed(word: str, at: str, head: str, body: str) -> Iterator[EventText]:
    """Of a body of several lines the first one beside `head`."""
    first, *rest = body.strip().split("\n")
    yield EventText(word, at, "  ".join(filter(None, (head, first))), tuple(rest))


def _lines(body: str) -> tuple[str, ...]:
    return tuple(line.rstrip() for line in body.strip("\n").split("\n")) if body.strip("\n") else ()


def _at(event: Event) -> str:
    return f"step {or_dash(event.step)}"


_TELLERS: dict[type[Event], Callable[[Any], Iterator[EventText]]] = {
    RunStartEvent: _run_start,
    SetupBeginEvent: _setup_begin,
    SetupEvent: _setup,
    DataEvent: _data,
    HorizonEvent: _horizon,
    SetupDoneEvent: _setup_done,
    EstimateEvent: _estimate,
    DeviceEvent: _device,
    EvalEvent: _eval,
    GenerateEvent: _generate,
    CheckpointEvent: _saved,
    ModelEvent: _saved,
    SignalEvent: _signal,
    StopEvent: _stop,
    ControlEvent: _control,
    PausedEvent: _paused,
    RequeueEvent: _requeue,
    NonFiniteEvent: _nonfinite,
    ResumedEvent: _resumed,
    RollbackEvent: _rollback,
    RestartEvent: _restart,
    SkippedEvent: _skipped,
    PhaseEvent: _phase,
    HealthEvent: _health,
    StuckEvent: _stuck,
    TokeniseEvent: _tokenise,
    WarningEvent: _warning,
    ProfileEvent: _profile,
    MemorySnapshotEvent: _memory_snapshot,
    AlertEvent: _alert,
    NotifyEvent: _notify,
    FailureEvent: _failure,
    RunEndEvent: _run_end,
}
