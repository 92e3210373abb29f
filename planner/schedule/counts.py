"""When a tick is due, and how often what a plan declares happens, counted without training.

Counted is the whole run, up to where `stop_at` ends it, however many starts it takes, if each goes on where the one
before has stopped and no step is trained twice.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from heapq import heapify, heapreplace
from math import lcm

from attrs import evolve, frozen

from xtrain.dsl.schema.actions import action_of
from xtrain.planner.plan import Node, Plan, PlanTick, Timeline
from xtrain.planner.schedule.arithmetic import arithmetic_of
from xtrain.planner.schedule.step_sizes import StepSizes

# So many steps are looked at one by one before a count is given up.
MOST_LOOKED_AT = 1_000_000


def is_due(tick: PlanTick, step: int, sizes: StepSizes) -> bool:
    """Whether a tick in steps or tokens fires after a step (from 1): in tokens, where these pass a multiple."""
    if tick.steps is not None:
        return step % tick.steps == 0
    assert tick.tokens is not None
    return passes(sizes.before(step), sizes.at(step - 1), tick.tokens)


def passes(tokens: int, of_step: int, period: int | Fraction) -> bool:
    """Whether the last step of those that took so many tokens, `of_step` of them in it, has reached another multiple of
    a period."""
    return tokens // period > (tokens - of_step) // period


def times_due(tick: PlanTick, step: int, sizes: StepSizes) -> int:
    """How often a tick in steps or tokens is due up to a step, that one counted."""
    if tick.steps is not None:
        return step // tick.steps
    assert tick.tokens is not None
    # Steps of a whole period or more are all due, of smaller ones those that reach a multiple.
    smaller = step if (first := sizes.reached(tick.tokens)) is None else min(step, first)
    return sizes.before(smaller) // tick.tokens + step - smaller


def next_due(tick: PlanTick, step: int, sizes: StepSizes) -> int:
    """The first step behind `step` after which a tick in steps or tokens is due."""
    if tick.steps is not None:
        return step // tick.steps * tick.steps + tick.steps
    assert tick.tokens is not None
    multiple = sizes.before(step) // tick.tokens + 1
    return sizes.steps_of(multiple * tick.tokens)


def steps_due(ticks: Sequence[PlanTick], steps: int, sizes: StepSizes) -> int | None:
    """The number of steps up to `steps` in which any of some ticks is due; None where it is too long to count."""
    if len(ticks) == 1:
        return times_due(ticks[0], steps, sizes)
    whole = lcm(*(tick.steps or (Fraction(tick.tokens or 1) / sizes.full).numerator for tick in ticks))
    if sizes.ramp or whole >= steps:
        return _steps_due(ticks, steps, sizes)
    # From there on it is all the same again.
    once, rest = (_steps_due(ticks, number, sizes) for number in (whole, steps % whole))
    return None if once is None or rest is None else steps // whole * once + rest


def _steps_due(ticks: Sequence[PlanTick], steps: int, sizes: StepSizes) -> int | None:
    often, *rarer = sorted(ticks, key=lambda tick: -times_due(tick, steps, sizes))
    found = times_due(often, steps, sizes)
    if sum(times_due(tick, steps, sizes) for tick in rarer) > MOST_LOOKED_AT:
        return None
    others = {step for tick in rarer for step in _all_due(tick, steps, sizes) if not is_due(often, step, sizes)}
    return found + len(others)


def _all_due(tick: PlanTick, steps: int, sizes: StepSizes) -> Iterator[int]:
    step = next_due(tick, 0, sizes)
    while step <= steps:
        yield step
        step = next_due(tick, step, sizes)


def with_counts(timeline: Timeline, unrecorded: Sequence[int | None], sizes: StepSizes) -> Timeline:
    """How often each tick does something.

    unrecorded: of each tick that does nothing but profile, the steps that pass before one is recorded.
    """
    last = last_step(timeline)

    def count(tick: PlanTick, before: int | None) -> int | None:
        if last is None or tick.seconds is not None or _is_uncounted(tick):
            return None
        if before is not None:
            return count_profiles([tick], timeline, sizes, before)
        return times_due(tick, last, sizes)

    pairs = zip(timeline.ticks, unrecorded, strict=True)
    return evolve(timeline, ticks=tuple(evolve(tick, count=count(tick, before)) for tick, before in pairs))


@frozen
class CountStart:
    """A start of the run, from behind the step `begin` to the step `end`. by_limit: `stop_at` or `stop_after` ends it,
    so that what is declared on `stop_at` happens."""

    begin: int
    end: int
    by_limit: bool


def starts(timeline: Timeline, sizes: StepSizes) -> Iterator[CountStart]:
    """All starts of the run; none where its steps are not known. A clock that stops it is not among the causes."""
    last = last_step(timeline)
    if timeline.steps is None or last is None:
        return
    stopping = [tick for tick in timeline.ticks if tick.stop and tick.seconds is None]
    due = [(next_due(tick, 0, sizes), number) for number, tick in enumerate(stopping)]  # a heap: the next one is first
    heapify(due)
    begin = 0
    while begin < last:
        while due and due[0][0] <= begin:
            number = due[0][1]
            heapreplace(due, (next_due(stopping[number], begin, sizes), number))
        limit = last if timeline.stop_after is None else min(last, begin + timeline.stop_after)
        end = min(limit, due[0][0]) if due else limit
        stopped = end < timeline.steps and bool(due) and due[0][0] == end
        yield CountStart(begin, end, by_limit=end < timeline.steps and not stopped)
        begin = end


def last_step(timeline: Timeline) -> int | None:
    """The step that no start of the run gets beyond; None where that, or where its starts end, is not known."""
    waits = timeline.stop_at_amount or timeline.stop_after_amount
    if timeline.steps is None or waits or any(tick.stop and _is_uncounted(tick) for tick in timeline.ticks):
        return None
    return timeline.steps if timeline.stop_at is None else min(timeline.steps, timeline.stop_at)


def _is_uncounted(tick: PlanTick) -> bool:
    return tick.steps is None and tick.tokens is None and tick.seconds is None


def count_profiles(ticks: Sequence[PlanTick], timeline: Timeline, sizes: StepSizes, before: int) -> int | None:
    """How many profiles ticks in steps or tokens begin that record a step. No two of one plan are due in the same step.

    before: steps that pass unrecorded.
    """
    found = 0
    for number, start in enumerate(starts(timeline, sizes)):
        if number == MOST_LOOKED_AT:
            return None
        latest = max(start.end - 1 - before, start.begin)
        until, earlier = (steps_due(ticks, step, sizes) for step in (latest, start.begin))
        if until is None or earlier is None:
            return None
        found += until - earlier
    return found


def count_node(plan: Plan, node: str) -> int | None:
    """How often the ticks of a plan run a node, once in a step however many of them are due; None: nobody knows.

    Of a profile: how often it records anything.
    """
    timeline, sizes = plan.timeline, arithmetic_of(plan).sizes
    ticks = [tick for tick in timeline.ticks if node in tick.nodes]
    last = last_step(timeline)
    if last is None or any(tick.seconds is not None or _is_uncounted(tick) for tick in ticks):
        return None
    before = unrecorded(plan.node(node))
    if before is not None:
        return count_profiles(ticks, timeline, sizes, before)
    return steps_due(ticks, last, sizes)


def unrecorded(node: Node) -> int | None:
    """Of an action that records the steps behind it: how many pass before it does."""
    action = action_of(node.op)
    return None if action is None else action.unrecorded(node.args)


def saves(node: Node) -> bool:
    """Whether a node saves the full state."""
    action = action_of(node.op)
    return action is not None and action.saves


def count_saves(plan: Plan) -> int | None:
    """How many checkpoints the run writes, each step once; None where that is not known. What a signal or an alert asks
    for comes on top."""

    def any_saves(nodes: Sequence[str]) -> bool:
        return any(saves(plan.node(node)) for node in nodes)

    timeline, sizes = plan.timeline, arithmetic_of(plan).sizes
    ticks = [tick for tick in timeline.ticks if any_saves(tick.nodes)]
    on = {trigger.event for trigger in timeline.triggers if any_saves(trigger.nodes)}
    last = last_step(timeline)
    if last is None or any(tick.seconds is not None or _is_uncounted(tick) for tick in ticks):
        return None
    found = steps_due(ticks, last, sizes) if ticks else 0
    if found is None:
        return None
    for number, start in enumerate(starts(timeline, sizes) if on else ()):
        if number == MOST_LOOKED_AT:
            return None
        event = "stop_at" if start.by_limit else "finish" if start.end == timeline.steps else ""
        found += event in on and not any(is_due(tick, start.end, sizes) for tick in ticks)
    return found
