"""A microbatch as microbatches of one row each, and back."""

# shapes: B rows of the microbatch

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
from attrs import evolve, fields
from torch import Tensor

from xtrain.runtime.data.collate.batch import Microbatch
from xtrain.runtime.data.collate.samples import IGNORE_INDEX
from xtrain.runtime.data.collate.units import Units

OF_ROWS: Final = tuple(each.name for each in fields(Microbatch) if each.name.endswith(("_B", "_BS")))
"""The tensors of a microbatch whose first dim is its rows."""


def split_rows(batch: Microbatch) -> list[Microbatch]:
    """Each row for itself; tensors are views. Segments do not cross rows, so that none is cut."""
    rows, sequence = batch.positions_BS.shape[0], batch.sequence
    starts = torch.arange(rows + 1, dtype=batch.cumulative_lengths.dtype) * sequence
    cuts = torch.searchsorted(batch.cumulative_lengths, starts).tolist()

    def one(row: int, first: int, end: int) -> Microbatch:
        own = slice(row, row + 1)
        return evolve(
            batch,
            **{name: _part(getattr(batch, name), own) for name in OF_ROWS},
            cumulative_lengths=batch.cumulative_lengths[first : end + 1] - row * sequence,
            real_lengths=batch.real_lengths[first:end],
            columns={name: column_BS[own] for name, column_BS in batch.columns.items()},
            units=None if batch.units is None else batch.units.part(row, first, end),
            num_valid=count_valid(_part(batch.labels_BS, own)),
        )

    return [one(row, first, end) for row, (first, end) in enumerate(pairwise(cuts))]


def join_rows(rows: Sequence[Microbatch]) -> Microbatch:
    """Rows one below the other, as one microbatch with memory of its own."""
    sequence = rows[0].sequence
    bounds = [row.cumulative_lengths[:-1] + number * sequence for number, row in enumerate(rows)]
    end = torch.tensor([len(rows) * sequence], dtype=rows[0].cumulative_lengths.dtype)
    return evolve(
        rows[0],
        **{name: _all([getattr(row, name) for row in rows]) for name in OF_ROWS},
        cumulative_lengths=torch.cat([*bounds, end]),
        real_lengths=torch.cat([row.real_lengths for row in rows]),
        columns={name: torch.cat([row.columns[name] for row in rows]) for name in rows[0].columns},
        units=Units.joined(units) if (units := [row.units for row in rows if row.units is not None]) else None,
        num_valid=sum(row.num_valid for row in rows),
    )


def count_valid(labels_BS: Tensor | None) -> int:
    """Labels that a loss is taken at."""
    return 0 if labels_BS is None else int((labels_BS != IGNORE_INDEX).sum())


def _part(tensor: Tensor | None, rows: slice) -> Tensor | None:
    return None if tensor is None else tensor[rows]


def _all(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """All of them below each other; None if they are not there."""
    found = [tensor for tensor in tensors if tensor is not None]
    assert len(found) in (0, len(tensors)), "rows of one microbatch have the same tensors"
    return torch.cat(found) if found else None
