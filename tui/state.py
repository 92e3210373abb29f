"""The state of a run as far as its records show, and the pure function that moves it on."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from attrs import evolve, field, frozen
from msgspec.structs import replace

from xtrain.records import events
from xtrain.records import training_events as training
from xtrain.records.lines import Event, Record
from xtrain.records.metrics import StepMetrics
from xtrain.records.names import ControlState, ControlWord, EndStatus
from xtrain.tui.feed import History, HistoryRecorder

# Ticks and failures kept: enough to look back on, however long the run and however many ranks fail.
MAX_TICKS = 200
MAX_FAILURES = 64


@frozen(kw_only=True)
class SetupNode:
    """Start-up node; running while `seconds` is None."""

    node: str
    began: float | None
    seconds: float | None = None
    detail: str = ""


@frozen(kw_only=True)
class RunState:
    """State of a run; every field has a meaning before the first record."""

    start: training.RunStartEvent | None = None
    setup: tuple[SetupNode, ...] = ()
    setup_seconds: float | None = None
    """Duration of start-up, once it is over."""
    setup_done_time: float | None = None
    rows: Mapping[str, int] = MappingProxyType({})
    """Number of training rows of each dataset, once they are prepared."""
    counted_steps: int | None = None
    """The steps of the run, once the data has been counted."""
    epochs: float | None = None
    """The budget, if it is in epochs and the data has been counted."""
    horizon: training.HorizonEvent | None = None
    """Counts of the run for values planned in epochs."""
    history: History = field(factory=History)
    event_step: int = 0
    """Last step followed by an evaluation, a checkpoint or the like: logging may be sparse."""
    first_step: int = 0
    """First step of this start, regardless of later restarts and rollbacks."""
    took: Mapping[str, float] = MappingProxyType({})
    """Seconds for which each node outside steps blocked training when it last ran."""
    evaluations: Mapping[str, training.EvalEvent] = MappingProxyType({})
    """Latest evaluation of each dataset, in order of first occurrence."""
    checkpoint: training.CheckpointEvent | None = None
    model: training.ModelEvent | None = None
    """The last save of weights alone."""
    export: training.ExportEvent | None = None
    ticks: tuple[Event, ...] = ()
    """The latest events between steps (evaluations, samples, checkpoints, warnings, …), as recorded."""
    num_warnings: int = 0
    num_skipped: int = 0
    num_nonfinite: int = 0
    num_rollbacks: int = 0
    num_restarts: int = 0
    replicas: events.ReplicasEvent | None = None
    """Replica groups that take part in steps, if there are several."""
    restarting: bool = False
    """The worker group has failed and has not been restarted yet."""
    estimated_seconds_per_step: float | None = None
    """Duration of a step, as the run estimated it from its first steps."""
    signal: str | None = None
    paused_since: float | None = None
    """Time at which the run began to wait for `xtrain control resume`; None while it does not."""
    raised: tuple[events.AlertEvent, ...] = ()
    """Raised alerts of this attempt, one of each kind, in order of occurrence."""
    failures: tuple[events.FailureEvent, ...] = ()
    end: events.RunEndEvent | None = None

    @property
    def status(self) -> str:
        """`waiting`, `starting`, `training`, then the status of `run_end`; `failed` as soon as a rank has failed."""
        if self.end is not None:
            return self.end.status or "ended"
        if self.failures:
            return EndStatus.FAILED
        if self.restarting:
            return "starting"
        if self.history.origin is not None or self.num_rollbacks or self.estimated_seconds_per_step is not None:
            return "training"
        return "waiting" if self.start is None and not self.setup else "starting"

    def is_echo(self, record: Record) -> bool:
        """Return True if a record that led to this state only repeats that a rank is gone."""
        return isinstance(record, events.FailureEvent) and record.lost and len(self.failures) > 1

    @property
    def under_way(self) -> SetupNode | None:
        """The start-up node that has started and not finished."""
        return next((node for node in reversed(self.setup) if node.seconds is None), None)

    @property
    def steps(self) -> int | None:
        """Number of optimizer steps of the run; None where unknown."""
        planned = self.start.steps if self.start else None
        if self.horizon is not None and self.horizon.steps is not None:
            return self.horizon.steps
        return planned if planned and planned > 0 else self.counted_steps

    @property
    def attempt(self) -> int:
        """Number of this start of the run, from 1; 0 before the first."""
        return 0 if self.start is None else self.start.attempt or 1

    @property
    def epoch(self) -> str:
        """Progress in the data, as `1.25/3` epochs; empty if the plan does not use epochs."""
        now = self.history.last.epoch
        if now is None or self.horizon is None:
            return ""
        return f"{now:.2f}/{self.epochs:g}" if self.epochs is not None else f"{now:.2f}"

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        resumed = self.start.resumed_step if self.start else None
        ended = self.end.step if self.end else None
        return max(self.history.step or 0, self.event_step, resumed or 0, ended or 0)

    @property
    def progress(self) -> float | None:
        """The share of steps done, from 0 to 1, if their number is known."""
        return min(1.0, self.step / self.steps) if self.steps else None

    @property
    def loss(self) -> float | None:
        """The training loss: as the run ended, or as last logged."""
        ended = self.end.loss if self.end else None
        return ended if ended is not None else self.history.last.loss

    @property
    def seconds_per_step(self) -> float | None:
        """Recent seconds per step; before two steps are logged, the estimate."""
        pace = self.history.seconds_per_step
        return self.estimated_seconds_per_step if pace is None else pace

    @property
    def seconds_left(self) -> float | None:
        """Time to the last step at the pace of the recent ones."""
        pace = self.seconds_per_step
        return None if pace is None or not self.steps else max(0, self.steps - self.step) * pace


def begun_again(state: RunState) -> RunState:
    """Return `state` when another launcher has started and written nothing yet: the outcome of the previous start is
    dropped."""
    return evolve(state, failures=(), setup=(), raised=(), signal=None, paused_since=None, end=None, restarting=True)


def reduce(state: RunState, record: Record) -> RunState:
    """Return `state` after one metrics record or event."""
    return reduce_all(state, (record,))


def reduce_all(state: RunState, records: Iterable[Record]) -> RunState:
    """Return `state` after all of `records`: the same as reducing them one by one, and much faster over many steps."""
    recorder: HistoryRecorder | None = None
    for record in records:
        if isinstance(record, StepMetrics):
            if record.loss is None and record.tokens is None:
                continue  # losses of evaluations: in a step that is not logged, or in a separate record in old runs
            recorder = recorder or HistoryRecorder(state.history)
            recorder.add(record)
            continue
        if recorder is not None:
            state = evolve(state, history=recorder.history())
            recorder = None
        if isinstance(record, Event):
            state = _on_event(state, record)
    return state if recorder is None else evolve(state, history=recorder.history())


def _on_event(state: RunState, event: Event) -> RunState:
    if isinstance(event, _TICKS):
        state = evolve(state, ticks=(*state.ticks, event)[-MAX_TICKS:])
    if isinstance(event, _AFTER_STEPS) and (event.step or 0) > state.event_step:
        state = evolve(state, event_step=event.step or 0)
    if isinstance(event, _PAUSE_TRAINING):
        blocked = event.blocked_seconds if isinstance(event, training.CheckpointEvent) else None
        if (seconds := event.seconds if blocked is None else blocked) is not None:
            state = evolve(state, took=MappingProxyType({**state.took, event.node: seconds}))
    change = _CHANGES.get(type(event))
    return change(state, event) if change else state  # a view may still print an event that changes nothing


def _run_start(state: RunState, start: training.RunStartEvent) -> RunState:
    """Apply a new attempt: results up to the step from which it resumes are kept, later ones discarded."""
    resumed = start.resumed_step
    evaluations = {} if resumed is None else {n: e for n, e in state.evaluations.items() if (e.step or 0) <= resumed}
    return RunState(
        start=start,
        first_step=min(state.first_step, resumed or 0) if state.restarting else resumed or 0,
        history=state.history.rewound(resumed),
        evaluations=MappingProxyType(evaluations),
        **_saved_until(state, -1 if resumed is None else resumed),
        num_restarts=state.num_restarts if state.restarting else 0,
    )


def _rollback(state: RunState, event: training.RollbackEvent) -> RunState:
    """Apply a rollback: results after its step are discarded."""
    step = event.step or 0
    evaluations = {name: found for name, found in state.evaluations.items() if (found.step or 0) <= step}
    return evolve(
        state,
        start=replace(state.start, resumed_step=step) if state.start else None,
        history=state.history.rewound(step),
        event_step=min(step, state.event_step),
        evaluations=MappingProxyType(evaluations),
        **_saved_until(state, step),
        num_rollbacks=state.num_rollbacks + 1,
    )


def _saved_until(state: RunState, step: int) -> dict[str, Any]:
    """Return what was saved and exported up to a step; later files are no longer part of the run."""
    saved = {"checkpoint": state.checkpoint, "model": state.model, "export": state.export}
    return {name: event if event and (event.step or 0) <= step else None for name, event in saved.items()}


def _restart(state: RunState, event: events.RestartEvent) -> RunState:
    """Apply a restart: failures of its ranks are past, and the next attempt records where it begins."""
    return evolve(state, failures=(), setup=(), restarting=True, num_restarts=state.num_restarts + 1)


def _replica_group(state: RunState, event: events.ReplicaGroupEvent) -> RunState:
    """Drop the failures of a replica group's ranks: they end no other group, and so not the run."""
    failures = tuple(each for each in state.failures if each.rank not in event.ranks)
    return evolve(state, failures=failures)


def _data(state: RunState, event: training.DataEvent) -> RunState:
    rows = {name: count for name, count in event.rows.items() if count}
    return evolve(state, rows=MappingProxyType(rows), counted_steps=event.steps, epochs=event.epochs)


def _horizon(state: RunState, event: training.HorizonEvent) -> RunState:
    """Apply the counted horizon: the steps left may differ from those of a run from its beginning."""
    return evolve(state, horizon=event, counted_steps=state.counted_steps if event.steps is None else event.steps)


def _setup(state: RunState, event: training.SetupEvent) -> RunState:
    begun = next((node for node in state.setup if node.node == event.node), None)
    began, seconds = begun.began if begun else None, event.seconds or 0.0
    done = SetupNode(node=event.node, began=began, seconds=seconds, detail=event.detail)
    if begun is None:
        return evolve(state, setup=(*state.setup, done))
    return evolve(state, setup=tuple(done if node is begun else node for node in state.setup))


def _setup_done(state: RunState, event: training.SetupDoneEvent) -> RunState:
    finished = tuple(node for node in state.setup if node.seconds is not None)
    return evolve(state, setup=finished, setup_seconds=event.seconds, setup_done_time=event.time)


def _control(state: RunState, event: events.ControlEvent) -> RunState:
    said = event.command, event.state
    if said == (ControlWord.STOP, ControlState.ACCEPTED):
        return evolve(state, signal=f"xtrain control {ControlWord.STOP}")
    if said == (ControlWord.PAUSE, ControlState.DONE):
        return evolve(state, paused_since=event.time or 0.0)
    return state


def _alert(state: RunState, event: events.AlertEvent) -> RunState:
    """Update the raised alerts: at most one of each kind, the latest last."""
    others = tuple(each for each in state.raised if each.kind != event.kind)
    return evolve(state, raised=others if event.state == "cleared" else (*others, event))


def _failure(state: RunState, event: events.FailureEvent) -> RunState:
    """Add a failure; causes come before ranks that only lost another one."""
    state = _of_another_start(state)
    failures = sorted((*state.failures, event), key=lambda failure: failure.lost)
    return evolve(state, failures=tuple(failures)[:MAX_FAILURES])


def _run_end(state: RunState, end: events.RunEndEvent) -> RunState:
    """Apply the end of a run. A launcher stopped before its ranks started records it too: results after the checkpoint
    it would have resumed from are then discarded."""
    state = _of_another_start(state)
    if end.step is not None and end.step < (state.history.step or 0):
        state = evolve(state, history=state.history.rewound(end.step), event_step=min(end.step, state.event_step))
    return evolve(state, end=end)


def _of_another_start(state: RunState) -> RunState:
    """Discard the state of an ended run: its outcome does not apply to the records of a start that never began."""
    return state if state.end is None else evolve(begun_again(state), restarting=False)


_TICKS = (
    training.EvalEvent, training.GenerateEvent, training.CheckpointEvent, events.SignalEvent, events.StopEvent,
    events.ControlEvent, events.PausedEvent, training.NonFiniteEvent, training.RollbackEvent, events.RestartEvent,
    training.SkippedEvent, events.WarningEvent, training.PhaseEvent, events.AlertEvent, events.NotifyEvent,
    training.ProfileEvent, training.MemorySnapshotEvent, training.LrSweepEvent, events.ReplicasEvent,
    events.ReplicaGroupEvent,
)  # fmt: skip
# Events of what happens between steps, and of a step that has ended.
_TAKE_TIME = training.EvalEvent, training.GenerateEvent, training.CheckpointEvent
_PAUSE_TRAINING = *_TAKE_TIME, training.ProfileEvent, training.MemorySnapshotEvent
_AFTER_STEPS = *_TAKE_TIME, training.SkippedEvent, training.EstimateEvent
_CHANGES: dict[type[Event], Callable[[RunState, Any], RunState]] = {
    training.RunStartEvent: _run_start,
    training.DataEvent: _data,
    training.HorizonEvent: _horizon,
    training.SetupBeginEvent: lambda state, event: evolve(
        state, setup=(*state.setup, SetupNode(node=event.node, began=event.time))
    ),
    training.SetupEvent: _setup,
    training.SetupDoneEvent: _setup_done,
    training.EstimateEvent: lambda state, event: evolve(state, estimated_seconds_per_step=event.step_seconds),
    training.EvalEvent: lambda state, event: evolve(
        state, evaluations=MappingProxyType({**state.evaluations, event.dataset: event})
    ),
    training.CheckpointEvent: lambda state, event: evolve(state, checkpoint=event),
    training.ModelEvent: lambda state, event: evolve(state, model=event),
    training.ExportEvent: lambda state, event: evolve(state, export=event),
    events.SignalEvent: lambda state, event: evolve(state, signal=event.name),
    events.StopEvent: lambda state, event: evolve(state, signal=event.name),
    events.AlertEvent: _alert,
    events.ControlEvent: _control,
    events.PausedEvent: lambda state, event: evolve(state, paused_since=None),
    training.NonFiniteEvent: lambda state, event: evolve(state, num_nonfinite=state.num_nonfinite + 1),
    training.RollbackEvent: _rollback,
    events.RestartEvent: _restart,
    events.ReplicasEvent: lambda state, event: evolve(state, replicas=event),
    events.ReplicaGroupEvent: _replica_group,
    training.SkippedEvent: lambda state, event: evolve(state, num_skipped=state.num_skipped + 1),
    events.WarningEvent: lambda state, event: evolve(state, num_warnings=state.num_warnings + 1),
    events.FailureEvent: _failure,
    events.RunEndEvent: _run_end,
}
