"""What lies ahead of a run: when each tick comes next, where the run stops, and how long that will take."""

from typing import TYPE_CHECKING

from xtrain.tui.model.planned import Planned, PlannedTick, StepTokens
from xtrain.tui.words import number

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board


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
        every = (number(tick.seconds) or 0.0) if not times else _steps_between(tick, plan) * pace
        if not took or every < known:
            continue
        whole += took * (times or (int(seconds / every) if tick.seconds and every else 0))
    return whole


def _steps_between(tick: PlannedTick, plan: Planned) -> float:
    return float(tick.steps or (tick.tokens or 0) / (plan.tokens_per_step or 1))
