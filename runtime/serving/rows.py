"""Texts of clients as the microbatches of a rank.

Shapes: B rows, S positions of a row, T tokens of a text, K targets of a token.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from ...server.engine import IGNORED
from ..models.batch import ModelBatch
from ..models.document_layout import DocumentLayout
from .losses import TARGETS


@frozen(kw_only=True, eq=False)
class TextRow:
    """tokens: int [T]. inputs: what the loss reads, [T] or [T, K]. slot: whose adapter it goes through. start: where
    its targets lie among those of all texts of a request."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]
    slot: int
    start: int

    @property
    def targets(self) -> int:
        return self.inputs[TARGETS].size

    @property
    def wide(self) -> int:
        """Targets of each token."""
        shape = self.inputs[TARGETS].shape
        return 1 if len(shape) == 1 else shape[1]


def shares(texts: Sequence[TextRow], rows: int, data_rank: int, data_ranks: int) -> Iterator[Sequence[TextRow]]:
    """The texts of each microbatch of a data rank: as many microbatches on all of them, some of which may be empty.

    Texts of a slot stay side by side, and neighbours have about the same length.
    """
    ordered = sorted(texts, key=lambda text: (text.slot, -len(text.tokens)))
    step = rows * data_ranks
    for first in range(0, len(ordered), step):
        begin = first + data_rank * rows
        yield ordered[begin : begin + rows]


def microbatch(
    texts: Sequence[TextRow], columns: Sequence[str], multiple: int, device: torch.device, spare: int | None = None
) -> ModelBatch:
    """Each text a row, padded to the longest and to a multiple of so many positions. Without texts it is a row of
    padding, of the slot `spare`, so that this rank takes part in what all do together. Without a `spare` slot all rows
    go where the model says."""
    longest = max((len(text.tokens) for text in texts), default=1)
    length = -(-longest // multiple) * multiple
    count, wide = max(1, len(texts)), max((text.wide for text in texts), default=1)
    ids_BS = torch.zeros(count, length, dtype=torch.int64)
    labels_BSK = torch.full((count, length, wide), IGNORED, dtype=torch.int64)
    found = {name: torch.zeros(count, length, wide) for name in columns}
    real_BS = torch.zeros(count, length, dtype=torch.bool)
    positions_BS = torch.zeros(count, length, dtype=torch.int64)
    bounds = [0]
    for row in range(count):
        size = len(texts[row].tokens) if texts else length
        positions_BS[row, :size] = torch.arange(size)
        positions_BS[row, size:] = torch.arange(length - size)
        bounds += [row * length + size] * (size < length) + [(row + 1) * length]
    for row, text in enumerate(texts):
        size = len(text.tokens)
        ids_BS[row, :size] = torch.from_numpy(text.tokens.astype(np.int64))
        real_BS[row, :size] = True
        labels_BSK[row, :size] = _wide(text.inputs[TARGETS], size).long()
        for name, column in found.items():
            column[row, :size] = _wide(text.inputs[name], size)
    narrow = labels_BSK[:, :, 0] if wide == 1 else labels_BSK
    return ModelBatch(
        input_ids_BS=ids_BS.to(device),
        labels_BS=narrow.to(device),
        positions_BS=positions_BS.to(device),
        real_BS=real_BS.to(device),
        packing=DocumentLayout.from_lengths(torch.tensor(bounds, dtype=torch.int32), count, length, device),
        datasets=None if spare is None else tuple(text.slot for text in texts) or (spare,),
        each=True,
        columns={name: column.flatten(1).to(device) for name, column in found.items()},
    )


def _wide(numbers: np.ndarray, size: int) -> Tensor:
    return torch.from_numpy(numbers.copy()).reshape(size, -1)
