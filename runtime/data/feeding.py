"""From row numbers to microbatches: rows of a memory-mapped token store through the collate chain."""

from functools import cached_property

import numpy as np
import torch
from attrs import define

from .batch import Microbatch
from .collators import Chain, PackStage, longest_padding, no_room
from .row_reader import RowReader


@define(kw_only=True, frozen=True, eq=False)
class RowFeeder(RowReader):
    """Reads packed rows out of a token store and collates them."""

    collate: Chain

    def microbatch(self, indices: np.ndarray) -> Microbatch:
        """The microbatch of the rows `indices`, int64 [rows], PADDING for an empty one.

        Its tensors are its own: they stay what they are whatever is read later.
        Raises DataError if the samples of a row do not fit into one.
        """
        pack = self._pack
        if pack is None:
            return self.collate([self.row(index) for index in indices.tolist()])
        return self.collate.local_part(self._laid_out(indices, pack))

    @cached_property
    def _pack(self) -> PackStage | None:
        return self.collate.lays_out

    @cached_property
    def _inputs(self) -> tuple:
        """What every call of the kernel reads. It is compiled for arrays that cannot be written to, as files are."""
        rows, store = self.rows, self.store
        packed = (rows.row_offsets, rows.document, rows.cut_segments, rows.cut_starts)
        stored = (self.documents, store.offsets, store.tokens)
        return (*map(_read_only, packed), rows.capacity, *map(_read_only, stored))

    def _laid_out(self, indices: np.ndarray, pack: PackStage) -> Microbatch:
        from .laying import lay_rows

        shape = (len(indices), pack.capacity)
        input_ids, labels, positions = np.empty((3, *shape), dtype=np.int64)
        real = np.empty(shape, dtype=np.bool_)
        bounds, real_lengths = np.empty((2, len(indices) * pack.capacity + 1), dtype=np.int32)
        segments, valid = lay_rows(
            indices, *self._inputs, pack.align, longest_padding(pack.align),
            input_ids, labels, positions, real, bounds, real_lengths,
        )  # fmt: skip
        if segments < 0:
            raise no_room(-1 - segments, valid, pack.capacity)
        return Microbatch(
            input_ids_BS=torch.from_numpy(input_ids),
            labels_BS=torch.from_numpy(labels),
            positions_BS=torch.from_numpy(positions),
            real_BS=torch.from_numpy(real),
            cumulative_lengths=torch.from_numpy(bounds[: segments + 1].copy()),
            real_lengths=torch.from_numpy(real_lengths[:segments].copy()),
            num_valid=valid,
        )


def _read_only(values: np.ndarray) -> np.ndarray:
    view = values.view()
    view.flags.writeable = False
    return view
