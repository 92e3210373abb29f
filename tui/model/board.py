"""One instant of a run for screens to draw: alerts, next ticks, time left."""

from collections.abc import Mapping
from pathlib import Path

from attrs import field, frozen

from xtrain.records.status import ServerStatus
from xtrain.records.sweep import SweepState
from xtrain.text.units import duration, number, plural
from xtrain.tui.model.event_log import EventLog
from xtrain.tui.model.life import Life, OneRank, Ranks
from xtrain.tui.model.planned import Planned, PlannedTick, StepTokens
from xtrain.tui.model.series import Series
from xtrain.tui.state import RunState

# With more ranks than these, only some are named.
NAMED = 8
# An observation must last this long: a run that is killed loses its ranks one after the other.
SETTLE_SECONDS = 2.0


@frozen(kw_only=True)
class Alert:
    """Alert that is currently raised.

    kind: kind of the event (`loss_spike`, `nonfinite`, `stalled`, `starvation`, `memory`, `disk`, …), or what the
    dashboard sees: `silent` (ranks send no heartbeat), `idle` (ranks make no progress), `lost` (the run is gone without
    a record). message: in words. since: seconds since 1970. id: constant while the alert is the same one; a toast is
    shown for a new id.
    """

    id: str
    kind: str
    message: str
    since: float | None = None


class AlertTracker:
    """Collector of alerts, which remembers since when each is raised."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def alerts(self, run: RunState, ranks: Ranks, life: Life, now: float) -> tuple[Alert, ...]:
        """Return all raised alerts: first those of the run, then those that the dashboard sees. now: seconds since
        1970."""
        said = [Alert(id=f"{each.kind}@{each.time}", kind=each.kind, message=each.message, since=each.time)
                for each in run.raised if not life.over]  # fmt: skip
        seen = {kind: message for kind, message in _seen(run, ranks, life, said).items() if message}
        self._since = {kind: self._since.get(kind, now) for kind in seen}
        lasting = [kind for kind in seen if kind == "lost" or now - self._since[kind] >= SETTLE_SECONDS]
        own = ((f"{kind}@{self._since[kind]}", kind, seen[kind], self._since[kind]) for kind in lasting)
        return (*said, *(Alert(id=id, kind=kind, message=text, since=since) for id, kind, text, since in own))


def _seen(run: RunState, ranks: Ranks, life: Life, said: list[Alert]) -> dict[str, str]:
    """Return what the dashboard sees, by kind: a sentence, empty if all is well."""
    if life.state == "lost":
        return {"lost": f"The run ended without reporting it: {life.why}"}
    if life.over or run.failures or run.restarting:
        return {}  # the run itself has reported the state of its ranks
    idle = [each for each in ranks if each.pulse == "idle"]
    if any(each.kind == "stalled" for each in said):
        idle = []
    return {"silent": _silent([each for each in ranks if each.pulse in ("silent", "gone")]), "idle": _idle(idle)}


def _silent(ranks: list[OneRank]) -> str:
    if not ranks:
        return ""
    if all(each.pulse == "gone" for each in ranks):
        return f"{_named(ranks)} {_have(ranks)} no running process"
    longest = max(each.seconds_silent for each in ranks)
    return f"{_named(ranks)} {_have(ranks)} sent no heartbeat for {duration(longest)}"


def _idle(ranks: list[OneRank]) -> str:
    if not ranks:
        return ""
    longest = max(each.beat.idle for each in ranks if each.beat is not None)
    places = {each.beat.node for each in ranks if each.beat is not None}
    where = f", in {places.pop()}" if len(places) == 1 else ""
    return f"{_named(ranks)} {_have(ranks)} made no progress for {duration(longest)}{where}"


def _have(ranks: list[OneRank]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _named(ranks: list[OneRank]) -> str:
    numbers = ", ".join(str(each.rank) for each in ranks[:NAMED])
    if len(ranks) > NAMED:
        return f"{plural(len(ranks), 'rank')} ({numbers}, …)"
    return f"Rank {numbers}" if len(ranks) == 1 else f"Ranks {numbers}"


def next_step(tick: PlannedTick, tokens: StepTokens | None, step: int) -> int | None:
    """Return the step after which a tick occurs next, after `step` finished steps; None where the clock decides."""
    if tick.steps:
        return (step // tick.steps + 1) * tick.steps
    if tick.tokens and tokens:
        return tokens.steps_of((tokens.before(step) // tick.tokens + 1) * tick.tokens)
    return None


def num_times(tick: PlannedTick, tokens: StepTokens | None, step: int, last: int) -> int:
    """Return how often a tick occurs after `step` and up to `last`; 0 where the clock decides."""
    if tick.steps:
        return max(0, last // tick.steps - step // tick.steps)
    if tick.tokens and tokens:
        # No more than once a step, however many tokens a step has.
        reached = tokens.before(last) // tick.tokens - tokens.before(step) // tick.tokens
        return max(0, min(int(reached), last - step))
    return 0


def last_step(board: "Board") -> int | None:
    """Return the step after which this start of the run ends: the budget, or an earlier stop of the plan. None while
    unknown."""
    run, plan, step = board.run, board.planned, board.step
    steps = run.steps or (plan.steps if plan else None)
    ends = [] if steps is None else [steps]
    if plan is not None:
        ends += [] if plan.stop_at is None else [max(plan.stop_at, step)]
        ends += [] if plan.stop_after is None else [max(run.first_step + plan.stop_after, step)]
        ends += [at for tick in plan.ticks if tick.stop and (at := next_step(tick, plan.step_tokens, step))]
    return min(ends, default=None)


def seconds_left(board: "Board") -> float | None:
    """Return the time until this start of the run ends: its steps at the recent pace, plus the events between them,
    each as long as last time. None while unknown."""
    pace, last = board.run.seconds_per_step, last_step(board)
    if pace is None or last is None:
        return None
    left = max(0, last - board.step)
    tokens = board.planned.step_tokens if board.planned else None
    if tokens is not None and left:  # steps of a ramp take the longer the more they have to learn from
        left = (tokens.before(last) - tokens.before(board.step)) / tokens.at(max(0, board.step - 1))
    seconds = left * pace
    return seconds + (_between(board, board.planned, last, seconds, pace) if board.planned else 0.0)


def _between(board: "Board", plan: Planned, last: int, seconds: float, pace: float) -> float:
    # An event in most of the intervals between two records is already in their pace, which is the median interval.
    known = 2 * (board.run.history.gap or 0.0)
    whole = 0.0
    for tick in plan.ticks:
        took = sum(board.run.took.get(node, 0.0) for node in tick.nodes)
        times = num_times(tick, plan.step_tokens, board.step, last)
        every = number(tick.seconds) or 0.0
        if times:
            every = (tick.steps or (tick.tokens or 0) / (plan.tokens_per_step or 1)) * pace
        if not took or every < known:
            continue
        whole += took * (times or (int(seconds / every) if tick.seconds and every else 0))
    return whole


# Seconds that one poll may take: at four polls a second a twelfth of a core, while a long run is being opened.
BUDGET_SECONDS = 0.02
# The heartbeats of how many ranks are asked how far the run is.
ASKED = 64


@frozen(kw_only=True)
class Board:
    """Everything a screen draws. now: seconds since 1970, when the board was made. version: changes when anything but
    `now` does. loading: share of the metrics that has been read, from 0 to 1, while a long run is being opened.
    damaged: complete lines of metrics and events that are not records. server: status of a training server; None
    without one. sweep: the sweep of which the run is a trial. trials: numbers of its trials, by run."""

    directory: Path
    now: float
    version: int = 0
    run: RunState = field(factory=RunState)
    series: Series = field(factory=Series)
    ranks: Ranks = field(factory=Ranks)
    planned: Planned | None = None
    events: EventLog = field(factory=EventLog)
    alerts: tuple[Alert, ...] = ()
    life: Life = field(factory=Life)
    loading: float | None = None
    damaged: int = 0
    server: ServerStatus | None = None
    sweep: SweepState | None = None
    trials: Mapping[str, Series] = field(factory=dict)

    @property
    def step(self) -> int:
        """Completed optimizer steps, from records or heartbeats, whichever is further: not every step is logged."""
        # Ranks are never a step apart for long: a few of thousands do.
        beats = (each.beat.step - 1 for each in self.ranks.all[:ASKED] if each.beat is not None)
        return self.run.step if self.run.end is not None else max(self.run.step, *beats, 0)
