"""The learning rate of a step by the arguments of its node: that of the schedule, times the factor of the phase.

A schedule is a closed form of the step (`closed_form.py`). With a budget in tokens or epochs it is a function of what
was trained on: the closed form takes the number of full steps of the present batch that would have trained on as much.
For steps that are all alike that is the number of steps. After a resume with another batch, and in a ramp, the rate
then is continuous (Megatron-LM counts samples for the same reason).
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil
from typing import Any, Literal

from attrs import frozen

from xtrain.dsl.schema.schedules import SCHEDULERS, Rate
from xtrain.planner.plan import PlanPhase
from xtrain.planner.schedule.arithmetic import Arithmetic
from xtrain.planner.schedule.epochs import exact
from xtrain.planner.schedule.phases import in_order
from xtrain.planner.schedule.step_sizes import ResumedSizes, StepSizes

Unit = Literal["steps", "tokens", "rows"]
Amount = int | Fraction


@frozen
class _Measure:
    """Progress of a run in a unit. sizes: of every step; None: progress is counted in steps. shift: what is counted
    before step 0, of rows of data that was not read from the beginning."""

    sizes: StepSizes | None = None
    shift: int = 0

    @property
    def full(self) -> int:
        """Amount of a full step of the present batch."""
        return 1 if self.sizes is None else self.sizes.full

    def at(self, position: Amount) -> Amount:
        """Return the amount after so many steps."""
        return position if self.sizes is None else self.sizes.amount_at(position) + self.shift

    def position(self, amount: Amount) -> Amount:
        """Return the steps after which an amount is reached."""
        return max(amount, 0) if self.sizes is None else self.sizes.position(amount - self.shift)


@frozen
class ScheduleClock:
    """Conversion of steps into full steps of the present batch, in which the closed form of a schedule is computed.

    lengths: those of the schedule, by setting; total: the budget. warmup: (measure, amount, end) where it is declared
    in another unit than the budget, in which it is linear.
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
    """Step index (from 0) → learning rate, by the arguments of `setup.scheduler`.

    Of a schedule whose rates are `computed`, with nothing left to be counted. phases: of the timeline; the rate is
    multiplied by the `lr_scale` of the phase that a step lies in.
    """
    assert batch.steps is not None
    clock = schedule_clock(args, batch)
    known = {**args, **{name: {"steps": length} for name, length in clock.lengths.items()}}
    rate = SCHEDULERS.of(args).rate(known, clock.total)
    return scaled(lambda index: rate(clock.at(index + 1) - 1), batch.steps, phases)


def computed(args: Mapping[str, Any]) -> bool:
    """Whether the rates of a schedule can be computed without a run."""
    return SCHEDULERS.of(args).computed


def scaled(rate: Rate, total: int, phases: Sequence[PlanPhase]) -> Rate:
    """The rate of each step times the `lr_scale` of its phase."""
    if all(phase.lr_scale == 1 for phase in phases):
        return rate
    begins, scales = zip(*((first, phase.lr_scale) for first, phase in in_order(phases, total)), strict=True)
    return lambda index: rate(index) * scales[bisect_right(begins, index) - 1]


def schedule_clock(args: Mapping[str, Any], batch: Arithmetic) -> ScheduleClock:
    """Return the clock of a schedule, by the arguments of `setup.scheduler`."""
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
    """The measures of a run whose steps take the rows `rows`."""
    shift = batch.done_rows - rows.before(batch.done_steps)
    return {"steps": _Measure(), "tokens": _Measure(rows.times(batch.sequence)), "rows": _Measure(rows, shift)}


def _budget(batch: Arithmetic) -> tuple[Unit, Amount]:
    if batch.budget_tokens is not None:
        return "tokens", batch.budget_tokens
    if batch.epochs is not None and batch.epoch_rows is not None:
        return "rows", exact(batch.epochs) * batch.epoch_rows
    return "steps", batch.steps or 0


def _length(value: Mapping[str, Any], batch: Arithmetic, unit: Unit, budget: Amount) -> tuple[Unit, Amount]:
    """A length among the arguments of a schedule in the unit in which it was declared."""
    if "tokens" in value:
        return "tokens", value["tokens"]
    if "epochs" in value and batch.epoch_rows is not None:
        return "rows", exact(value["epochs"]) * batch.epoch_rows
    return ("steps", value["steps"]) if "steps" in value else (unit, exact(value["fraction"]) * budget)


def _begin_of_end(own: Unit, amount: Amount, unit: Unit, budget: Amount, batch: Arithmetic) -> Amount:
    """Return after how many steps the last part of a run begins, which is `amount` long.

    It begins where so much is left of the budget if the batch of that moment stays: what has begun goes on where the
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
