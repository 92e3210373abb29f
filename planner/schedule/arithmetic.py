"""Rows, tokens, steps and epochs: what one optimizer step takes, and how many there are."""

from fractions import Fraction
from math import ceil

from attrs import evolve, field, frozen

from ...dsl.quantity import Quantity
from ...dsl.schema.setting import Auto
from ...dsl.spec import Spec
from ..findings import Findings
from ..plan import Mesh
from ..units import count_text
from .epochs import exact, steps_of_epochs


@frozen(kw_only=True)
class Counts:
    """What is known once the data is counted: the rows of an epoch, and how far the run has come in it."""

    epoch_rows: Fraction
    done_steps: int = 0
    done_rows: int = 0


@frozen(kw_only=True)
class Arithmetic:
    """One step: `rows` rows of `sequence` tokens, `micro` at a time on each data rank, `accumulate` times.

    `steps` is None while the budget is in epochs and the data has not been counted. `reasons` by path in the spec.
    epoch_rows: of one epoch, once the data is counted. done_steps, done_rows: steps that the run has behind it, and the
    rows of this data that were taken in them; the steps before may have had other rows.
    """

    micro: int
    accumulate: int
    rows: int
    sequence: int
    steps: int | None = None
    epochs: float | None = None
    reasons: dict[str, str] = field(factory=dict)
    epoch_rows: Fraction | None = None
    done_steps: int = 0
    done_rows: int = 0

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.sequence

    @property
    def tokens(self) -> int | None:
        return None if self.steps is None else self.steps * self.tokens_per_step

    @property
    def declared_steps(self) -> int | None:
        """What the budget alone says, whether the data is counted or not."""
        return None if self.epochs is not None else self.steps

    def counted(self, epoch_rows: Fraction, *, done_steps: int = 0, done_rows: int = 0) -> "Arithmetic":
        """The same with the data counted, for a run that begins or goes on there. It has fewer steps than are behind it
        where more rows were taken than a budget in epochs has."""
        steps = self.steps
        if self.epochs is not None:
            steps = max(0, done_steps + steps_of_epochs(self.epochs, epoch_rows, self.rows, done_rows))
        return evolve(self, steps=steps, epoch_rows=epoch_rows, done_steps=done_steps, done_rows=done_rows)

    def rows_before(self, step: int) -> int:
        """Rows of this data that are taken before a step (from 0) that is still to come."""
        return self.done_rows + (step - self.done_steps) * self.rows

    def epochs_before(self, step: int) -> float | None:
        """The same in epochs; None until the data is counted."""
        return float(self.rows_before(step) / self.epoch_rows) if self.epoch_rows else None

    def epoch_ended(self, step: int) -> int | None:
        """The epoch that ends in the last step before `step`, counted from 1, the last one of several; None where none
        does, and until the data is counted."""
        if not self.epoch_rows or step == 0:
            return None
        taken = self.rows_before(step)
        ended = int(taken // self.epoch_rows)
        return ended if ended > (taken - self.rows) // self.epoch_rows else None

    def step_behind(self, epochs: float) -> int | None:
        """The first step (from 0) that comes behind so many epochs; None until the data is counted."""
        if self.epoch_rows is None:
            return None
        rows = exact(epochs) * self.epoch_rows
        if rows <= self.done_rows:
            # Of steps that had other rows only their number is known: they are taken to be alike.
            return ceil(rows * self.done_steps / self.done_rows) if rows else 0
        return self.done_steps + ceil((rows - self.done_rows) / self.rows)

    def steps_in(self, epochs: float) -> int | None:
        """So many epochs as a number of steps, rounded up; None until the data is counted."""
        return None if self.epoch_rows is None else ceil(exact(epochs) * self.epoch_rows / self.rows)


def derive_arithmetic(spec: Spec, mesh: Mesh, found: Findings, counted: Counts | None = None) -> Arithmetic:
    """Complete `batch` for this mesh and turn the budget into steps; contradictions are reported.

    counted: what is known of the data, if it has been counted.
    """
    shares = _share_rows(spec, mesh, found)
    reasons = dict(shares.reasons)
    budget = spec.experiment.budget
    steps, epochs = None, None
    if budget.unit == "steps":
        steps = ceil(budget.value)
    elif budget.unit == "tokens":
        steps = ceil(budget.value / shares.tokens_per_step)
        reasons["steps"] = f"{count_text(budget.value)} tokens / {shares.tokens_per_step:,} a step, rounded up"
    else:
        epochs = float(budget.value)
    batch = evolve(shares, steps=steps, epochs=epochs, reasons=reasons)
    if counted is not None:
        batch = batch.counted(counted.epoch_rows, done_steps=counted.done_steps, done_rows=counted.done_rows)
    if batch.steps is None:
        found.unknown("schedule.budget", f"{budget}: the number of steps is known only when the data has been counted")
    else:
        found.passed("schedule.budget", f"{budget} = {batch.steps:,} steps of {shares.tokens_per_step:,} tokens")
    return batch


def _share_rows(spec: Spec, mesh: Mesh, found: Findings) -> Arithmetic:
    batch, data_ranks = spec.batch, mesh.data_ranks
    micro, accumulate, rows = batch.micro, batch.accumulate, batch.rows
    each = micro * data_ranks
    reasons: dict[str, str] = {}
    if isinstance(rows, Auto):
        if isinstance(accumulate, Auto):
            accumulate = 1
            reasons["batch.accumulate"] = "1, as no rows are asked for"
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
            else f"rows {rows} is not a multiple of micro {micro} · data ranks {data_ranks} = {each}",
            f"use rows {options}",
        )
    else:
        found.passed("batch.rows", f"rows {rows} = micro {micro} · accumulate {accumulate} · data ranks {data_ranks}")
    return Arithmetic(micro=micro, accumulate=accumulate, rows=rows, sequence=batch.sequence, reasons=reasons)


def length_of(quantity: Quantity, batch: Arithmetic) -> int | None:
    """A length in steps: as it is, a share of the budget rounded to the nearest, or epochs rounded up; None while that
    is not known."""
    if quantity.unit == "steps":
        return ceil(quantity.value)
    if quantity.unit == "epochs":
        return batch.steps_in(float(quantity.value))
    return None if batch.steps is None else round(batch.steps * quantity.fraction)
