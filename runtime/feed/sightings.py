"""Steps in which documents were trained on, in closed form from the plan, the resumes of a run and its packed rows.

Without torch. Memory: 8 bytes for each row of a dataset (the order of an epoch), and the result.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Final

import numpy as np
from attrs import evolve, field, frozen

from xtrain.plan.arithmetic import Arithmetic
from xtrain.plan.learning_rate import computed, learning_rate
from xtrain.plan.plan import Plan
from xtrain.plan.step_sizes import RepeatedSizes
from xtrain.plan.timeline import counted_arithmetic
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.curriculum import (
    Curriculum,
    TrainingRows,
    by_key,
    counted_from,
    curriculum_of,
    position_of,
    state_of,
)
from xtrain.runtime.feed.packing.stored_rows import RowReader
from xtrain.runtime.feed.prepared import PreparedDataset

_AT_ONCE: Final = 1 << 20


@frozen(kw_only=True)
class Sightings:
    """Places where documents of a dataset were trained on, int64 [sightings] each, in the order of steps."""

    steps: np.ndarray
    """Counted from 1, as in logs."""
    documents: np.ndarray
    rows: np.ndarray


@frozen(kw_only=True, eq=False)
class Stretch:
    """Consecutive steps of a run under one plan: those from `first` up to `end`, counted from 0."""

    plan: Plan
    first: int
    end: int
    prepared: Mapping[str, PreparedDataset]
    datasets: tuple[TrainingRows, ...]
    curriculum: Curriculum
    batch: Arithmetic
    left: Mapping[str, Any] = field(factory=dict)
    """Data states of datasets that are no longer trained on."""

    @classmethod
    def begin(cls, plan: Plan, prepared: Mapping[str, PreparedDataset]) -> "Stretch":
        """Return the whole run of a plan from its beginning. Raises DataError if a dataset has no rows."""
        loader = plan.node("setup.loader").args
        datasets = tuple(
            TrainingRows.of(name, prepared[name].parts["training"], loader["seed"]) for name in loader["datasets"]
        )
        counts = {dataset.name: dataset.order.num_rows for dataset in datasets}
        curriculum = curriculum_of(plan, counts)
        return cls(
            plan=plan,
            first=0,
            end=curriculum.steps,
            prepared=prepared,
            datasets=datasets,
            curriculum=curriculum,
            batch=counted_arithmetic(plan, counts),
        )

    def state(self, step: int) -> dict[str, Any]:
        """Return the data state of the run before a step, as a checkpoint has it."""
        return state_of(self.curriculum, self.datasets, step, self.left)

    def resumed(self, before: "Stretch", step: int, data_step: int) -> "Stretch":
        """Return this run from its beginning as the run that resumes at `step` with the rows that follow step
        `data_step` of `before`. Raises DataError if its data is other data."""
        state = by_key({**before.state(data_step), "step": step}, self.datasets)
        position, remarks = position_of(state, self.state(0))
        counts = {dataset.name: dataset.order.num_rows for dataset in self.datasets}
        curriculum = evolve(self.curriculum, start=position)
        past = before.batch.row_sizes
        curriculum, batch, _ = counted_from(curriculum, self.plan.timeline, self.batch, past, counts)
        return evolve(
            self, first=step, end=curriculum.steps, curriculum=curriculum, batch=batch, left=dict(remarks.left)
        )

    def check(self, state: dict[str, Any]) -> None:
        """Compare a checkpoint's data state with the computed one. Raises DataError if they differ."""
        now = self.state(state["step"])
        position, _ = position_of(by_key(state, self.datasets), now)
        own = self.curriculum.position(state["step"])
        names = self.curriculum.datasets
        if position.rows != own.rows or any(position.cursors.get(n, 0) != own.cursors.get(n, 0) for n in names):
            raise DataError(
                f"the checkpoint of step {state['step']:,} was saved after {position.rows:,} rows, and the records of "
                f"the run's starts give {own.rows:,}",
                remedy="The records in events.jsonl are incomplete: which rows were trained on cannot be said.",
            )

    @cached_property
    def _rates(self) -> Any:
        args = self.plan.node("setup.scheduler").args
        return learning_rate(args, self.batch, self.curriculum.phases) if computed(args) else None

    def rate(self, step: int) -> float | None:
        """Return the learning rate of a step, from 0; None if the schedule depends on the course of the run."""
        return None if self._rates is None else self._rates(step)

    def sightings(self, name: str, documents: np.ndarray) -> Iterator[Sightings]:
        """Yield where documents, int64, of the store of a training dataset are trained on, an epoch at a time."""
        number = self.curriculum.datasets.index(name)
        dataset = self.datasets[number]
        rows, held = rows_of(dataset.reader, np.unique(documents))
        wanted = np.unique(rows)
        if not len(wanted) or self.first >= self.end:
            return
        taken = self._repeated(number, wanted) if self._repeats else self._once(name, dataset, wanted)
        for steps, found in taken:
            # Each row with all its documents.
            begin, end = np.searchsorted(rows, found, "left"), np.searchsorted(rows, found, "right")
            counts = end - begin
            places = np.repeat(begin - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
            yield Sightings(steps=np.repeat(steps, counts) + 1, documents=held[places], rows=np.repeat(found, counts))

    @property
    def _repeats(self) -> bool:
        return isinstance(self.curriculum.rows_per_step, RepeatedSizes)

    def _once(self, name: str, dataset: TrainingRows, wanted: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (steps, rows) of rows that each step takes once, an epoch at a time."""
        order, (begin, end) = dataset.order, (self._cursor(name, step) for step in (self.first, self.end))
        for epoch in range(begin // order.num_rows, -(-end // order.num_rows)):
            permutation = order.permutation(epoch)
            for first in range(0, len(permutation), _AT_ONCE):
                some = permutation[first : first + _AT_ONCE]
                places = np.flatnonzero(np.isin(some, wanted))
                cursors = epoch * order.num_rows + first + places
                inside = (cursors >= begin) & (cursors < end)
                if inside.any():
                    cursors, rows = cursors[inside], some[places[inside]]
                    yield self._steps(name, cursors), rows

    def _repeated(self, number: int, wanted: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (steps, rows) of steps that may take the rows of earlier steps again."""
        for step in range(self.first, self.end):
            datasets, cursors = self.curriculum.rows(step)
            own = cursors[datasets == number]
            rows = self.datasets[number].order.rows(int(own[0]), len(own)) if len(own) else own
            rows = rows[np.isin(rows, wanted)]
            if len(rows):
                yield np.full(len(rows), step), rows

    def _cursor(self, name: str, step: int) -> int:
        return self.curriculum.position(step).cursors.get(name, 0)

    def _steps(self, name: str, cursors: np.ndarray) -> np.ndarray:
        """Return the step that takes each of some rows, given as ascending positions in the order of the dataset."""
        steps = np.empty(len(cursors), dtype=np.int64)
        # (first and last step, first and last row) still to be divided.
        open_ranges = [(self.first, self.end, 0, len(cursors))]
        while open_ranges:
            low, high, begin, end = open_ranges.pop()
            if begin == end:
                continue
            if high - low == 1:
                steps[begin:end] = low
                continue
            middle = (low + high) // 2
            cut = begin + int(np.searchsorted(cursors[begin:end], self._cursor(name, middle), "left"))
            open_ranges += [(low, middle, begin, cut), (middle, high, cut, end)]
        return steps


def rows_of(reader: RowReader, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that have tokens of some documents, ascending, and the document of each, int64 [pairs] both.

    A row that has several pieces of a document counts once. documents: int64, ascending.
    """
    rows = reader.rows
    found: list[np.ndarray] = [np.empty((0, 2), dtype=np.int64)]
    for first in range(0, len(rows.document), _AT_ONCE):
        held = reader.documents[rows.document[first : first + _AT_ONCE]]
        places = np.flatnonzero(np.isin(held, documents))
        row = np.searchsorted(rows.row_offsets, first + places, side="right") - 1
        found.append(np.stack([row, held[places]], axis=1))
    pairs = np.unique(np.concatenate(found), axis=0)
    return pairs[:, 0], pairs[:, 1]
