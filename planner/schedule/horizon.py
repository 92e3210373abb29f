"""The timeline of a run whose data is counted: every epoch, and every share of a budget in them, as steps and tokens.

A plan does not know the data, so that what is counted in epochs stays as it was declared. Whoever has counted the rows
fills the rest in here: the run before its first step, and pages and checks where a store of tokens is at hand.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from attrs import evolve

from xtrain.dsl.schema.schedules import SCHEDULERS
from xtrain.dsl.spec import Spec
from xtrain.planner.plan import Plan, PlanPhase, PlanTick, StepStretch, Timeline, Uncounted
from xtrain.planner.schedule.arithmetic import Arithmetic, arithmetic_of
from xtrain.planner.schedule.counts import unrecorded, with_counts
from xtrain.planner.schedule.epochs import counted, rows_of_epoch
from xtrain.planner.schedule.mixing import in_epochs, weights
from xtrain.planner.schedule.step_sizes import StepSizes
from xtrain.planner.schedule.stops import share_of, tokens_of


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
