"""Times of a plan's nodes in a run: set-up, nodes of a step on all ranks, and what happens between steps."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from statistics import median

from attrs import field, frozen

from xtrain.records import training_events as training
from xtrain.records.metrics import StepMetrics
from xtrain.tui.model.board import next_step
from xtrain.tui.model.event_log import LogEntry
from xtrain.tui.model.life import Ranks
from xtrain.tui.model.planned import Planned, PlannedTick, PlannedTimes
from xtrain.tui.state import RunState


@frozen(kw_only=True)
class StepTime:
    """Seconds of one node in a step, averaged by each rank since its last record, over the `ranks` that reported it.

    slowest: the longest time, on `slowest_rank`. share: of the step, 0 to 1, from the means over ranks, so that the
    shares of all nodes add up to 1.
    """

    node: str
    slowest: float
    slowest_rank: int
    median: float
    mean: float
    ranks: int
    share: float = 0.0


def step_times(by_rank: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, StepTime]:
    """Return step times by node, from pairs (rank, its `node_seconds`), in order of first occurrence."""
    values: dict[str, list[float]] = {}
    worst: dict[str, tuple[float, int]] = {}
    for rank, nodes in by_rank:
        for node, seconds in nodes.items():
            if not (seconds >= 0 and isfinite(seconds)):
                continue
            values.setdefault(node, []).append(seconds)
            if node not in worst or seconds > worst[node][0]:
                worst[node] = (seconds, rank)
    means = {node: sum(found) / len(found) for node, found in values.items()}
    whole = sum(means.values())
    return {
        node: StepTime(
            node=node,
            slowest=worst[node][0],
            slowest_rank=worst[node][1],
            median=median(found),
            mean=means[node],
            ranks=len(found),
            share=means[node] / whole if whole else 0.0,
        )
        for node, found in values.items()
    }


class StepTimes:
    """Cached `step_times` of a run's ranks, computed again only after a new report."""

    def __init__(self) -> None:
        self._node_seconds: list[Mapping[str, float]] = []
        self._times: dict[str, StepTime] = {}

    def of(self, ranks: Ranks) -> dict[str, StepTime]:
        """Return the current times, by node."""
        node_seconds = [each.node_seconds for each in ranks]
        same = len(node_seconds) == len(self._node_seconds) and all(
            new is old for new, old in zip(node_seconds, self._node_seconds, strict=True)
        )
        if not same:
            self._node_seconds = node_seconds
            self._times = step_times((each.rank, each.node_seconds) for each in ranks)
        return self._times


@frozen(kw_only=True)
class Took:
    """Duration of a node's last execution. seconds: None while it is running. step: after which it ran; began: seconds
    since 1970, where known."""

    seconds: float | None
    step: int | None = None
    began: float | None = None


def setup_times(run: RunState) -> dict[str, Took]:
    """Return the set-up nodes that have started."""
    return {node.node: Took(seconds=node.seconds, began=node.began) for node in run.setup}


# Events whose `seconds` are those that a node took, but for set-up.
_TIMED = (
    training.EvalEvent, training.GenerateEvent, training.CheckpointEvent, training.ModelEvent, training.ProfileEvent,
    training.MemorySnapshotEvent,
)  # fmt: skip


def last_times(entries: Sequence[LogEntry]) -> dict[str, Took]:
    """Return the latest duration of each node whose time is in an event (evaluations, checkpoints, …)."""
    found: dict[str, Took] = {}
    for event in (entry.event for entry in reversed(entries)):
        if isinstance(event, _TIMED) and event.node and event.node not in found and event.seconds is not None:
            found[event.node] = Took(seconds=event.seconds, step=event.step)
    return found


@frozen(kw_only=True)
class Due:
    """Next occurrence of a tick. every: `20 steps`; step: after which one, None where the clock decides or it does not
    occur again; seconds: until then, at the recent pace; over: it does not occur again in this run."""

    every: str
    step: int | None = None
    seconds: float | None = None
    over: bool = False


def due(tick: PlannedTick, plan: Planned, *, step: int, pace: float | None) -> Due:
    """Return the next occurrence of `tick` after `step` finished steps. pace: seconds per step."""
    at, epochs = next_step(tick, plan.step_tokens, step), _epochs(tick)
    if at is None:
        return Due(every=epochs or period(tick.seconds))
    every = "step" if tick.steps == 1 else f"{tick.steps:,} steps" if tick.steps else f"{tick.tokens:,} tokens"
    every = epochs or every
    if plan.steps is not None and at > plan.steps:
        return Due(every=every, over=True)
    return Due(every=every, step=at, seconds=None if pace is None else (at - step) * pace)


def _epochs(tick: PlannedTick) -> str:
    """Return `0.5 epochs` or `10% of the budget` for a tick planned in these; else empty."""
    if tick.epochs is not None:
        return f"{tick.epochs:g} epoch{'' if tick.epochs == 1 else 's'}"
    return "" if tick.fraction is None else f"{100 * tick.fraction:g}% of the budget"


def period(seconds: float | None) -> str:
    """Return a period as a spec writes it: `10 min`, `90 s`, `2 h`."""
    if seconds is None:
        return "–"
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


@frozen(kw_only=True)
class StepCost:
    """Actual and planned time of a step in seconds; None where unknown.

    actual, data, communication: of the newest record, on the rank where each is largest.
    """

    actual: float | None = None
    data: float | None = None
    communication: float | None = None
    planned: PlannedTimes = field(factory=PlannedTimes)

    @property
    def over(self) -> float | None:
        """Relative excess over the planned time: 0.1 is a tenth longer."""
        return None if self.actual is None or not self.planned.step else self.actual / self.planned.step - 1

    def share(self, seconds: float | None) -> float | None:
        """Return `seconds` as a share of the actual step."""
        return None if seconds is None or not self.actual else seconds / self.actual


def step_cost(last: StepMetrics, plan: Planned | None) -> StepCost:
    """Return the cost of a step from the newest metrics record and the plan."""
    return StepCost(
        actual=last.step_seconds,
        data=last.data_seconds,
        communication=last.comm_seconds,
        planned=(plan and plan.times) or PlannedTimes(),
    )


def under_way(ranks: Ranks) -> dict[str, tuple[int, ...]]:
    """Return the running nodes by the newest heartbeats, with their ranks; ranks that are gone are left out."""
    found: dict[str, list[int]] = {}
    for each in ranks:
        if each.beat is not None and each.beat.node and each.pulse != "gone":
            found.setdefault(each.beat.node, []).append(each.rank)
    return {node: tuple(numbers) for node, numbers in found.items()}
