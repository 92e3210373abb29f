"""Learning rate of a step as a closed form of its schedule and phase; a resumed run needs no state for it.

With W warm-up steps, T steps in all and floor r, step i (from 0) uses factor f(i + 1). During warm-up f(s) = s / W.
After it, p = (s − W) / (T − W) reaches 1 at the last step: cosine r + ½(1 − r)(1 + cos πp), linear 1 − (1 − r)p, sqrt r
+ (1 − r)√(1 − p). Counting from s = 1, no step has a learning rate of 0, and the last step uses the floor.

Steps, warm-up and total are in full steps of the present batch that would train on as much; they need not be whole
numbers. The rate is therefore continuous in a ramp and after a resume with another batch (Megatron-LM counts samples
for the same reason).
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import ceil
from typing import Any, ClassVar, Literal

from attrs import evolve, fields_dict

from xtrain.dsl.schema.optimizers import SCHEDULERS, Curve, Rate, Scheduler
from xtrain.dsl.schema.setting import settings_of
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.plan.arithmetic import Arithmetic, exact, length_of
from xtrain.plan.findings import Findings, checks
from xtrain.plan.plan import PlanPhase
from xtrain.plan.step_sizes import ResumedSizes, StepSizes
from xtrain.text.units import plural


def first_step(phase: PlanPhase, total: int) -> int:
    """Return the index of the first step of a phase in a run of `total` steps."""
    if phase.first is not None:
        return phase.first
    assert phase.fraction is not None, "a start in epochs is known once the data is counted"
    return round(phase.fraction * total)


def in_order(phases: Sequence[PlanPhase], total: int) -> list[tuple[int, PlanPhase]]:
    """Return (first step, phase) by first step. Of phases that begin together, only the last is included.

    Starts in steps and in shares of an uncounted budget get their order here.
    """
    begins = {first_step(phase, total): phase for phase in phases}
    return sorted(begins.items(), key=lambda pair: pair[0])


def phase_at(phases: Sequence[PlanPhase], step: int, total: int) -> PlanPhase:
    """Return the phase of a step (from 0): the last one that has begun. After the last step it is the last phase."""
    if len(phases) == 1:
        return phases[0]
    return [phase for first, phase in in_order(phases, total) if first <= step][-1]


SHAPES: dict[str, Callable[[float, float], float]] = {
    "cosine": lambda p, r: r + 0.5 * (1 - r) * (1 + math.cos(math.pi * p)),
    "linear": lambda p, r: 1 - (1 - r) * p,
    "sqrt": lambda p, r: r + (1 - r) * math.sqrt(1 - p),
}


def warmup_and_decay(args: Mapping[str, Any], total: float, shape: str, decay: float | None = None) -> Curve:
    """Return the curve of a schedule from the arguments of its node. decay: steps at the end; None: all steps after the
    warm-up."""
    warmup = length_in_steps(args["warmup"], total)
    return closed_form(
        args["lr"], total, warmup, total - warmup if decay is None else decay, args["floor"], SHAPES[shape]
    )


def closed_form(
    lr: float, total: float, warmup: float, decay: float, floor: float, shape: Callable[[float, float], float]
) -> Curve:
    """Return a curve that rises over `warmup` steps, stays, and falls over the last `decay` of `total` steps to `floor`
    · lr."""
    begin = max(warmup, total - decay)

    def rate(index: float) -> float:
        s = index + 1
        if s <= warmup:
            return lr * s / warmup
        if s <= begin:
            return lr
        left = total - begin
        return lr * shape(min(1.0, (s - begin) / left) if left > 0 else 1.0, floor)

    return rate


def length_in_steps(length: Mapping[str, float], total: float) -> float:
    """Return `{"steps": n}` or `{"fraction": f}` of `total` as a number, rounded to steps."""
    return length["steps"] if "steps" in length else round(length["fraction"] * total)


def idle_floor(warmup: Quantity, *others: str) -> dict[str, str]:
    """Return setting → reason for `floor` and `others` if the warm-up takes the whole budget, so that they change
    nothing."""
    if warmup == Quantity(100, "%"):
        return dict.fromkeys(("floor", *others), "the warm-up takes the whole budget")
    return {}


class DecayingScheduler(Scheduler):
    """Schedule that falls from the end of the warm-up to the floor at the last step, in a given shape."""

    floor: Quantity
    shape: ClassVar[str]

    def idle(self) -> dict[str, str]:
        return idle_floor(self.warmup)

    def falls(self, peak: float) -> bool:
        return self.floor.fraction < 1

    def args(self) -> dict[str, Any]:
        return {"floor": self.floor.fraction}

    @classmethod
    def rate(cls, args: Mapping[str, Any], total: float) -> Curve:
        return warmup_and_decay(args, total, cls.shape)

    @classmethod
    def shown(cls, args: Mapping[str, Any], length: Callable[[str], str]) -> list[str]:
        return [decay_text(args, cls.shape)]


def decay_text(args: Mapping[str, Any], shape: str) -> str:
    """Return a decay as text: `cosine to 3e-05 at step 600`."""
    steps = args["steps"]
    return f"{shape} to {args['floor'] * args['lr']:.3g} at {'the end' if steps is None else f'step {steps:,}'}"


Unit = Literal["steps", "tokens", "rows"]
Amount = int | Fraction


@frozen
class _Measure:
    """Progress of a run in one unit. sizes: of every step; None: progress is counted in steps. shift: amount before
    step 0, for rows of data that was not read from the beginning."""

    sizes: StepSizes | None = None
    shift: int = 0

    @property
    def full(self) -> int:
        """Amount of a full step of the present batch."""
        return 1 if self.sizes is None else self.sizes.full

    def at(self, position: Amount) -> Amount:
        """Return the amount after `position` steps."""
        return position if self.sizes is None else self.sizes.amount_at(position) + self.shift

    def position(self, amount: Amount) -> Amount:
        """Return the steps after which an amount is reached."""
        return max(amount, 0) if self.sizes is None else self.sizes.position(amount - self.shift)


@frozen
class ScheduleClock:
    """Conversion of steps into full steps of the present batch, the unit of a schedule's closed form.

    lengths: of the schedule, by setting. total: the budget. warmup: (measure, amount, end) if it is declared in another
    unit than the budget; it is linear in that unit.
    """

    measure: _Measure
    lengths: dict[str, float]
    total: float
    warmup: tuple[_Measure, Amount, Fraction] | None

    def at(self, steps: int) -> float:
        """Return the full steps that `steps` steps of the run amount to."""
        if self.warmup is not None:
            measure, amount, end = self.warmup
            if (done := measure.at(steps)) < amount:
                return _plain(end * done / amount)
        return _plain(Fraction(self.measure.at(steps)) / self.measure.full)


def learning_rate(args: Mapping[str, Any], batch: Arithmetic, phases: Sequence[PlanPhase] = ()) -> Rate:
    """Return step index (from 0) → learning rate, from the arguments of `setup.scheduler`.

    The schedule's rates must be `computed`, and no data may be left to count. phases: of the timeline; the rate is
    multiplied by the `lr_scale` of a step's phase.
    """
    assert batch.steps is not None
    clock = schedule_clock(args, batch)
    known = {**args, **{name: {"steps": length} for name, length in clock.lengths.items()}}
    rate = SCHEDULERS.of(args).rate(known, clock.total)
    return scaled(lambda index: rate(clock.at(index + 1) - 1), batch.steps, phases)


def computed(args: Mapping[str, Any]) -> bool:
    """Return True if the rates of a schedule can be computed without a run."""
    return SCHEDULERS.of(args).computed


def scaled(rate: Rate, total: int, phases: Sequence[PlanPhase]) -> Rate:
    """Return the rate of each step times the `lr_scale` of its phase."""
    if all(phase.lr_scale == 1 for phase in phases):
        return rate
    begins, scales = zip(*((first, phase.lr_scale) for first, phase in in_order(phases, total)), strict=True)
    return lambda index: rate(index) * scales[bisect_right(begins, index) - 1]


def schedule_clock(args: Mapping[str, Any], batch: Arithmetic) -> ScheduleClock:
    """Return the clock of a schedule, from the arguments of `setup.scheduler`."""
    kind = SCHEDULERS.of(args)
    unit, budget = _budget(batch)
    if kind.in_steps(args):
        unit, budget = "steps", batch.steps or 0
    measures = _measures(batch, batch.row_sizes)
    measure, full = measures[unit], measures[unit].full
    lengths, warmup = {}, None
    for name, value in args.items():
        if not isinstance(value, dict) or not value.keys() <= {"steps", "tokens", "epochs", "fraction"}:
            continue
        own, amount = _length(value, batch, unit, budget)
        if name in kind.at_end:
            begin = _begin_of_end(own, amount, unit, budget, batch)
            lengths[name] = _plain((budget - Fraction(measure.at(begin))) / full)
            continue
        end = Fraction(measure.at(measures[own].position(amount))) / full
        lengths[name] = _plain(end)
        if own != unit:
            warmup = measures[own], amount, end
    return ScheduleClock(measure, lengths, _plain(Fraction(budget) / full), warmup)


def _measures(batch: Arithmetic, rows: StepSizes) -> dict[Unit, _Measure]:
    """Return the measures of a run whose steps take the rows `rows`."""
    shift = batch.done_rows - rows.before(batch.done_steps)
    return {"steps": _Measure(), "tokens": _Measure(rows.times(batch.sequence)), "rows": _Measure(rows, shift)}


def _budget(batch: Arithmetic) -> tuple[Unit, Amount]:
    if batch.budget_tokens is not None:
        return "tokens", batch.budget_tokens
    if batch.epochs is not None and batch.epoch_rows is not None:
        return "rows", exact(batch.epochs) * batch.epoch_rows
    return "steps", batch.steps or 0


def _length(value: Mapping[str, Any], batch: Arithmetic, unit: Unit, budget: Amount) -> tuple[Unit, Amount]:
    """Return a length among the arguments of a schedule, in the unit in which it was declared."""
    if "tokens" in value:
        return "tokens", value["tokens"]
    if "epochs" in value and batch.epoch_rows is not None:
        return "rows", exact(value["epochs"]) * batch.epoch_rows
    return ("steps", value["steps"]) if "steps" in value else (unit, exact(value["fraction"]) * budget)


def _begin_of_end(own: Unit, amount: Amount, unit: Unit, budget: Amount, batch: Arithmetic) -> Amount:
    """Return the number of steps before the last part of a run, which is `amount` long.

    It begins where that much of the budget is left if the batch of that moment stays. Once begun, it continues when the
    batch changes.
    """
    pieces = batch.row_sizes.pieces()
    for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
        measures = _measures(batch, piece)
        end = measures[unit].position(budget)
        begin = measures[own].position(measures[own].at(ceil(end) if own == "steps" else end) - amount)
        if following is None or (isinstance(following, ResumedSizes) and begin < following.begin):
            return max(begin, piece.begin) if isinstance(piece, ResumedSizes) else begin
    raise AssertionError("the last piece always holds the rest")


def _plain(number: Amount) -> float:
    return number.numerator if number.denominator == 1 else float(number)


def in_effect(scheduler: Scheduler) -> Scheduler:
    """Return the schedule with defaults for settings that change nothing."""
    defaults = {name: fields_dict(type(scheduler))[name].default for name in scheduler.idle()}
    return evolve(scheduler, **defaults)


def scheduler_args(spec: Spec, batch: Arithmetic) -> dict[str, Any]:
    """Return the arguments of `setup.scheduler` that its kind has."""
    scheduler = in_effect(spec.scheduler)
    lengths = {name: _length_args(scheduler, name, batch) for name in scheduler.lengths()}
    own = {**lengths, **scheduler.args()}
    found = {"kind": scheduler.kind, "lr": spec.optimizer.lr, "steps": batch.steps}
    return found | {name: own.pop(name) for name in settings_of(type(scheduler)) if name in own} | own


def _length_args(scheduler: Scheduler, name: str, batch: Arithmetic) -> dict[str, Any]:
    quantity, length = scheduler.lengths()[name], _in_steps(scheduler, name, batch)
    tokens = batch.in_tokens(quantity)
    declared = {} if tokens is None else {"tokens": tokens}
    if length is not None or declared:
        return declared if length is None else {"steps": length, **declared}
    return {"fraction": quantity.fraction} if quantity.unit == "%" else {"epochs": float(quantity.value)}


def _in_steps(scheduler: Scheduler, name: str, batch: Arithmetic) -> int | None:
    return length_of(scheduler.lengths()[name], batch, at_end=name in scheduler.at_end)


def check_schedule(spec: Spec, batch: Arithmetic, found: Findings) -> None:
    """Check that the lengths of a schedule fit into the budget, with the present batch or the first one: a run that
    resumes with another batch keeps its schedule."""
    if batch.past is not None:
        batch = next((each for each in (batch, batch.as_begun()) if _fits(spec, each)), batch)
    _check_lengths(spec, batch, found)


def _fits(spec: Spec, batch: Arithmetic) -> bool:
    found = Findings(spec)
    _check_lengths(spec, batch, found)
    return not found.failed


@checks("schedule.warmup", reads="scheduler.kind scheduler.warmup {decay} {steps}")
def _check_lengths(spec: Spec, batch: Arithmetic, found: Findings) -> None:
    scheduler, steps = spec.scheduler, batch.steps
    parts = scheduler.lengths()
    rule = "schedule.warmup"
    shown = " + ".join(f"{name} {quantity}" for name, quantity in parts.items())
    lengths = [_in_steps(scheduler, name, batch) for name in parts]
    if steps is None or None in lengths:
        shares = [_share(quantity, batch) for quantity in parts.values()]
        if None in shares:
            found.unknown(rule, f"{shown}: the number of steps is unknown until the data is counted")
            return
        fraction = sum(share for share in shares if share is not None)
        used, total = f"{fraction:.0%}", "the budget"
        fits = fraction <= 1
    else:
        length = sum(length or 0 for length in lengths)
        used, total = f"{length:,} steps", f"the {steps:,} steps of the budget"
        fits = length <= steps
    if fits:
        found.passed(rule, f"{shown} = {used} of {total}")
        return
    hint = "use `warmup = 2%`"
    if steps is not None and steps > 1 and None not in lengths:
        hint = f"use `warmup = 2%`, or {plural(steps // 2, 'step')} or fewer"
    length = shown if shown.endswith(used) else f"{shown} = {used}"
    found.fail(rule, "X602", "scheduler.warmup", f"{length}, longer than {total}", hint)


def _share(quantity: Quantity, batch: Arithmetic) -> float | None:
    """Return a length as a share of the budget; None if it depends on uncounted data."""
    if quantity.unit == "%":
        return quantity.fraction
    if quantity.unit == "epochs" and batch.epochs is not None:
        return quantity.value / batch.epochs
    return None if quantity.value else 0.0
