"""The rows of the datasets of a plan that are trained on, and the curriculum over them. Without torch."""

from attrs import frozen

from xtrain.planner.plan import Plan
from xtrain.planner.schedule.arithmetic import arithmetic_of
from xtrain.planner.schedule.horizon import counted_arithmetic, counted_timeline, waits
from xtrain.planner.schedule.step_sizes import RepeatedSizes
from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.loading.curriculum import Curriculum
from xtrain.runtime.data.loading.order import RowOrder
from xtrain.runtime.data.packing.row_reader import RowReader


@frozen(kw_only=True, eq=False)
class TrainingRows:
    """The rows of a dataset that is trained on, and the order in which they are."""

    name: str
    reader: RowReader
    order: RowOrder

    @classmethod
    def of(cls, name: str, reader: RowReader, seed: int) -> "TrainingRows":
        """Raises DataError if there are no rows."""
        rows, documents = reader.rows, len(reader.documents)
        if not rows.num_rows and documents and rows.num_skipped == documents:
            raise DataError(
                f"dataset {name} has no rows to train on: all of its {documents:,} documents are left out, "
                f"as they are longer than a row of {rows.capacity:,}",
                remedy="Lengthen the rows (`batch.sequence`), or leave out less (`oversized`).",
            )
        return cls(name=name, reader=reader, order=RowOrder(reader.rows.num_rows, seed))


def curriculum_of(plan: Plan, rows: dict[str, int]) -> Curriculum:
    """Which rows every step of a plan takes, from its beginning; `rows` are those that each of its datasets has.

    What is given in epochs becomes shares and steps here. Raises DataError if an epoch has no rows.
    """
    args, phases = plan.node("setup.loader").args, plan.timeline.phases
    for phase in phases:
        if phase.passes is not None and not any(rows[name] for name, epochs in phase.passes.items() if epochs):
            raise DataError("there are no rows to train on", remedy="Check the sources, the hold-out and the packing.")
    batch = counted_arithmetic(plan, rows) if waits(plan) else arithmetic_of(plan)
    timeline = counted_timeline(plan.timeline, batch, rows)
    assert timeline.steps is not None
    return Curriculum(
        datasets=tuple(args["datasets"]),
        phases=timeline.phases,
        steps=timeline.steps,
        rows_per_step=RepeatedSizes(batch.rows, **args["again"]) if "again" in args else batch.row_sizes,
        seed=args["seed"],
        num_rows=rows,
    )
