"""Rows, tokens and steps: what one optimizer step takes, and how many there are."""

from math import ceil

from attrs import evolve, field, frozen

from ..dsl.quantity import Quantity
from ..dsl.schema.setting import Auto
from ..dsl.spec import Spec
from .plan_mesh import Mesh
from .rules.findings import Findings
from .units import count_text


@frozen(kw_only=True)
class Arithmetic:
    """One step: `rows` rows of `sequence` tokens, `micro` at a time on each data rank, `accumulate` times.

    `steps` is None while the budget is in epochs: the data has not been counted. `reasons` by path in the spec.
    """

    micro: int
    accumulate: int
    rows: int
    sequence: int
    steps: int | None = None
    epochs: float | None = None
    reasons: dict[str, str] = field(factory=dict)

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.sequence

    @property
    def tokens(self) -> int | None:
        return None if self.steps is None else self.steps * self.tokens_per_step


def derive_arithmetic(spec: Spec, mesh: Mesh, found: Findings) -> Arithmetic:
    """Complete `batch` for this mesh and turn the budget into steps; contradictions are reported."""
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
    if steps is None:
        found.unknown("schedule.budget", f"{budget}: the number of steps is known once the data is counted")
    else:
        found.passed("schedule.budget", f"{budget} = {steps:,} steps of {shares.tokens_per_step:,} tokens")
    return evolve(shares, steps=steps, epochs=epochs, reasons=reasons)


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


def steps_of(quantity: Quantity, steps: int | None) -> int | None:
    """A length in steps: as it is, or a share of the budget rounded to the nearest; None if the budget is not known."""
    if quantity.unit == "steps":
        return ceil(quantity.value)
    if steps is None:
        return None
    return round(steps * quantity.fraction)
