"""Requests of clients on a rank: messages, texts as microbatches, and the losses of the protocol."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.collate import zigzag
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.batch import DocumentLayout, ModelBatch
from xtrain.runtime.nn.loss import Term
from xtrain.server.engine_interface import (
    CISPO,
    CROSS_ENTROPY,
    DRO,
    IGNORED,
    IMPORTANCE_SAMPLING,
    PPO,
    TARGETS,
    LossInput,
    LossOffer,
)


@frozen(kw_only=True, eq=False)
class RankMessage:
    """Request, or the answer to one. arrays: numbers of any shape, by name."""

    name: str
    values: dict[str, Any] = field(factory=dict)
    arrays: dict[str, np.ndarray] = field(factory=dict)

    def pack(self) -> bytes:
        arrays = [[name, array.dtype.str, array.shape, array.tobytes()] for name, array in self.arrays.items()]
        return msgspec.msgpack.encode([self.name, self.values, arrays])

    @classmethod
    def unpack(cls, content: bytes) -> "RankMessage":
        """Decode a message. Raises msgspec.DecodeError or ValueError for content not made by `pack`."""
        name, values, arrays = msgspec.msgpack.decode(content, type=tuple[str, dict[str, Any], list[_Packed]])
        arrays_by_name = {key: np.frombuffer(data, dtype).reshape(shape) for key, dtype, shape, data in arrays}
        return cls(name=name, values=values, arrays=arrays_by_name)


_Packed = tuple[str, str, tuple[int, ...], bytes]


WEIGHTS: Final = "weights"
SAMPLED: Final = "logprobs"
ADVANTAGES: Final = "advantages"
Settings = Mapping[str, Any]
OfTokens = Callable[[Tensor, Mapping[str, Tensor], Settings], Tensor]
"""(log-probabilities of targets, columns, settings) → the loss of each, [T]."""


@frozen(kw_only=True)
class WireLoss:
    """Loss that clients request by name. usual: its settings with their defaults."""

    of_tokens: OfTokens
    columns: tuple[str, ...]
    usual: Mapping[str, float]
    wide: bool = False

    @property
    def offer(self) -> LossOffer:
        inputs = (LossInput(name=TARGETS, integer=True), *(LossInput(name=name) for name in self.columns))
        return LossOffer(inputs=inputs, settings=frozenset(self.usual), wide=self.wide)

    def term(self, settings: Settings) -> Term:
        """Return the term that the head minimizes."""
        chosen = {**self.usual, **settings}

        def function(logprob_T: Tensor, **columns: Tensor) -> Tensor:
            return self.of_tokens(logprob_T, columns, chosen)

        return Term(function, columns=self.columns)

    def sum(self, logprobs: Tensor, columns: Mapping[str, Tensor], settings: Settings) -> float:
        """Return the sum over all targets, from their log-probabilities."""
        return float(self.of_tokens(logprobs, columns, {**self.usual, **settings}).sum())


def _cross_entropy(logprob_T: Tensor, columns: Mapping[str, Tensor], settings: Settings) -> Tensor:
    """Return −log π · weight; the weight may be negative."""
    return -logprob_T * columns[WEIGHTS]


def _ratio(logprob_T: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    return (logprob_T - columns[SAMPLED]).exp()


def _importance_sampling(logprob_T: Tensor, columns: Mapping[str, Tensor], settings: Settings) -> Tensor:
    """Return −ρ A, ρ being the ratio of the present to the sampling probability."""
    return -_ratio(logprob_T, columns) * columns[ADVANTAGES]


def _ppo(logprob_T: Tensor, columns: Mapping[str, Tensor], settings: Settings) -> Tensor:
    """Return −min(ρ A, clip(ρ) A) (arXiv 1707.06347); the thresholds are ratios."""
    ratio_T, advantage_T = _ratio(logprob_T, columns), columns[ADVANTAGES]
    clipped_T = ratio_T.clamp(settings[LOW], settings[HIGH])
    return -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)


def _cispo(logprob_T: Tensor, columns: Mapping[str, Tensor], settings: Settings) -> Tensor:
    """Return −clip(ρ) A log π, the ratio being a weight without gradient (arXiv 2506.13585)."""
    weight_T = _ratio(logprob_T, columns).detach().clamp(settings[LOW], settings[HIGH])
    return -weight_T * columns[ADVANTAGES] * logprob_T


def _dro(logprob_T: Tensor, columns: Mapping[str, Tensor], settings: Settings) -> Tensor:
    """Return −(A log π − β/2 (log ρ)²) (arXiv 2405.19107), of each token."""
    square_T = (logprob_T - columns[SAMPLED]).square()
    return -(columns[ADVANTAGES] * logprob_T - settings[BETA] / 2 * square_T)


LOW: Final = "clip_low_threshold"
HIGH: Final = "clip_high_threshold"
BETA: Final = "beta"
_POLICY: Final = (SAMPLED, ADVANTAGES)
_CLIPPED: Final = {LOW: 0.8, HIGH: 1.2}

LOSSES: Final[dict[str, WireLoss]] = {
    CROSS_ENTROPY: WireLoss(of_tokens=_cross_entropy, columns=(WEIGHTS,), usual={}, wide=True),
    IMPORTANCE_SAMPLING: WireLoss(of_tokens=_importance_sampling, columns=_POLICY, usual={}),
    PPO: WireLoss(of_tokens=_ppo, columns=_POLICY, usual=_CLIPPED),
    CISPO: WireLoss(of_tokens=_cispo, columns=_POLICY, usual=_CLIPPED),
    DRO: WireLoss(of_tokens=_dro, columns=_POLICY, usual={BETA: 0.05}),
}


@frozen(kw_only=True, eq=False)
class TextRow:
    """Text as a row. tokens: int [T]. inputs: of the loss, [T] or [T, K]. slot: of its adapter. start: offset of its
    targets among those of all texts of a request."""

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
    """Yield the texts of each microbatch of a data rank; all data ranks have equally many, some possibly empty.

    Texts of a slot stay together, and neighbors have similar lengths.
    """
    ordered = sorted(texts, key=lambda text: (text.slot, -len(text.tokens)))
    step = rows * data_ranks
    for first in range(0, len(ordered), step):
        begin = first + data_rank * rows
        yield ordered[begin : begin + rows]


@frozen(kw_only=True)
class RowCut:
    """Positions of a row that a rank computes: all, or its shard in the ring and in ulysses, distributed as in training
    (`zigzag`). tp: ranks that shard the sequence between blocks."""

    tp: int = 1
    ring: int = 1
    ulysses: int = 1
    ring_rank: int = 0
    ulysses_rank: int = 0

    @classmethod
    def of(cls, rank: Rank, axes: Axes) -> "RowCut":
        """Return the cut for the present `axes`."""
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
        """Factor by which a text's positions are divisible after padding."""
        return 2 * self.ring if self.ring > 1 else 1

    @property
    def row(self) -> int:
        """Factor by which a row's positions are divisible after padding."""
        return self.document * self.ulysses * self.tp

    def index(self, bounds: Tensor, rows: int) -> Tensor | None:
        """Return int64 [B, positions of this rank], indices into the flattened rows; None for all. bounds: of
        documents."""
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
    """Build a batch with one row for each text, padded to the longest and to a divisible length, with this rank's
    positions. Without texts it is a row of padding for the slot `spare`, so that this rank takes part in
    collectives. Without `spare`, the model chooses the adapter."""
    longest = max((len(text.tokens) for text in texts), default=1)
    length = -(-longest // cut.row) * cut.row
    count, wide = max(1, len(texts)), max((text.wide for text in texts), default=1)
    ids_BS = torch.zeros(count, length, dtype=torch.int64)
    labels_BSK = torch.full((count, length, wide), IGNORED, dtype=torch.int64)
    column_of = {name: torch.zeros(count, length, wide) for name in columns}
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
        for name, column in column_of.items():
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
        columns={name: own(column).flatten(1) for name, column in column_of.items()},
    )


def put_losses(batch: ModelBatch, texts: Sequence[TextRow], logprobs: Tensor) -> None:
    """Fill in this rank's part of `logprobs`, of all targets of a request."""
    assert batch.losses_BS is not None
    for row, text in enumerate(texts):
        found_SK = batch.losses_BS[row].detach().double().cpu().view(batch.shape[1], -1)[:, : text.wide]
        at_S = torch.arange(len(found_SK)) if batch.in_row_BS is None else batch.in_row_BS[row]
        real_S = at_S < len(text.tokens)
        logprobs[text.start : text.start + text.targets].view(-1, text.wide)[at_S[real_S]] = -found_SK[real_S]


def _wide(numbers: np.ndarray, size: int) -> Tensor:
    return torch.from_numpy(numbers.copy()).reshape(size, -1)
