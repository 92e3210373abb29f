"""From row numbers to microbatches: rows of memory-mapped token stores through the collate chain."""

from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from attrs import define

from xtrain.runtime.data.collate.batch import Microbatch
from xtrain.runtime.data.collate.collators import CollateChain, PackStage, longest_padding, no_room
from xtrain.runtime.data.packing.row_reader import UNKNOWN, RowReader


@define(kw_only=True, frozen=True, eq=False)
class RowFeeder(RowReader):
    """Reads packed rows out of a token store and collates them."""

    collate: CollateChain

    def microbatch(self, indices: np.ndarray, places: np.ndarray | None = None) -> Microbatch:
        """The microbatch of the rows `indices`, int64 [rows], PADDING for an empty one.

        `places` int64 [rows]: rows of the run before each of them, None in evaluation.
        Its tensors are its own: they stay what they are whatever is read later.
        Raises DataError if the samples of a row do not fit into one.
        """
        return self._collation.microbatch([(self, indices)], None, places)

    def whole(self, indices: np.ndarray) -> Microbatch:
        """Whole rows as they are packed: what no collator of the user's own is shown, and no rank has a part of."""
        pack = next(stage for stage in self.collate.stages if isinstance(stage, PackStage))
        return _laid_out([(self, indices)], pack, None, None)

    @cached_property
    def _collation(self) -> "_Collation":
        return _Collation(self.collate)

    @cached_property
    def _inputs(self) -> tuple:
        """What every call of the kernel reads. It is compiled for arrays that cannot be written to, as files are."""
        rows, store = self.rows, self.store
        packed = (rows.row_offsets, rows.document, rows.cut_segments, rows.cut_starts)
        stored = (self.documents, store.offsets, store.tokens)
        trained = None if store.trained is None else _read_only(store.trained)
        return (*map(_read_only, packed), rows.capacity, *map(_read_only, stored), trained)


@define(kw_only=True, frozen=True, eq=False)
class MixedFeeder:
    """Reads the packed rows of several datasets into shared microbatches."""

    feeders: tuple[RowFeeder, ...]
    collate: CollateChain

    def microbatch(self, datasets: np.ndarray, indices: np.ndarray, places: np.ndarray | None = None) -> Microbatch:
        """As that of a RowFeeder; `datasets` int64 [rows] says whose row each of `indices` is."""
        bounds = [0, *(np.flatnonzero(np.diff(datasets)) + 1).tolist(), len(datasets)]
        runs = [(self.feeders[datasets[first]], indices[first:end]) for first, end in pairwise(bounds)]
        return self._collation.microbatch(runs, datasets, places)

    @cached_property
    def _collation(self) -> "_Collation":
        return _Collation(self.collate)


class _Collation:
    """A chain, and the pass that lays rows out in place of its first stages, where they are those it knows."""

    def __init__(self, collate: CollateChain) -> None:
        self._collate, self._pack = collate, collate.lays_out

    def microbatch(
        self, runs: list[tuple[RowFeeder, np.ndarray]], datasets: np.ndarray | None, places: np.ndarray | None
    ) -> Microbatch:
        """`runs`: rows of one dataset each, one behind the other."""
        if self._pack is not None and all(reader.store.is_plain for reader, _ in runs):
            return self._collate.behind_pack(_laid_out(runs, self._pack, datasets, places))
        readers = [(reader, index) for reader, indices in runs for index in indices.tolist()]
        row_numbers = [
            [UNKNOWN] * len(readers) if numbers is None else numbers.tolist() for numbers in (datasets, places)
        ]
        rows = [
            reader.row(index, dataset=dataset, position=place)
            for (reader, index), dataset, place in zip(readers, *row_numbers, strict=True)
        ]
        return self._collate(rows)


def _laid_out(
    runs: list[tuple[RowFeeder, np.ndarray]], pack: PackStage, datasets: np.ndarray | None, places: np.ndarray | None
) -> Microbatch:
    from xtrain.runtime.data.loading.laying import lay_rows

    count, capacity = sum(len(indices) for _, indices in runs), pack.capacity
    input_ids, labels, positions = np.empty((3, count, capacity), dtype=np.int64)
    real = np.empty((count, capacity), dtype=np.bool_)
    bounds, real_lengths = np.empty((2, count * capacity + 1), dtype=np.int32)
    row, segments, valid = 0, 0, 0
    for feeder, indices in runs:
        end = row + len(indices)
        found, labelled = lay_rows(
            indices, *feeder._inputs, pack.align, longest_padding(pack.align), row * capacity,
            input_ids[row:end], labels[row:end], positions[row:end], real[row:end],
            bounds[segments:], real_lengths[segments:],
        )  # fmt: skip
        if found < 0:
            raise no_room(row - 1 - found, labelled, capacity)
        row, segments, valid = end, segments + found, valid + labelled
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
