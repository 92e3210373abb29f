"""Loaders: from a step number to the microbatches of one data rank, through token stores and the collate chain.

A loader has no changing state: the step is the whole position. `RowLoader` reads training rows, `EvalLoader` hold-out
rows, `TextLoader` questions with their choices.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from attrs import define, evolve, field
from torch import Tensor

from xtrain.runtime.feed.collate import CollateChain, PackStage, longest_padding, no_room
from xtrain.runtime.feed.curriculum import Curriculum, Remarks, TrainingRows, by_key, position_of, state_of
from xtrain.runtime.feed.microbatch import Microbatch
from xtrain.runtime.feed.packing.rows import Rows
from xtrain.runtime.feed.packing.stored_rows import PADDING, UNKNOWN, RawRow, RowReader
from xtrain.runtime.feed.token_store import TokenStore


@define(kw_only=True, frozen=True, eq=False)
class RowFeeder(RowReader):
    """Reader that collates packed rows of a token store."""

    collate: CollateChain

    def microbatch(self, indices: np.ndarray, places: np.ndarray | None = None) -> Microbatch:
        """Return the microbatch of the rows `indices`, int64 [rows], PADDING for an empty one.

        places: int64 [rows], number of rows of the run before each of them; None in evaluation. The tensors own their
        memory: later reads do not change them. Raises DataError if the samples of a row do not fit into one.
        """
        return self.collate.behind_pack([self._collation.packed([(self, indices)], None, places)])[0]

    def whole(self, indices: np.ndarray) -> Microbatch:
        """Return whole packed rows, without the user's collators and without a rank's part."""
        pack = next(stage for stage in self.collate.stages if isinstance(stage, PackStage))
        return _laid_out([(self, indices)], pack, None, None)

    @cached_property
    def _collation(self) -> "_Collation":
        return _Collation(self.collate)

    @cached_property
    def _inputs(self) -> tuple:
        """Constant inputs of the kernel, which is compiled for read-only arrays, as mapped files are."""
        rows, store = self.rows, self.store
        packed = (rows.row_offsets, rows.document, rows.cut_segments, rows.cut_starts)
        stored = (self.documents, store.offsets, store.tokens)
        trained = None if store.trained is None else _read_only(store.trained)
        return (*map(_read_only, packed), rows.capacity, *map(_read_only, stored), trained)


@define(kw_only=True, frozen=True, eq=False)
class MixedFeeder:
    """Reader of packed rows of several datasets into shared microbatches."""

    feeders: tuple[RowFeeder, ...]
    collate: CollateChain

    def microbatches(self, datasets: np.ndarray, indices: np.ndarray, places: np.ndarray) -> list[Microbatch]:
        """Return the microbatches of a step as RowFeeder does; all int64 [microbatches, rows]: the dataset of each row,
        its index there, and its place in the run."""
        packed = [self._packed(*some) for some in zip(datasets, indices, places, strict=True)]
        return self.collate.behind_pack(packed)

    def _packed(self, datasets: np.ndarray, indices: np.ndarray, places: np.ndarray) -> Microbatch:
        if len(self.feeders) == 1:
            return self._collation.packed([(self.feeders[0], indices)], None, places)
        bounds = [0, *(np.flatnonzero(np.diff(datasets)) + 1).tolist(), len(datasets)]
        runs = [(self.feeders[datasets[first]], indices[first:end]) for first, end in pairwise(bounds)]
        return self._collation.packed(runs, datasets, places)

    @cached_property
    def _collation(self) -> "_Collation":
        return _Collation(self.collate)


class _Collation:
    """A collate chain, with its first stages replaced by one pass where that is possible."""

    def __init__(self, collate: CollateChain) -> None:
        self._collate, self._pack = collate, collate.lays_out

    def packed(
        self, runs: list[tuple[RowFeeder, np.ndarray]], datasets: np.ndarray | None, places: np.ndarray | None
    ) -> Microbatch:
        """Collate rows up to `pack`; each of `runs` has consecutive rows of one dataset."""
        if self._pack is not None and all(reader.store.is_plain for reader, _ in runs):
            return _laid_out(runs, self._pack, datasets, places)
        readers = [(reader, index) for reader, indices in runs for index in indices.tolist()]
        row_numbers = [
            [UNKNOWN] * len(readers) if numbers is None else numbers.tolist() for numbers in (datasets, places)
        ]
        rows = [
            reader.row(index, dataset=dataset, position=place)
            for (reader, index), dataset, place in zip(readers, *row_numbers, strict=True)
        ]
        return self._collate.packed(rows)


def _laid_out(
    runs: list[tuple[RowFeeder, np.ndarray]], pack: PackStage, datasets: np.ndarray | None, places: np.ndarray | None
) -> Microbatch:
    from xtrain.runtime.feed.row_kernels import lay_rows

    count, capacity = sum(len(indices) for _, indices in runs), pack.capacity
    input_ids, labels, positions = np.empty((3, count, capacity), dtype=np.int64)
    real = np.empty((count, capacity), dtype=np.bool_)
    bounds, real_lengths = np.empty((2, count * capacity + 1), dtype=np.int32)
    row, segments, valid = 0, 0, 0
    for feeder, indices in runs:
        end = row + len(indices)
        laid, labelled = lay_rows(
            indices, *feeder._inputs, pack.align, longest_padding(pack.align), row * capacity,
            input_ids[row:end], labels[row:end], positions[row:end], real[row:end],
            bounds[segments:], real_lengths[segments:],
        )  # fmt: skip
        if laid < 0:
            raise no_room(row - 1 - laid, labelled, capacity)
        row, segments, valid = end, segments + laid, valid + labelled
    return Microbatch(
        input_ids_BS=torch.from_numpy(input_ids),
        labels_BS=torch.from_numpy(labels),
        positions_BS=torch.from_numpy(positions),
        real_BS=torch.from_numpy(real),
        cumulative_lengths=torch.from_numpy(bounds[: segments + 1].copy()),
        real_lengths=torch.from_numpy(real_lengths[:segments].copy()),
        dataset_B=None if datasets is None else torch.from_numpy(datasets.copy()),
        place_B=None if places is None else torch.from_numpy(places.copy()),
        num_valid=valid,
    )


def _read_only(values: np.ndarray) -> np.ndarray:
    view = values.view()
    view.flags.writeable = False
    return view


@define(eq=False)
class StepRows:
    """Rows that one rank takes in a step; three arrays, int64 [microbatches, micro]."""

    datasets: np.ndarray
    """Dataset number of each row."""
    rows: np.ndarray
    """Row index in that dataset."""
    places: np.ndarray
    """Number of rows that the run has taken before it."""


@define(kw_only=True, eq=False)
class RowLoader:
    """Training microbatches of one data rank.

    Optimizer step s (from 0) takes the next G rows of the curriculum, fewer during a ramp; they make G / (micro ·
    data_ranks) microbatches on each rank. Rows are dealt in order, or so that attention costs all ranks about the same
    (`deal`); a step has the same rows either way.
    """

    datasets: tuple[TrainingRows, ...]
    curriculum: Curriculum
    collate: CollateChain
    micro: int
    """Rows in a microbatch."""
    accumulate: int
    """Microbatches in an optimizer step after the ramp."""
    data_rank: int
    data_ranks: int
    balance: bool = False
    """Deal the rows of a step by the cost of their attention."""
    task_of: tuple[int, ...] = ()
    """Task of each dataset; the rows of a task are adjacent in a microbatch. Empty without tasks."""
    _left: dict[str, dict[str, Any]] = field(factory=dict, init=False)
    """States of datasets that the run was trained on earlier, by name."""

    def __attrs_post_init__(self) -> None:
        assert min(self.micro, self.accumulate) >= 1
        assert 0 <= self.data_rank < self.data_ranks
        sizes = self.curriculum.rows_per_step
        assert sizes.full == self.rows_per_step and sizes.grows_by % (self.micro * self.data_ranks) == 0
        assert self.curriculum.datasets == tuple(dataset.name for dataset in self.datasets)
        assert len({(rows.capacity, rows.align) for rows in (training.reader.rows for training in self.datasets)}) == 1

    @property
    def rows_per_step(self) -> int:
        """Rows per step after the ramp, over all ranks (G)."""
        return self.micro * self.accumulate * self.data_ranks

    def num_microbatches(self, step: int) -> int:
        """Return the number of microbatches that this rank takes in `step`."""
        return self.curriculum.rows_per_step.at(step) // (self.micro * self.data_ranks)

    def step_rows(self, step: int) -> StepRows:
        """Return the rows that this rank takes in `step`."""
        datasets, rows = self.taken(step)
        mine = self._by_cost(datasets, rows) if self.balance else self._in_order[: self.num_microbatches(step)]
        if self.task_of:
            order = np.array(self.task_of)[datasets[mine]].argsort(axis=1, kind="stable")
            mine = np.take_along_axis(mine, order, axis=1)
        return StepRows(datasets[mine], rows[mine], mine + self.curriculum.rows_before(step))

    @cached_property
    def _in_order(self) -> np.ndarray:
        """Rows of a step that this rank takes if they are dealt in order, int64 [accumulate, micro]."""
        places = np.arange(self.rows_per_step, dtype=np.int64)
        return places.reshape(self.accumulate, self.data_ranks, self.micro)[:, self.data_rank]

    def taken(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the dataset of each row of a step, and its index there, both int64 [rows per step]."""
        datasets, cursors = self.curriculum.rows(step)
        if len(self.datasets) == 1:
            return datasets, self.datasets[0].order.rows(int(cursors[0]), len(cursors))
        rows = np.empty_like(cursors)
        for number, dataset in enumerate(self.datasets):
            (own,) = np.nonzero(datasets == number)
            if len(own):
                rows[own] = dataset.order.rows(int(cursors[own[0]]), len(own))
        return datasets, rows

    def _by_cost(self, datasets: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the rows of the step that this rank takes, int64 [microbatches, micro], dealt by cost."""
        from xtrain.runtime.feed.row_kernels import deal, row_costs

        costs = np.empty_like(rows)
        for number, dataset in enumerate(self.datasets):
            own, reader = datasets == number, dataset.reader
            costs[own] = row_costs(reader.store, reader.documents, reader.rows, rows[own])
        count = len(rows) // (self.micro * self.data_ranks)
        return deal(costs, count, self.data_ranks, self.micro)[:, self.data_rank]

    def make_ready(self) -> None:
        """Load compiled code and shuffle now, so that no step waits for it; tokens are not read."""
        self.step_rows(self.curriculum.start.step)
        for feeder in self._feeder.feeders:
            feeder.microbatch(np.full(self.micro, PADDING, dtype=np.int64))

    def microbatches(self, step: int) -> list[Microbatch]:
        """Return the microbatches of optimizer step `step`, from 0."""
        taken = self.step_rows(step)
        return self._feeder.microbatches(taken.datasets, taken.rows, taken.places)

    def rows(self, step: int) -> list[list[RawRow]]:
        """Return the rows of each of these microbatches as they are stored."""
        return self.read(self.step_rows(step))

    def read(self, taken: StepRows) -> list[list[RawRow]]:
        """Return rows as they are stored."""
        several = len(self.datasets) > 1
        readers = [dataset.reader for dataset in self.datasets]
        return [
            [
                readers[dataset].row(row, dataset=dataset if several else UNKNOWN, position=place)
                for dataset, row, place in zip(*(numbers.tolist() for numbers in some), strict=True)
            ]
            for some in zip(taken.datasets, taken.rows, taken.places, strict=True)
        ]

    def row(self, step: int, number: int) -> RawRow:
        """Return a row of a step by its number in the step, whichever rank takes it."""
        datasets, rows = self.taken(step)
        dataset, place = int(datasets[number]), self.curriculum.rows_before(step) + number
        known = dataset if len(self.datasets) > 1 else UNKNOWN
        return self.datasets[dataset].reader.row(int(rows[number]), dataset=known, position=place)

    @cached_property
    def _feeder(self) -> MixedFeeder:
        readers = [dataset.reader for dataset in self.datasets]
        feeders = tuple(
            RowFeeder(store=reader.store, documents=reader.documents, rows=reader.rows, collate=self.collate)
            for reader in readers
        )
        return MixedFeeder(feeders=feeders, collate=self.collate)

    def rows_taken(self, step: int) -> dict[str, int]:
        """Return the number of rows of each dataset that the run has taken before `step`, counting repeats."""
        uses = self.curriculum.uses(step)
        return {dataset.name: uses.get(dataset.name, 0) for dataset in self.datasets}

    def state(self, step: int) -> dict[str, Any]:
        """Return the JSON state from which `step` (the next one) can be resumed exactly."""
        return state_of(self.curriculum, self.datasets, step, self._left)

    def restore(self, state: dict[str, Any], steps: int) -> Remarks:
        """Resume from `state` in a run of `steps` steps; returns the differences between the datasets.

        The checkpoint's phases and rows per step may differ: taken rows stay taken, and the next ones follow this
        curriculum. Raises DataError with every difference that would change the rows due from `state["step"]` on.
        """
        position, remarks = position_of(by_key(state, self.datasets), self.state(self.curriculum.start.step))
        self._left = remarks.left
        self.curriculum = evolve(self.curriculum, start=position, steps=steps)
        return remarks


@define(kw_only=True, frozen=True, eq=False)
class EvalLoader:
    """Held-out rows in order, each once, dealt to data ranks in global batches of micro · data_ranks rows.

    Every rank yields the same number of microbatches, because its peers wait for it in collectives; missing rows are
    padding, which has no valid label.
    """

    store: TokenStore
    documents: np.ndarray
    """int64: document index in `rows` → document of the store."""
    rows: Rows
    collate: CollateChain
    micro: int
    """Rows in a microbatch."""
    data_rank: int
    data_ranks: int
    max_rows: int | None = None
    """Rows to stop after, over all ranks; None for all rows."""

    def __attrs_post_init__(self) -> None:
        assert self.micro >= 1
        assert 0 <= self.data_rank < self.data_ranks

    def __len__(self) -> int:
        """Return the number of microbatches of every rank."""
        return -(-self.num_rows // (self.micro * self.data_ranks))

    @property
    def num_rows(self) -> int:
        """Number of evaluated rows, over all ranks."""
        return self.rows.num_rows if self.max_rows is None else min(self.rows.num_rows, self.max_rows)

    def __iter__(self) -> Iterator[Microbatch]:
        feeder = self._feeder()
        for indices in self._indices():
            yield feeder.microbatch(indices)

    def raw_rows(self) -> Iterator[list[RawRow]]:
        """Yield the rows of each microbatch as they are stored."""
        reader = RowReader(store=self.store, documents=self.documents, rows=self.rows)
        for indices in self._indices():
            yield [reader.row(index) for index in indices.tolist()]

    def _feeder(self) -> RowFeeder:
        return RowFeeder(store=self.store, documents=self.documents, rows=self.rows, collate=self.collate)

    def _indices(self) -> Iterator[np.ndarray]:
        """Yield the rows of each microbatch, int64 [micro]."""
        for batch in range(len(self)):
            first = (batch * self.data_ranks + self.data_rank) * self.micro
            indices = np.arange(first, first + self.micro, dtype=np.int64)
            yield np.where(indices < self.num_rows, indices, PADDING)


@define(kw_only=True, frozen=True, eq=False)
class TextLoader(EvalLoader):
    """Loader of texts that are scored one by one: microbatches have the store's document of each position.

    The user's collators do not run: the stored text is scored.
    """

    def __iter__(self) -> Iterator[Microbatch]:
        feeder = self._feeder()
        for indices in self._indices():
            whole = feeder.whole(indices)
            yield self.collate.local_part(evolve(whole, text_BS=self._texts(whole, indices)))

    def _texts(self, whole: Microbatch, indices: np.ndarray) -> Tensor:
        rows = self.rows
        there = [slice(rows.row_offsets[row], rows.row_offsets[row + 1]) for row in indices.tolist() if row != PADDING]
        documents = np.concatenate([self.documents[rows.document[some]] for some in there] or [np.zeros(1, np.int64)])
        # Every segment begins at its position 0; padding after it counts as the segment before.
        begun_T = ((whole.positions_BS == 0) & whole.real_BS).flatten().cumsum(0)
        return torch.from_numpy(documents)[(begun_T - 1).clamp(min=0)].view_as(whole.positions_BS)
