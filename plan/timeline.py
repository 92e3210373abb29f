"""Timeline of a run: when ticks are due, how often nodes run, and epochs as steps once the data is counted.

A plan does not know the data, so amounts in epochs stay as declared until the rows are counted. Counts are of the
whole run, up to `stop_at`, however many starts it takes, if each resumes where the one before stopped and no step is
trained twice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from heapq import heapify, heapreplace
from math import lcm
from typing import Any

from attrs import evolve, frozen

from xtrain.dsl.schema.actions import action_of
from xtrain.dsl.schema.optimizers import SCHEDULERS
from xtrain.dsl.spec import Spec
from xtrain.plan.amounts import in_epochs, share_of, tokens_of, weights
from xtrain.plan.arithmetic import Arithmetic, arithmetic_of, counted, rows_of_epoch
from xtrain.plan.plan import Node, Plan, PlanPhase, PlanTick, StepStretch, Timeline, Uncounted
from xtrain.plan.step_sizes import StepSizes

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


def waits(plan: Plan) -> bool:
    """Whether anything of a plan is known only once its data is counted."""
    return not plan.serves and waits_with(plan.timeline, plan.node("setup.scheduler").args)


def waits_with(timeline: Timeline, rate: Mapping[str, Any]) -> bool:
    """The same of its timeline and the arguments of its learning rate."""
    return (
        timeline.steps is None
        or any(tick.epochs is not None for tick in timeline.ticks)
        or any(phase.epochs is not None or phase.passes is not None for phase in timeline.phases)
        or timeline.stop_at_amount is not None
        or timeline.stop_after_amount is not None
        or any("epochs" in value for value in rate.values() if isinstance(value, dict))
    )


def waits_for_data(spec: Spec) -> bool:
    """The same of a spec: whether any amount in it is one of epochs, or a share of a budget in them."""
    if any(in_epochs(weights(spec, phase)) for phase in (None, *spec.phases.values())):
        return True
    amounts = [spec.experiment.budget, *(tick.every for tick in spec.ticks)]
    amounts += [phase.from_ for phase in spec.phases.values()]
    amounts += [each for each in (spec.launch.stop_at, spec.launch.stop_after) if each is not None]
    amounts += spec.scheduler.lengths().values()
    return any(amount.unit == "epochs" for amount in amounts)


def counted_arithmetic(plan: Plan, rows: Mapping[str, int]) -> Arithmetic:
    """The same with the data counted. rows: of each dataset that is trained on."""
    return arithmetic_of(plan).counted(epoch_rows(plan, rows))


def epoch_rows(plan: Plan, rows: Mapping[str, int]) -> Fraction:
    """Rows of one epoch of a run, each as often as it comes again; `rows`: of each dataset that is trained on."""
    again = plan.node("setup.loader").args.get("again", {"turns": 1})
    return again["turns"] * rows_of_epoch(plan.timeline.phases, rows)


def known_arithmetic(plan: Plan) -> Arithmetic:
    """The same, counted if the plan was made where its data has been counted."""
    return arithmetic_of(plan) if plan.counted is None else counted_arithmetic(plan, plan.counted.rows)


def known_timeline(plan: Plan) -> Timeline:
    """The timeline of a plan with all that is known of it, and how often each tick does something."""
    if plan.counted is None:
        return plan.timeline
    timeline, batch = plan.timeline, known_arithmetic(plan)
    before = [_unrecorded(plan, tick) for tick in timeline.ticks]
    return with_counts(counted_timeline(timeline, batch, plan.counted.rows), before, batch.sizes)


def _unrecorded(plan: Plan, tick: PlanTick) -> int | None:
    """Of a tick that does nothing but profile: the steps that pass before one is recorded."""
    before = [unrecorded(plan.node(node)) for node in tick.nodes]
    known = [steps for steps in before if steps is not None]
    return min(known) if known and len(known) == len(before) and not tick.stop else None


def known_rate(plan: Plan) -> dict[str, Any]:
    """The arguments of the learning rate with all that is known of them."""
    return counted_rate(plan.node("setup.scheduler").args, known_arithmetic(plan))


def as_known(plan: Plan) -> Plan:
    """The plan as pages show it: its timeline and its learning rate with all that is known of them."""
    nodes = tuple(evolve(node, args=known_rate(plan)) if node.op == "setup.scheduler" else node for node in plan.nodes)
    return plan if plan.counted is None else evolve(plan, timeline=known_timeline(plan), nodes=nodes)


def counted_timeline(timeline: Timeline, batch: Arithmetic, rows: Mapping[str, int]) -> Timeline:
    """`timeline` with what `batch` knows: steps, the first step of each phase, the period of each tick, the stops.

    rows: of each dataset, for the shares that weights in epochs come to.
    """
    return _with_steps(evolve(timeline, phases=counted(timeline.phases, rows)), batch)


def resumed_plan(plan: Plan, past: StepSizes, step: int) -> tuple[Plan, Arithmetic]:
    """Return the plan as it is for a run that goes on after `step` steps, which took the rows `past`, and its steps.

    Lengths in tokens count from the tokens of these steps. Amounts in epochs are known where the data is counted; all
    rows of the past are taken to be of this data.
    """
    batch = known_arithmetic(plan).resumed(past, step, past.before(step))
    rate = counted_rate(plan.node("setup.scheduler").args, batch)
    nodes = tuple(evolve(node, args=rate) if node.op == "setup.scheduler" else node for node in plan.nodes)
    rows = {} if plan.counted is None else plan.counted.rows
    timeline = counted_timeline(plan.timeline, batch, rows) if rows else _with_steps(plan.timeline, batch)
    return evolve(plan, timeline=timeline, nodes=nodes, counted=None), batch


def _with_steps(timeline: Timeline, batch: Arithmetic) -> Timeline:
    """`timeline` with every amount in tokens or epochs that `batch` can count as steps of it."""
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
    """The steps of a run that are alike, where not all of them are."""
    if not batch.ramp and batch.past is None:
        return ()
    tokens, sequence = batch.sizes, batch.sequence
    return tuple(
        StepStretch(first=first, rows=rows, tokens=rows * sequence, tokens_before=tokens.before(first))
        for first, rows in batch.row_sizes.stretches()
    )


def counted_rate(args: Mapping[str, Any], batch: Arithmetic) -> dict[str, Any]:
    """The arguments of the learning rate with lengths in tokens and epochs as steps too; shares of the budget stay what
    they are."""
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
    steps, tokens = None, None
    if tick.fraction is not None and batch.steps is not None:
        steps = share_of(tick.fraction, batch.steps)
    elif tick.epochs is not None and batch.epoch_rows is not None:
        tokens = tokens_of(tick.epochs, batch.epoch_rows, batch.sequence)
    return evolve(tick, steps=steps, tokens=tokens)


def _stop(
    steps: int | None, amount: Uncounted | None, of_epochs: Callable[[float], int | None], batch: Arithmetic
) -> int | None:
    """steps: as planned, where that is known; of_epochs: how many steps so many epochs are."""
    if amount is None:
        return steps
    if amount.epochs is not None:
        return of_epochs(amount.epochs)
    return None if amount.fraction is None or batch.steps is None else share_of(amount.fraction, batch.steps)
