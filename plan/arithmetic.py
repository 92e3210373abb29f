"""Rows, tokens, steps and epochs: the rows of an optimizer step, and the number of steps of a run."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from math import ceil, floor

from attrs import evolve, field

from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.plan.findings import Findings, checks
from xtrain.plan.plan import Mesh, Plan, PlanPhase
from xtrain.plan.step_sizes import MixtureSampler, StepSizes
from xtrain.text.units import count_text, plural

# Padding is cut into segments of at most this many positions: attention over it stays cheap, and no position exceeds a
# model's limit.
LONGEST_PADDING = 1024


def exact(number: float | Fraction) -> Fraction:
    """Return a number as it was written instead of the nearest binary fraction: 0.1 of 10 rows is one row."""
    return Fraction(str(number))


def rows_of_epoch(phases: Sequence[PlanPhase], rows: Mapping[str, int]) -> Fraction:
    """Return the rows of one epoch of a run with these phases. rows: of each dataset for training, by name.

    If the first weights are in epochs, an epoch takes each dataset so often. Otherwise it has the rows of all datasets
    that any phase trains on.
    """
    if phases[0].passes is not None:
        return sum(_rows_in_epoch(phases[0], tuple(phases[0].passes), rows), Fraction(0))
    names = {name for phase in phases for name, amount in phase.amounts.items() if amount > 0}
    return Fraction(sum(rows[name] for name in names))


def counted(phases: Sequence[PlanPhase], rows: Mapping[str, int]) -> tuple[PlanPhase, ...]:
    """Return the phases with weights in epochs converted to shares, for datasets with `rows` rows."""
    return tuple(phase if phase.passes is None else evolve(phase, shares=_shares(phase, rows)) for phase in phases)


def _shares(phase: PlanPhase, rows: Mapping[str, int]) -> dict[str, float]:
    taken = _rows_in_epoch(phase, tuple(phase.amounts), rows)
    return {name: float(own / sum(taken)) for name, own in zip(phase.amounts, taken, strict=True)}


def sampler_of(phase: PlanPhase, datasets: Sequence[str], rows: Mapping[str, int], seed: int) -> MixtureSampler:
    """Return the sampler of a phase, which gives the dataset of each row; datasets that the phase does not name are
    never chosen.

    Weights in epochs use one sampling sequence in all phases, so that phases with equal weights continue it.
    """
    if phase.exact_rows is not None:
        return MixtureSampler.of_epochs(rows_of_step(phase, datasets, phase.exact_rows), seed)
    if phase.passes is None:
        return MixtureSampler.of([phase.shares.get(name, 0.0) for name in datasets], seed, phase.name)
    return MixtureSampler.of_epochs(_rows_in_epoch(phase, datasets, rows), seed)


def rows_of_step(phase: PlanPhase, datasets: Sequence[str], rows: int) -> list[Fraction]:
    """Return the rows of each dataset in a step of `rows` rows, for a phase with exact shares; fractional if they do
    not divide evenly."""
    found = [Fraction(phase.shares.get(name, 0.0) * rows) for name in datasets]
    # A third has no exact binary form.
    return [Fraction(round(each)) if abs(each - round(each)) < 1e-6 else each for each in found]


def _rows_in_epoch(phase: PlanPhase, datasets: Sequence[str], rows: Mapping[str, int]) -> list[Fraction]:
    """Return the rows of each dataset in one epoch of a phase with weights in epochs."""
    assert phase.passes is not None
    taken = [(name, exact(phase.passes.get(name, 0.0))) for name in datasets]
    return [epochs * rows[name] if epochs else Fraction(0) for name, epochs in taken]


@frozen(kw_only=True)
class Counts:
    """Numbers known once the data is counted: the rows of an epoch, and the run's progress in them.

    past: rows of the finished steps, None if the plan's own sizes hold from step 0.
    """

    epoch_rows: Fraction
    done_steps: int = 0
    done_rows: int = 0
    past: StepSizes | None = None


@frozen(kw_only=True)
class Arithmetic:
    """Arithmetic of a step: `rows` rows of `sequence` tokens, `micro` at a time on each data rank, `accumulate` times.
    The steps before `ramp` have fewer rows, from `first_rows` on, and therefore fewer microbatches.

    `steps` is None while the budget is in epochs and the data is not counted. reasons: by path in the spec.
    budget_tokens: for a budget in tokens. epoch_rows: of one epoch, once the data is counted. done_steps, done_rows:
    finished steps of the run, and the rows of this data that they took. past: rows of each finished step, if the run
    had another batch. ramp_tokens: for a ramp that is declared in tokens.
    """

    micro: int
    accumulate: int
    rows: int
    sequence: int
    steps: int | None = None
    epochs: float | None = None
    budget_tokens: int | None = None
    reasons: dict[str, str] = field(factory=dict)
    epoch_rows: Fraction | None = None
    done_steps: int = 0
    done_rows: int = 0
    first_rows: int | None = None
    ramp: int = 0
    ramp_tokens: bool = False
    past: StepSizes | None = None

    @cached_property
    def row_sizes(self) -> StepSizes:
        """Rows of every step."""
        own = StepSizes(self.rows, self.rows if self.first_rows is None else self.first_rows, self.ramp)
        if self.past is None:
            return own
        offset = own.steps_of(self.past.before(self.done_steps)) if self.ramp_tokens else None
        return own.resumed(self.past, self.done_steps, offset)

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Distinct numbers of microbatches of a step on a data rank, ascending."""
        each = self.rows // self.accumulate
        return tuple(rows // each for _, rows in self.row_sizes.stretches()) if self.ramp else (self.accumulate,)

    @cached_property
    def sizes(self) -> StepSizes:
        """Tokens of every step."""
        return self.row_sizes.times(self.sequence)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step after the ramp."""
        return self.rows * self.sequence

    @property
    def tokens(self) -> int | None:
        return None if self.steps is None else self.sizes.before(self.steps)

    @property
    def declared_steps(self) -> int | None:
        """Steps that follow from the budget alone, whether the data is counted or not."""
        return None if self.epochs is not None else self.steps

    def counted(self, epoch_rows: Fraction) -> "Arithmetic":
        """Return the arithmetic with the data counted."""
        return evolve(self, epoch_rows=epoch_rows).resumed(self.past, self.done_steps, self.done_rows)

    def resumed(self, past: StepSizes | None, step: int, rows: int) -> "Arithmetic":
        """Return the arithmetic of a run that resumes after `step` steps, which took `rows` rows of this data.

        past: the rows of these steps; None: rows of this batch. The budget has fewer steps than are done if it has
        fewer tokens, or fewer epochs, than were trained on.
        """
        own = evolve(self, past=None, done_steps=0).row_sizes
        found = evolve(self, done_steps=step, done_rows=rows, past=None if past == own else past)
        return evolve(found, steps=found.steps_with(found.row_sizes))

    def as_begun(self) -> "Arithmetic":
        """Return the arithmetic of a run that keeps its first batch to the end."""
        assert self.past is not None
        first = self.past.pieces()[0]
        end = self.steps_with(first) or 0
        return self.resumed(first, end, first.before(end))

    def steps_with(self, rows: StepSizes) -> int | None:
        """Return the steps of the budget if steps take the rows `rows`; None while unknown."""
        if self.budget_tokens is not None:
            return rows.times(self.sequence).steps_of(self.budget_tokens)
        if self.epochs is None or self.epoch_rows is None:
            return None if self.epochs is not None else self.steps
        return self._behind(exact(self.epochs) * self.epoch_rows, rows)

    def rows_before(self, step: int) -> int:
        """Return the rows of this data taken before a step (from 0) that is still to come."""
        return self.done_rows + self.row_sizes.between(self.done_steps, step)

    def epochs_before(self, step: int) -> float | None:
        """Return the epochs of this data taken before a step that is still to come; None until the data is counted."""
        if not self.epoch_rows:
            return None
        # Called in every logged step: whole numbers take a tenth of the time of a fraction and give the same result.
        return self.rows_before(step) * self.epoch_rows.denominator / self.epoch_rows.numerator

    def epoch_ended(self, step: int) -> int | None:
        """Return the last epoch, counted from 1, that ends in the last step before `step`; None if none ends there, and
        until the data is counted."""
        if not self.epoch_rows or step == 0:
            return None
        taken = self.rows_before(step)
        ended = int(taken // self.epoch_rows)
        return ended if ended > (taken - self.row_sizes.at(step - 1)) // self.epoch_rows else None

    def step_behind(self, epochs: float | Fraction) -> int | None:
        """Return the first step (from 0) after `epochs` epochs; None until the data is counted."""
        if self.epoch_rows is None:
            return None
        return self._behind(exact(epochs) * self.epoch_rows, self.row_sizes)

    def _behind(self, rows: Fraction, sizes: StepSizes) -> int:
        """Return the first step (from 0) before which `rows` rows of this data are taken, by steps of `sizes`."""
        done = sizes.before(self.done_steps)
        if rows <= self.done_rows != done:
            # These steps also took rows of other data; the shares are assumed constant.
            return ceil(rows * self.done_steps / self.done_rows) if rows else 0
        return max(0, sizes.steps_of(rows - self.done_rows + done))

    def steps_in(self, epochs: float | Fraction) -> int | None:
        """Return `epochs` epochs as a number of steps of full size, rounded up; None until the data is counted."""
        return None if self.epoch_rows is None else ceil(exact(epochs) * self.epoch_rows / self.rows)

    def in_tokens(self, amount: Quantity) -> int | None:
        """Return an amount that is declared in tokens, or as a share of a budget in tokens; None for any other."""
        if amount.unit == "tokens":
            return ceil(amount.value)
        if amount.unit == "%" and self.budget_tokens is not None:
            return ceil(exact(amount.fraction) * self.budget_tokens)
        return None

    def nearest_step(self, fraction: float) -> int | None:
        """Return the step nearest to a share of the budget, measured in tokens or rows if the budget is in tokens or
        epochs; None while unknown."""
        alike = self.past is None and not self.ramp
        if self.steps is None or alike:
            return None if self.steps is None else round(self.steps * fraction)
        if self.budget_tokens is not None:
            return round(self.sizes.position(exact(fraction) * self.budget_tokens))
        if self.epochs is not None and self.epoch_rows is not None:
            rows = exact(fraction) * exact(self.epochs) * self.epoch_rows  # of this data
            return round(self.row_sizes.position(rows - self.done_rows + self.row_sizes.before(self.done_steps)))
        return round(self.steps * fraction)

    def steps_at_end(self, epochs: float) -> int | None:
        """Return how many of the last steps of the run make up `epochs` epochs; None until the data is counted."""
        return None if self.epoch_rows is None else self._at_end(self.row_sizes, exact(epochs) * self.epoch_rows)

    def steps_of_tokens(self, tokens: int, *, at_end: bool) -> int | None:
        """Return how many of the first steps, or of the last steps, take `tokens` tokens."""
        return self._at_end(self.sizes, Fraction(tokens)) if at_end else self.sizes.steps_of(tokens)

    def _at_end(self, sizes: StepSizes, amount: Fraction) -> int | None:
        if self.steps is None:
            return None
        before = floor(sizes.before(self.steps) - amount)
        if before < 0:  # longer than the run; reported as such if a ramp makes its steps small
            return max(ceil(amount / sizes.full), self.steps + 1)
        return self.steps - sizes.steps_of(before + 1) + 1


def arithmetic_of(plan: Plan) -> Arithmetic:
    """Return the rows of a step and the budget of a plan, with no data counted."""
    args = plan.node("setup.loader").args
    names = ("micro", "accumulate", "rows", "sequence", "steps", "epochs")
    ramp = args.get("ramp", {"rows": None, "steps": 0})
    return Arithmetic(
        **{name: args[name] for name in names},
        budget_tokens=plan.timeline.budget_tokens,
        first_rows=ramp["rows"],
        ramp=ramp["steps"],
        ramp_tokens=ramp.get("tokens", False),
    )


def derive_arithmetic(spec: Spec, mesh: Mesh, found: Findings, counted: Counts | None = None) -> Arithmetic:
    """Complete `batch` for this mesh, convert the budget to steps, and report contradictions.

    counted: numbers of the data, if it has been counted.
    """
    shares = _with_ramp(spec, _share_rows(spec, mesh, found), mesh, found)
    reasons = dict(shares.reasons)
    budget = spec.experiment.budget
    steps, epochs, tokens = None, None, None
    if budget.unit == "steps":
        steps = ceil(budget.value)
    elif budget.unit == "tokens":
        tokens = ceil(budget.value)
        steps = shares.sizes.steps_of(tokens)
        reasons["steps"] = f"{count_text(budget.value)} tokens / {shares.tokens_per_step:,} a step, rounded up"
        if shares.ramp:
            reasons["steps"] += f", and {plural(shares.ramp, 'smaller step')} of the ramp"
    else:
        epochs = float(budget.value)
    batch = evolve(shares, steps=steps, epochs=epochs, budget_tokens=tokens, reasons=reasons)
    if counted is not None:
        batch = batch.counted(counted.epoch_rows).resumed(counted.past, counted.done_steps, counted.done_rows)
    if batch.steps is None:
        found.unknown("schedule.budget", f"{budget}: the number of steps is unknown until the data is counted")
    else:
        smaller = f", of which a ramp makes the first {batch.ramp:,} smaller" if batch.ramp else ""
        evidence = f"{budget} = {batch.steps:,} steps of {shares.tokens_per_step:,} tokens{smaller}"
        found.passed("schedule.budget", evidence)
    return batch


def microbatches_text(batch: Arithmetic) -> str:
    """Return the microbatches of a step on a data rank: `4 microbatches`, with a ramp `1 to 4 microbatches`."""
    least, most = batch.microbatches[0], plural(batch.accumulate, "microbatch")
    return most if least == batch.accumulate else f"{least:,} to {most}"


@checks("batch.rows", reads="batch.micro batch.accumulate batch.rows {data_ranks}")
def _share_rows(spec: Spec, mesh: Mesh, found: Findings) -> Arithmetic:
    batch, data_ranks = spec.batch, mesh.data_ranks
    micro, accumulate, rows = batch.micro, batch.accumulate, batch.rows
    each = micro * data_ranks
    reasons: dict[str, str] = {}
    if isinstance(rows, Auto):
        if isinstance(accumulate, Auto):
            accumulate = 1
            reasons["batch.accumulate"] = "1, because `rows` is not set"
        rows = each * accumulate
        reasons["batch.rows"] = f"micro {micro} · accumulate {accumulate} · data ranks {data_ranks}"
    elif isinstance(accumulate, Auto):
        accumulate = max(rows // each, 1)
        reasons["batch.accumulate"] = f"rows {rows} / (micro {micro} · data ranks {data_ranks})"
    product = each * accumulate
    if product != rows:
        low = rows // each * each
        options = f"{low} or {low + each}" if low else f"{each}"
        if not isinstance(batch.accumulate, Auto):
            options = f"{product}"
        found.fail(
            "batch.rows",
            "X601",
            "batch.rows",
            f"rows {rows} is not micro {micro} · accumulate {accumulate} · data ranks {data_ranks} = {product}"
            if not isinstance(batch.accumulate, Auto)
            else f"rows {rows} is not divisible by micro {micro} · data ranks {data_ranks} = {each}",
            f"use rows {options}",
        )
    else:
        found.passed("batch.rows", f"rows {rows} = micro {micro} · accumulate {accumulate} · data ranks {data_ranks}")
    return Arithmetic(micro=micro, accumulate=accumulate, rows=rows, sequence=batch.sequence, reasons=reasons)


@checks("batch.ramp", reads="{ramp} batch.micro batch.sequence {data_ranks}")
def _with_ramp(spec: Spec, batch: Arithmetic, mesh: Mesh, found: Findings) -> Arithmetic:
    """Return `batch` with smaller first steps if the spec asks for a ramp; report an impossible ramp."""
    first, path = spec.batch.ramp_from, "batch.ramp_from"
    each = batch.micro * mesh.data_ranks
    if first is None or batch.rows != each * batch.accumulate:  # a mismatch is reported elsewhere
        return batch
    if first >= batch.rows:
        message = f"ramp_from {first} is not below the {plural(batch.rows, 'row')} that steps grow to"
        hint = f"use {batch.rows // 2 // each * each or each} or fewer" if batch.rows > each else "remove it"
        found.fail("batch.ramp", "X601", path, message, hint)
    elif first % each:
        low = first // each * each
        message = f"ramp_from {first} is not divisible by micro {batch.micro} · data ranks {mesh.data_ranks} = {each}"
        found.fail("batch.ramp", "X601", path, message, f"use {f'{low} or {low + each}' if low else each} rows")
    elif (steps := _ramp_steps(spec, batch, first)) is None:
        message = f"ramp {spec.batch.ramp} is a share of a budget in epochs, whose steps are unknown before the run"
        found.fail(
            "batch.ramp", "X302", "batch.ramp", message, "give it in steps or tokens, such as `ramp = 100 steps`"
        )
    elif steps == 0:
        message = f"ramp {spec.batch.ramp} is shorter than one step"
        found.fail("batch.ramp", "X304", "batch.ramp", message, "make it longer, or remove `ramp_from`")
    else:
        in_tokens = spec.batch.ramp.unit == "tokens"
        return _checked_ramp(spec, evolve(batch, first_rows=first, ramp=steps, ramp_tokens=in_tokens), found)
    return batch


def _checked_ramp(spec: Spec, batch: Arithmetic, found: Findings) -> Arithmetic:
    """Return `batch` with its ramp if the ramp fits into the budget."""
    sizes, budget = batch.row_sizes, spec.experiment.budget
    total = ceil(budget.value) if budget.unit == "steps" else batch.sizes.steps_of(ceil(budget.value))
    length = plural(batch.ramp, "step")
    if budget.unit != "epochs" and batch.ramp > total:
        message = f"ramp {spec.batch.ramp} = {length}, longer than the {total:,} steps of the budget"
        found.fail("batch.ramp", "X602", "batch.ramp", message, f"use {plural(max(total // 2, 1), 'step')} or fewer")
    else:
        by = plural(sizes.grows_by, "row")
        found.passed("batch.ramp", f"{sizes.first} → {plural(sizes.full, 'row')} a step, by {by}, over {length}")
        why = f"{length}, in which {sizes.before(batch.ramp):,} rows are taken"
        reasons = batch.reasons if spec.batch.ramp.unit == "steps" else batch.reasons | {"batch.ramp": why}
        return evolve(batch, reasons=reasons)
    return evolve(batch, first_rows=None, ramp=0)


def _ramp_steps(spec: Spec, batch: Arithmetic, first: int) -> int | None:
    """Return the length of the ramp in steps; None while it depends on data that is not counted."""
    length, budget = spec.batch.ramp, spec.experiment.budget

    def sizes(ramp: int) -> StepSizes:
        """Return the tokens of every step with a ramp of `ramp` steps."""
        return evolve(batch, first_rows=first, ramp=ramp).sizes

    if length.unit == "steps":
        return ceil(length.value)
    if length.unit == "tokens":
        most = ceil(Fraction(length.value) / (first * batch.sequence))
        return _least(most, lambda steps: sizes(steps).before(steps) >= length.value)
    if budget.unit == "epochs":
        return None
    if budget.unit == "steps":
        return round(ceil(budget.value) * length.fraction)
    # A longer ramp makes the same tokens more steps, and the ramp is a share of those.
    most = ceil(Fraction(budget.value) / (first * batch.sequence))
    return _least(most, lambda steps: steps >= round(sizes(steps).steps_of(ceil(budget.value)) * length.fraction))


def _least(most: int, enough: Callable[[int], bool]) -> int:
    """Return the smallest number up to `most` that is enough; every larger number must be enough too."""
    low = 0
    while low < most:
        middle = (low + most) // 2
        low, most = (low, middle) if enough(middle) else (middle + 1, most)
    return low


def length_of(quantity: Quantity, batch: Arithmetic, *, at_end: bool = False) -> int | None:
    """Return a length in steps: a share of the budget is rounded to the nearest step, tokens and epochs are rounded up;
    None while unknown. at_end: measure from the end of the run."""
    if quantity.unit == "steps":
        return ceil(quantity.value)
    if quantity.unit == "epochs":
        epochs = float(quantity.value)
        return batch.steps_at_end(epochs) if at_end else batch.step_behind(epochs)
    if quantity.unit == "tokens":
        return batch.steps_of_tokens(ceil(quantity.value), at_end=at_end)
    if at_end and batch.steps is not None:
        return batch.steps - (batch.nearest_step(1 - quantity.fraction) or 0)
    return batch.nearest_step(quantity.fraction)
