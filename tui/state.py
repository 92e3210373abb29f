"""The state of a run as far as its records tell, and the pure function that moves it on."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from attrs import evolve, field, frozen

from .events import Checkpoint, Evaluation, Failure, RunEnd, RunStart, SetupNode, text, whole
from .history import History, HistoryRecorder
from .raised import Raised, after
from .tail import Record
from .words import number

# Ticks and failures kept: enough to look back on, however long the run and however many ranks fail.
MAX_TICKS = 200
MAX_FAILURES = 64


@frozen(kw_only=True)
class RunState:
    """What is known of a run; every field has a meaning before the first record."""

    start: RunStart | None = None
    setup: tuple[SetupNode, ...] = ()
    setup_seconds: float | None = None
    """How long start-up took, once it is over."""
    setup_done_time: float | None = None
    rows: Mapping[str, int] = MappingProxyType({})
    """How many rows each dataset has for training, once they are prepared."""
    counted_steps: int | None = None
    """The steps of the run, once the data has been counted."""
    epochs: float | None = None
    """The budget, if it is in epochs and the data has been counted."""
    horizon: Record | None = None
    """What the run has said of what was planned in epochs."""
    history: History = field(factory=History)
    told_step: int = 0
    """The last step that an evaluation, a checkpoint and the like came after: logging may be sparse."""
    first_step: int = 0
    """The step with which this start began, whatever restarts and rollbacks there have been since."""
    took: Mapping[str, float] = MappingProxyType({})
    """For how many seconds each node that is not part of a step has held training up when it was last done."""
    evaluations: Mapping[str, Evaluation] = MappingProxyType({})
    """The latest evaluation of each dataset, in the order they first came."""
    checkpoint: Checkpoint | None = None
    ticks: tuple[Record, ...] = ()
    """The latest events between steps (evaluations, samples, checkpoints, warnings, …), as recorded."""
    num_warnings: int = 0
    num_skipped: int = 0
    num_nonfinite: int = 0
    num_rollbacks: int = 0
    num_restarts: int = 0
    restarting: bool = False
    """A gang has fallen, and another one has not yet begun."""
    estimated_seconds_per_step: float | None = None
    """What a step takes by the estimate that the run made of its first steps."""
    signal: str | None = None
    paused_since: float | None = None
    """When the run began to wait for `xtrain control resume`, while it does."""
    raised: tuple[Raised, ...] = ()
    """The alerts of this attempt that are not over, in the order in which they came."""
    failures: tuple[Failure, ...] = ()
    end: RunEnd | None = None

    @property
    def status(self) -> str:
        """`waiting`, `starting`, `training`, then what `run_end` says; `failed` as soon as a rank has."""
        if self.end is not None:
            return self.end.status
        if self.failures:
            return "failed"
        if self.restarting:
            return "starting"
        if self.history.origin or self.num_rollbacks or self.estimated_seconds_per_step is not None:
            return "training"
        return "waiting" if self.start is None and not self.setup else "starting"

    def is_echo(self, record: Record) -> bool:
        """Whether a record, which led to this state, only says once more that a rank is gone."""
        return text(record.get("event")) == "failure" and Failure.of(record).lost and len(self.failures) > 1

    @property
    def under_way(self) -> SetupNode | None:
        """The start-up node that has begun and not finished."""
        return next((node for node in reversed(self.setup) if node.seconds is None), None)

    @property
    def steps(self) -> int | None:
        """How many optimizer steps the run takes, if that is known."""
        planned = self.start.steps if self.start else None
        return self.counted_steps if planned is None else planned

    @property
    def epoch(self) -> str:
        """How far the run is in its data, as `1.25/3` epochs; empty where the plan does not speak of epochs."""
        now = number(self.history.last.get("epoch"))
        if now is None or self.horizon is None:
            return ""
        return f"{now:.2f}/{self.epochs:g}" if self.epochs is not None else f"{now:.2f}"

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        resumed = self.start.resumed_step if self.start else None
        ended = self.end.step if self.end else None
        return max(self.history.step or 0, self.told_step, resumed or 0, ended or 0)

    @property
    def progress(self) -> float | None:
        """The share of steps done, from 0 to 1, if their number is known."""
        return min(1.0, self.step / self.steps) if self.steps else None

    @property
    def loss(self) -> float | None:
        """The training loss: as the run ended, or as last logged."""
        ended = self.end.loss if self.end else None
        return ended if ended is not None else number(self.history.last.get("loss"))

    @property
    def seconds_per_step(self) -> float | None:
        """The pace of the recent steps; before two of them are logged that of the estimate."""
        pace = self.history.seconds_per_step
        return self.estimated_seconds_per_step if pace is None else pace

    @property
    def seconds_left(self) -> float | None:
        """Time to the last step at the pace of the recent ones."""
        pace = self.seconds_per_step
        return None if pace is None or not self.steps else max(0, self.steps - self.step) * pace


def begun_again(state: RunState) -> RunState:
    """`state` when another launcher has begun and has not said anything yet: how the start before has ended is past."""
    return evolve(state, failures=(), setup=(), raised=(), signal=None, paused_since=None, end=None, restarting=True)


def reduce(state: RunState, record: Record) -> RunState:
    """`state` after one metrics record or event."""
    return reduce_all(state, (record,))


def reduce_all(state: RunState, records: Iterable[Record]) -> RunState:
    """`state` after all of `records`: the same as reducing them one by one, and much faster over many steps."""
    recorder: HistoryRecorder | None = None
    for record in records:
        if "event" not in record:
            if "loss" not in record and "tokens" not in record:
                continue  # losses of evaluations: in a step that is not logged, or beside its record in old runs
            recorder = recorder or HistoryRecorder(state.history)
            recorder.add(record)
            continue
        if recorder is not None:
            state = evolve(state, history=recorder.history())
            recorder = None
        state = _on_event(state, record)
    return state if recorder is None else evolve(state, history=recorder.history())


def _on_event(state: RunState, record: Record) -> RunState:
    event = text(record.get("event"))
    if event in _TICKS:
        state = evolve(state, ticks=(*state.ticks, record)[-MAX_TICKS:])
    if event in _AFTER_STEPS and (step := whole(record.get("step")) or 0) > state.told_step:
        state = evolve(state, told_step=step)
    if event in _HOLD_UP and (seconds := number(record.get("blocked_seconds", record.get("seconds")))) is not None:
        state = evolve(state, took=MappingProxyType({**state.took, text(record.get("node")): seconds}))
    change = _CHANGES.get(event)
    # An event this version does not know changes nothing; a view may still print it.
    return change(state, record) if change else state


def _run_start(state: RunState, record: Record) -> RunState:
    """A new attempt: what the earlier ones did up to the step it goes on from still counts, the rest is undone."""
    start = RunStart.of(record)
    resumed = start.resumed_step
    kept = {} if resumed is None else {n: e for n, e in state.evaluations.items() if (e.step or 0) <= resumed}
    checkpoint = state.checkpoint
    if resumed is None or (checkpoint and (checkpoint.step or 0) > resumed):
        checkpoint = None
    return RunState(
        start=start,
        first_step=min(state.first_step, resumed or 0) if state.restarting else resumed or 0,
        history=state.history.rewound(resumed),
        evaluations=MappingProxyType(kept),
        checkpoint=checkpoint,
        num_restarts=state.num_restarts if state.restarting else 0,
    )


def _rollback(state: RunState, record: Record) -> RunState:
    """The run has gone back: what it did behind that step is undone."""
    step = whole(record.get("step")) or 0
    kept = {name: found for name, found in state.evaluations.items() if (found.step or 0) <= step}
    checkpoint = state.checkpoint if state.checkpoint and (state.checkpoint.step or 0) <= step else None
    return evolve(
        state,
        start=evolve(state.start, resumed_step=step) if state.start else None,
        history=state.history.rewound(step),
        told_step=min(step, state.told_step),
        evaluations=MappingProxyType(kept),
        checkpoint=checkpoint,
        num_rollbacks=state.num_rollbacks + 1,
    )


def _restart(state: RunState, record: Record) -> RunState:
    """What ranks have failed over is past: the attempt that follows says by itself where it begins."""
    return evolve(state, failures=(), setup=(), restarting=True, num_restarts=state.num_restarts + 1)


def _data(state: RunState, record: Record) -> RunState:
    found = record.get("rows")
    counts = found.items() if isinstance(found, dict) else ()
    rows = {text(name): count for name, each in counts if (count := whole(each))}
    return evolve(
        state,
        rows=MappingProxyType(rows),
        counted_steps=whole(record.get("steps")),
        epochs=number(record.get("epochs")),
    )


def _horizon(state: RunState, record: Record) -> RunState:
    """With what is left to do: steps may be others than those of a run from its beginning."""
    steps = whole(record.get("steps"))
    return evolve(state, horizon=record, counted_steps=state.counted_steps if steps is None else steps)


def _setup_begin(state: RunState, record: Record) -> RunState:
    node = SetupNode(node=text(record.get("node")), began=number(record.get("time")))
    return evolve(state, setup=(*state.setup, node))


def _setup(state: RunState, record: Record) -> RunState:
    name, seconds = text(record.get("node")), number(record.get("seconds")) or 0.0
    begun = next((node for node in state.setup if node.node == name), None)
    done = SetupNode(
        node=name, began=begun.began if begun else None, seconds=seconds, detail=text(record.get("detail"))
    )
    if begun is None:
        return evolve(state, setup=(*state.setup, done))
    return evolve(state, setup=tuple(done if node is begun else node for node in state.setup))


def _setup_done(state: RunState, record: Record) -> RunState:
    finished = tuple(node for node in state.setup if node.seconds is not None)
    return evolve(
        state,
        setup=finished,
        setup_seconds=number(record.get("seconds")),
        setup_done_time=number(record.get("time")),
    )


def _estimate(state: RunState, record: Record) -> RunState:
    return evolve(state, estimated_seconds_per_step=number(record.get("step_seconds")))


def _eval(state: RunState, record: Record) -> RunState:
    evaluation = Evaluation.of(record)
    return evolve(state, evaluations=MappingProxyType({**state.evaluations, evaluation.dataset: evaluation}))


def _checkpoint(state: RunState, record: Record) -> RunState:
    return evolve(state, checkpoint=Checkpoint.of(record))


def _control(state: RunState, record: Record) -> RunState:
    said = record.get("command"), record.get("state")
    if said == ("stop", "accepted"):
        return evolve(state, signal="xtrain control stop")
    if said == ("pause", "done"):
        return evolve(state, paused_since=number(record.get("time")) or 0.0)
    return state


def _paused(state: RunState, record: Record) -> RunState:
    """The pause is over."""
    return evolve(state, paused_since=None)


def _alert(state: RunState, record: Record) -> RunState:
    return evolve(state, raised=after(state.raised, record))


def _signal(state: RunState, record: Record) -> RunState:
    return evolve(state, signal=text(record.get("name")))


def _nonfinite(state: RunState, record: Record) -> RunState:
    return evolve(state, num_nonfinite=state.num_nonfinite + 1)


def _skipped(state: RunState, record: Record) -> RunState:
    return evolve(state, num_skipped=state.num_skipped + 1)


def _warning(state: RunState, record: Record) -> RunState:
    return evolve(state, num_warnings=state.num_warnings + 1)


def _failure(state: RunState, record: Record) -> RunState:
    """Causes come before ranks that have only lost another one."""
    state = _of_another_start(state)
    failures = sorted((*state.failures, Failure.of(record)), key=lambda failure: failure.lost)
    return evolve(state, failures=tuple(failures)[:MAX_FAILURES])


def _run_end(state: RunState, record: Record) -> RunState:
    """A launcher that was stopped before its ranks had begun says so too: what was behind the checkpoint it would have
    gone on from is undone by then."""
    state, end = _of_another_start(state), RunEnd.of(record)
    if end.step is not None and end.step < (state.history.step or 0):
        state = evolve(state, history=state.history.rewound(end.step), told_step=min(end.step, state.told_step))
    return evolve(state, end=end)


def _of_another_start(state: RunState) -> RunState:
    """Of a run that has ended already: how it did is no matter of what a start that never began says now."""
    return state if state.end is None else evolve(begun_again(state), restarting=False)


_TICKS = frozenset(
    {
        "eval", "generate", "checkpoint", "signal", "stop", "control", "paused", "nonfinite", "rollback", "restart",
        "skipped", "warning", "phase", "alert", "notify", "profile", "memory_snapshot",
    }
)  # fmt: skip
# Events of what happens between steps, and of a step that has ended.
_HOLD_UP = frozenset({"eval", "generate", "checkpoint", "profile", "memory_snapshot"})
_AFTER_STEPS = frozenset({"eval", "generate", "checkpoint", "skipped", "estimate"})
_CHANGES: dict[str, Callable[[RunState, Record], RunState]] = {
    "run_start": _run_start,
    "data": _data,
    "horizon": _horizon,
    "setup_begin": _setup_begin,
    "setup": _setup,
    "setup_done": _setup_done,
    "estimate": _estimate,
    "eval": _eval,
    "checkpoint": _checkpoint,
    "signal": _signal,
    "stop": _signal,
    "alert": _alert,
    "control": _control,
    "paused": _paused,
    "nonfinite": _nonfinite,
    "rollback": _rollback,
    "restart": _restart,
    "skipped": _skipped,
    "warning": _warning,
    "failure": _failure,
    "run_end": _run_end,
}
