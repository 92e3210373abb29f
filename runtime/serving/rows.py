"""Texts of clients as the microbatches of a rank.

Shapes: B rows, S positions of a row, T tokens of a text, K targets of a token.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from xtrain.runtime.data.collate.zigzag import zigzag
from xtrain.runtime.models.batch import ModelBatch
from xtrain.runtime.models.document_layout import DocumentLayout
from xtrain.runtime.parallel.axes import Axes
from xtrain.runtime.serving.losses import TARGETS
from xtrain.runtime.state import Rank
from xtrain.server.engine import IGNORED


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


@frozen(kw_only=True)
class RowCut:
    """Which positions of a row a rank computes: all, or those of its place in a ring and in ulysses, dealt as in
    training (`zigzag`). tp: ranks that cut what it has between blocks."""

    tp: int = 1
    ring: int = 1
    ulysses: int = 1
    ring_rank: int = 0
    ulysses_rank: int = 0

    @classmethod
    def of(cls, rank: Rank, axes: Axes) -> "RowCut":
        """As `axes` are now."""
        place, tensor = rank.coordinates, axes.tensor
        return cls(
            tp=tensor.size if tensor is not None and tensor.sequence else 1,
            ring=1 if axes.ring is None else axes.ring.size(),
            ulysses=1 if axes.ulysses is None else axes.ulysses.size(),
            ring_rank=0 if axes.ring is None else place["ring"],
            ulysses_rank=0 if axes.ulysses is None else place["ulysses"],
        )

    @property
    def document(self) -> int:
        """A multiple of which every text has positions."""
        return 2 * self.ring if self.ring > 1 else 1

    @property
    def row(self) -> int:
        """The same of a row."""
        return self.document * self.ulysses * self.tp

    def index(self, bounds: Tensor, rows: int) -> Tensor | None:
        """int64 [B, positions of this rank], places in the flattened rows; None: all of them. bounds: of documents."""
        if self.ring * self.ulysses == 1:
            return None
        total = int(bounds[-1])
        part = zigzag(bounds.diff(), self.ring, self.ring_rank) if self.ring > 1 else torch.arange(total)
        return part.view(rows, self.ulysses, -1)[:, self.ulysses_rank]


WHOLE: Final = RowCut()


def microbatch(
    texts: Sequence[TextRow],
    columns: Sequence[str],
    device: torch.device,
    cut: RowCut = WHOLE,
    spare: int | None = None,
) -> ModelBatch:
    """Each text a row, padded to the longest and to what can be cut; of that this rank's positions. Without texts it is
    a row of padding, of the slot `spare`, so that this rank takes part in what all do together. Without a `spare` slot
    all rows go where the model says."""
    longest = max((len(text.tokens) for text in texts), default=1)
    length = -(-longest // cut.row) * cut.row
    count, wide = max(1, len(texts)), max((text.wide for text in texts), default=1)
    ids_BS = torch.zeros(count, length, dtype=torch.int64)
    labels_BSK = torch.full((count, length, wide), IGNORED, dtype=torch.int64)
    found = {name: torch.zeros(count, length, wide) for name in columns}
    real_BS = torch.zeros(count, length, dtype=torch.bool)
    positions_BS = torch.zeros(count, length, dtype=torch.int64)
    bounds = [0]
    for row in range(count):
        size = -(-len(texts[row].tokens) // cut.document) * cut.document if texts else length
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
    labels_BS, documents = labels_BSK[:, :, 0] if wide == 1 else labels_BSK, torch.tensor(bounds, dtype=torch.int32)
    index_BS = cut.index(documents, count)

    def own(numbers_BS: Tensor) -> Tensor:
        return (numbers_BS if index_BS is None else numbers_BS.flatten(0, 1)[index_BS]).to(device)

    return ModelBatch(
        input_ids_BS=own(ids_BS),
        labels_BS=own(labels_BS),
        positions_BS=own(positions_BS),
        real_BS=own(real_BS),
        in_row_BS=None if index_BS is None else index_BS % length,
        packing=DocumentLayout.from_lengths(documents, count, length, device),
        datasets=None if spare is None else tuple(text.slot for text in texts) or (spare,),
        each=True,
        columns={name: own(column).flatten(1) for name, column in found.items()},
    )


def put_losses(batch: ModelBatch, texts: Sequence[TextRow], logprobs: Tensor) -> None:
    """Fill in what this rank has computed of `logprobs`, of all targets of a request."""
    assert batch.losses_BS is not None
    for row, text in enumerate(texts):
        found_SK = batch.losses_BS[row].detach().double().cpu().view(batch.shape[1], -1)[:, : text.wide]
        at_S = torch.arange(len(found_SK)) if batch.in_row_BS is None else batch.in_row_BS[row]
        real_S = at_S < len(text.tokens)
        logprobs[text.start : text.start + text.targets].view(-1, text.wide)[at_S[real_S]] = -found_SK[real_S]


def _wide(numbers: np.ndarray, size: int) -> Tensor:
    return torch.from_numpy(numbers.copy()).reshape(size, -1)
