"""Timeline of a run: when ticks are due, how often nodes run, and epochs as steps once the data is counted.

A plan does not know the data, so amounts in epochs stay as declared until the rows are counted. Counts cover the whole
run, up to `stop_at`, over all of its starts, if each start resumes where the one before stopped and no step is trained
twice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from heapq import heapify, heapreplace
from math import lcm
from typing import Any

from attrs import evolve

from xtrain.dsl.schema.actions import action_of
from xtrain.dsl.schema.optimizers import SCHEDULERS
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.amounts import in_epochs, tokens_of, weights
from xtrain.plan.arithmetic import Arithmetic, arithmetic_of, counted, exact, rows_of_epoch
from xtrain.plan.plan import Node, Plan, PlanPhase, PlanTick, StepStretch, Timeline, Uncounted
from xtrain.plan.step_sizes import StepSizes

# Number of steps examined one by one before a count is given up.
MOST_LOOKED_AT = 1_000_000


def is_due(tick: PlanTick, step: int, sizes: StepSizes) -> bool:
    """Return True if a tick in steps or tokens fires after a step (from 1): in tokens, if the step passes a
    multiple."""
    if tick.steps is not None:
        return step % tick.steps == 0
    assert tick.tokens is not None
    return passes(sizes.before(step), sizes.at(step - 1), tick.tokens)


def passes(tokens: int, of_step: int, period: int | Fraction) -> bool:
    """Return True if a step that took `of_step` tokens, the last of `tokens`, reached another multiple of a period."""
    return tokens // period > (tokens - of_step) // period


def times_due(tick: PlanTick, step: int, sizes: StepSizes) -> int:
    """Return how often a tick in steps or tokens is due up to and including a step."""
    if tick.steps is not None:
        return step // tick.steps
    assert tick.tokens is not None
    # Every step of a whole period or more is due; a smaller step is due if it reaches a multiple.
    smaller = step if (first := sizes.reached(tick.tokens)) is None else min(step, first)
    return sizes.before(smaller) // tick.tokens + step - smaller


def next_due(tick: PlanTick, step: int, sizes: StepSizes) -> int:
    """Return the first step after `step` at which a tick in steps or tokens is due."""
    if tick.steps is not None:
        return step // tick.steps * tick.steps + tick.steps
    assert tick.tokens is not None
    multiple = sizes.before(step) // tick.tokens + 1
    return sizes.steps_of(multiple * tick.tokens)


def steps_due(ticks: Sequence[PlanTick], steps: int, sizes: StepSizes) -> int | None:
    """Return the number of steps up to `steps` in which any tick is due; None if there are too many to count."""
    if len(ticks) == 1:
        return times_due(ticks[0], steps, sizes)
    whole = lcm(*(tick.steps or (Fraction(tick.tokens or 1) / sizes.full).numerator for tick in ticks))
    if sizes.ramp or whole >= steps:
        return _steps_due(ticks, steps, sizes)
    # From there on everything repeats.
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
    """Return the timeline with the number of times each tick acts.

    unrecorded: for each tick that only profiles, the number of steps before the first recorded one.
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
    """Start of the run, from after step `begin` to step `end`. by_limit: `stop_at` or `stop_after` ends it, so that the
    actions of `stop_at` run."""

    begin: int
    end: int
    by_limit: bool


def starts(timeline: Timeline, sizes: StepSizes) -> Iterator[CountStart]:
    """Yield all starts of the run; none if its steps are unknown. Stops by the clock are not considered."""
    last = last_step(timeline)
    if timeline.steps is None or last is None:
        return
    stopping = [tick for tick in timeline.ticks if tick.stop and tick.seconds is None]
    due = [(next_due(tick, 0, sizes), number) for number, tick in enumerate(stopping)]  # a heap: the next tick is first
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
    """Return the last step that any start of the run reaches; None if that step, or the end of its starts, is
    unknown."""
    waits = timeline.stop_at_amount or timeline.stop_after_amount
    if timeline.steps is None or waits or any(tick.stop and _is_uncounted(tick) for tick in timeline.ticks):
        return None
    return timeline.steps if timeline.stop_at is None else min(timeline.steps, timeline.stop_at)


def _is_uncounted(tick: PlanTick) -> bool:
    return tick.steps is None and tick.tokens is None and tick.seconds is None


def count_profiles(ticks: Sequence[PlanTick], timeline: Timeline, sizes: StepSizes, before: int) -> int | None:
    """Return how many profiles, begun by ticks in steps or tokens, record a step. No two profiles of one plan are due
    in the same step.

    before: number of steps before the first recorded one.
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
    """Return how often the ticks of a plan run a node, once in a step however many ticks are due; None: unknown.

    For a profile: how often it records anything.
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
    """Return the number of steps before the first recorded one, for an action that records later steps."""
    action = action_of(node.op)
    return None if action is None else action.unrecorded(node.args)


def saves(node: Node) -> bool:
    """Return True if a node saves the full state."""
    action = action_of(node.op)
    return action is not None and action.saves


def count_saves(plan: Plan) -> int | None:
    """Return how many checkpoints the run writes, one per step at most; None if unknown. Checkpoints requested by
    signals or alerts are extra."""

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


def waits(plan: Plan) -> bool:
    """Return True if any part of a plan is known only once its data is counted."""
    return not plan.serves and waits_with(plan.timeline, plan.node("setup.scheduler").args)


def waits_with(timeline: Timeline, rate: Mapping[str, Any]) -> bool:
    """Return True if a timeline or the arguments of a learning rate depend on uncounted data."""
    return (
        timeline.steps is None
        or any(tick.epochs is not None for tick in timeline.ticks)
        or any(phase.epochs is not None or phase.passes is not None for phase in timeline.phases)
        or timeline.stop_at_amount is not None
        or timeline.stop_after_amount is not None
        or any("epochs" in value for value in rate.values() if isinstance(value, dict))
    )


def waits_for_data(spec: Spec) -> bool:
    """Return True if any amount of a spec is in epochs, or is a share of a budget in epochs."""
    if any(in_epochs(weights(spec, phase)) for phase in (None, *spec.phases.values())):
        return True
    amounts = [spec.experiment.budget, *(tick.every for tick in spec.ticks)]
    amounts += [phase.from_ for phase in spec.phases.values()]
    amounts += [each for each in (spec.launch.stop_at, spec.launch.stop_after) if each is not None]
    amounts += spec.scheduler.lengths().values()
    return any(amount.unit == "epochs" for amount in amounts)


def counted_arithmetic(plan: Plan, rows: Mapping[str, int]) -> Arithmetic:
    """Return the arithmetic of a plan with the data counted. rows: of each training dataset."""
    return arithmetic_of(plan).counted(epoch_rows(plan, rows))


def epoch_rows(plan: Plan, rows: Mapping[str, int]) -> Fraction:
    """Return the rows of one epoch of a run, repeated rows included. rows: of each training dataset."""
    again = plan.node("setup.loader").args.get("again", {"turns": 1})
    return again["turns"] * rows_of_epoch(plan.timeline.phases, rows)


def known_arithmetic(plan: Plan) -> Arithmetic:
    """Return the arithmetic of a plan, counted if the plan was made where its data is counted."""
    return arithmetic_of(plan) if plan.counted is None else counted_arithmetic(plan, plan.counted.rows)


def known_timeline(plan: Plan) -> Timeline:
    """Return the timeline of a plan with everything known about it, and the number of times each tick acts."""
    if plan.counted is None:
        return plan.timeline
    timeline, batch = plan.timeline, known_arithmetic(plan)
    before = [_unrecorded(plan, tick) for tick in timeline.ticks]
    return with_counts(counted_timeline(timeline, batch, plan.counted.rows), before, batch.sizes)


def _unrecorded(plan: Plan, tick: PlanTick) -> int | None:
    """Return, for a tick that only profiles, the number of steps before the first recorded one."""
    before = [unrecorded(plan.node(node)) for node in tick.nodes]
    known = [steps for steps in before if steps is not None]
    return min(known) if known and len(known) == len(before) and not tick.stop else None


def as_known(plan: Plan) -> Plan:
    """Return the plan as pages show it: timeline and learning rate with everything known about them."""
    return (
        plan
        if plan.counted is None
        else _with_rate(evolve(plan, timeline=known_timeline(plan)), known_arithmetic(plan))
    )


def _with_rate(plan: Plan, batch: Arithmetic) -> Plan:
    """Return the plan with everything that `batch` knows about the learning rate."""
    rate = counted_rate(plan.node("setup.scheduler").args, batch)
    return evolve(
        plan, nodes=tuple(evolve(node, args=rate) if node.op == "setup.scheduler" else node for node in plan.nodes)
    )


def counted_timeline(timeline: Timeline, batch: Arithmetic, rows: Mapping[str, int]) -> Timeline:
    """Return `timeline` with the numbers that `batch` knows: steps, the first step of each phase, periods of ticks,
    stops.

    rows: of each dataset, to convert weights in epochs to shares.
    """
    return _with_steps(evolve(timeline, phases=counted(timeline.phases, rows)), batch)


def resumed_plan(plan: Plan, past: StepSizes, step: int) -> tuple[Plan, Arithmetic]:
    """Return the plan and arithmetic of a run that resumes after `step` steps, which took the rows `past`.

    Lengths in tokens count from the tokens of these steps. Amounts in epochs are known if the data is counted; all
    earlier rows are assumed to be of this data.
    """
    batch = known_arithmetic(plan).resumed(past, step, past.before(step))
    rows = {} if plan.counted is None else plan.counted.rows
    timeline = counted_timeline(plan.timeline, batch, rows) if rows else _with_steps(plan.timeline, batch)
    return evolve(_with_rate(plan, batch), timeline=timeline, counted=None), batch


def _with_steps(timeline: Timeline, batch: Arithmetic) -> Timeline:
    """Return `timeline` with amounts in tokens or epochs converted to steps where `batch` can count them."""
    sizes, stop_at = batch.sizes, timeline.stop_at
    if timeline.stop_at_tokens is not None:
        stop_at = sizes.steps_of(timeline.stop_at_tokens)
    waits = batch.epoch_rows is None
    return evolve(
        timeline,
        steps=batch.steps,
        tokens=batch.tokens,
        phases=tuple(_phase(phase, batch) for phase in timeline.phases),
        ticks=tuple(_tick(tick, batch) for tick in timeline.ticks),
        stop_at=_stop(stop_at, timeline.stop_at_amount, batch.step_behind, batch),
        stop_after=_stop(timeline.stop_after, timeline.stop_after_amount, batch.steps_in, batch),
        stop_at_amount=timeline.stop_at_amount if waits else None,
        stop_after_amount=timeline.stop_after_amount if waits else None,
        stretches=stretches(batch),
    )


def stretches(batch: Arithmetic) -> tuple[StepStretch, ...]:
    """Return the stretches of equal steps of a run; empty if all steps are equal."""
    if not batch.ramp and batch.past is None:
        return ()
    tokens, sequence = batch.sizes, batch.sequence
    return tuple(
        StepStretch(first=first, rows=rows, tokens=rows * sequence, tokens_before=tokens.before(first))
        for first, rows in batch.row_sizes.stretches()
    )


def counted_rate(args: Mapping[str, Any], batch: Arithmetic) -> dict[str, Any]:
    """Return the arguments of the learning rate with lengths in tokens and epochs also given in steps; shares of the
    budget are unchanged."""
    found = {**args, "steps": batch.steps}
    for name, value in args.items():
        at_end = isinstance(value, dict) and name in SCHEDULERS.of(args).at_end
        if isinstance(value, dict) and "tokens" in value:
            found[name] = {**value, "steps": batch.steps_of_tokens(value["tokens"], at_end=at_end)}
        elif isinstance(value, dict) and "epochs" in value and batch.epoch_rows is not None:
            epochs = value["epochs"]
            found[name] = {**value, "steps": batch.steps_at_end(epochs) if at_end else batch.step_behind(epochs)}
    return found


def _phase(phase: PlanPhase, batch: Arithmetic) -> PlanPhase:
    if phase.epochs is not None:
        return evolve(phase, first=batch.step_behind(phase.epochs))
    if phase.tokens is not None:
        return evolve(phase, first=batch.sizes.steps_of(phase.tokens))
    if phase.fraction is not None:
        return evolve(phase, first=batch.nearest_step(phase.fraction))
    return phase


def _tick(tick: PlanTick, batch: Arithmetic) -> PlanTick:
    if tick.epochs is None and tick.fraction is None:
        return tick
    epochs = _epochs(tick.epochs, tick.fraction, batch)
    tokens = None if batch.epoch_rows is None else tokens_of(epochs, batch.epoch_rows, batch.sequence)
    return evolve(tick, steps=None, tokens=tokens)


def _epochs(epochs: float | None, fraction: float | None, batch: Arithmetic) -> Fraction:
    """Return an uncounted amount in epochs."""
    if epochs is not None:
        return exact(epochs)
    assert fraction is not None and batch.epochs is not None
    return exact(fraction) * exact(batch.epochs)


def _stop(
    steps: int | None, amount: Uncounted | None, of_epochs: Callable[[Fraction], int | None], batch: Arithmetic
) -> int | None:
    """Return the step of a stop. steps: as planned, if known; of_epochs: converts epochs to steps."""
    return steps if amount is None else of_epochs(_epochs(amount.epochs, amount.fraction, batch))
