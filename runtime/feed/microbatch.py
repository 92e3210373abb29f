"""Microbatches: packed rows of token segments, as training and evaluation steps take them.

`Sample` is a segment before it is placed in a row, `Microbatch` the packed rows. `Units` are the sequences or pairs of
a microbatch, for losses that are divided by their number or look across tokens. `DocumentSums` are the lengths that
determine the cost of attention.

A sequence is a segment; the two sides of a pair are adjacent segments of a row. A unit counts only if each of its
segments has a label with a loss.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.packing.stored_rows import UNKNOWN

# Label of a position without loss; torch's cross entropy ignores it by default.
IGNORE_INDEX = -100


@define(kw_only=True, frozen=True, eq=False)
class Sample:
    """One segment before it is placed in a row."""

    row: int
    """Row of the microbatch it belongs to."""
    tokens: Tensor
    """int64 [L + 1] as read; int64 [L], the inputs, once there are labels."""
    labels: Tensor | None = None
    """int64 [L], or None before they are made; IGNORE_INDEX for labels without a loss."""
    trained: Tensor | None = None
    """Predicted tokens, bool [L + 1]. None: all of them, or the labels say it."""
    columns: dict[str, Tensor] = field(factory=dict)
    """Numbers per token, by name: [L + 1] as read, or [L + 1, width] for several per token; [L] once there are labels,
    for which they are."""
    values: dict[str, float] = field(factory=dict)
    """Numbers of its document, by name."""
    side: int = 0
    """0 for the preferred side of a pair and without pairs; 1 for the other side, the next sample."""
    dataset: int = UNKNOWN
    """Number of its dataset among the training datasets; UNKNOWN if there is only one, and in evaluation."""
    position: int = UNKNOWN
    """Number of rows of the run before its row; UNKNOWN in evaluation."""


@define(kw_only=True, frozen=True)
class Samples:
    """Samples of a microbatch, in row order; rows without samples count too."""

    num_rows: int
    samples: tuple[Sample, ...]


# shapes: B rows, S positions of a row that this rank holds, N segments of whole rows, U units, K sides: 1 or 2


# Sides of a unit, as in `Sample.side`.
SIDES: Final = {"sequence": [0], "pair": [0, 1]}


@frozen(kw_only=True, eq=False)
class Units:
    """Sequences or pairs of a microbatch. Segments are numbered over whole rows, equally on all ranks of a row.

    segment_BS: int64, segment of each position. tokens_N: int64, number of labels with a loss per segment, on all ranks
    together. last_N: int64, index of each segment's last token in this rank's flattened rows; −1 for those of other
    ranks, and for padding. members_KU: int64, segments of each unit. values: name → float64 [U].
    """

    segment_BS: Tensor
    tokens_N: Tensor
    last_N: Tensor
    members_KU: Tensor
    values: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        unit: str,
        bounds: Tensor,
        real_lengths: Tensor,
        labels_BS: Tensor,
        samples: Sequence[Sample | None],
        names: Sequence[str],
    ) -> "Units":
        """Build the units of whole rows.

        bounds: [N + 1], and real_lengths: [N], as in a microbatch. samples: sample of each segment; None: padding.
        names: of the wanted values. Raises DataError if the order of sides does not fit `unit`, or a value is missing.
        """
        lengths = bounds.diff().long()
        segment_T = torch.arange(len(lengths)).repeat_interleave(lengths, output_size=labels_BS.numel())
        valid_T = (labels_BS != IGNORE_INDEX).flatten()
        tokens_N = torch.zeros(len(lengths), dtype=torch.int64).index_add_(0, segment_T, valid_T.long())
        count, counted = len(SIDES[unit]), tokens_N.tolist()
        real = [number for number, sample in enumerate(samples) if sample is not None]
        sides = [sample.side for sample in samples if sample is not None]
        if sides != SIDES[unit] * (len(real) // count):
            raise DataError(
                f"the loss is per {unit}, but these rows have other documents",
                remedy=f"Train on documents that are {unit}s, or choose a loss of their kind.",
            )
        units = [real[first : first + count] for first in range(0, len(real), count)]
        units = [members for members in units if all(counted[number] for number in members)]
        given: dict[str, Tensor] = {}
        for name in names:
            numbers = [sample.values.get(name) for members in units if (sample := samples[members[0]]) is not None]
            if None in numbers:
                raise DataError(f"the loss reads `{name}` of each {unit}, but not every document has it")
            given[name] = torch.tensor(numbers, dtype=torch.float64)
        return cls(
            segment_BS=segment_T.view_as(labels_BS),
            tokens_N=tokens_N,
            last_N=torch.where(real_lengths > 0, bounds[:-1].long() + real_lengths - 1, -1),
            members_KU=torch.tensor(units, dtype=torch.int64).view(-1, count).T.contiguous(),
            values=given,
        )

    @property
    def count(self) -> int:
        return self.members_KU.shape[1]

    @property
    def share_BS(self) -> Tensor:
        """1 / number of labels of each position's segment, float64; 0 in segments without labels."""
        share_N = self.tokens_N.double().reciprocal().masked_fill_(self.tokens_N == 0, 0.0)
        return share_N[self.segment_BS]

    def at(self, index_BS: Tensor) -> "Units":
        """Return the units with these positions only, given as indices into the flattened whole rows."""
        place_T = torch.full((self.segment_BS.numel(),), -1)
        place_T[index_BS.flatten()] = torch.arange(index_BS.numel())
        last_N = torch.where(self.last_N < 0, -1, place_T[self.last_N])
        return evolve(self, segment_BS=self.segment_BS.take(index_BS), last_N=last_N)

    def trimmed(self, kept_N: Tensor, length: int) -> "Units":
        """Return the units of rows without the padding after `length` positions. kept_N: bool, the segments that
        begin before it."""
        number_N = kept_N.cumsum(0) - 1
        last_N, sequence = self.last_N[kept_N], self.segment_BS.shape[1]
        in_row_N = last_N - last_N.div(sequence, rounding_mode="floor") * (sequence - length)
        return evolve(
            self,
            segment_BS=number_N[self.segment_BS[:, :length]],
            tokens_N=self.tokens_N[kept_N],
            last_N=torch.where(last_N < 0, -1, in_row_N),
            members_KU=number_N[self.members_KU],
        )

    def to(self, device: torch.device) -> "Units":
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def each(self, change: Callable[[Tensor], Tensor]) -> "Units":
        """Apply a function to every tensor."""
        return Units(
            segment_BS=change(self.segment_BS),
            tokens_N=change(self.tokens_N),
            last_N=change(self.last_N),
            members_KU=change(self.members_KU),
            values={name: change(value) for name, value in self.values.items()},
        )

    def part(self, row: int, first: int, end: int) -> "Units":
        """Return the units of one row, with segments `first` to `end`."""
        own_U = (self.members_KU[0] >= first) & (self.members_KU[0] < end)
        last_N = self.last_N[first:end]
        return Units(
            segment_BS=self.segment_BS[row : row + 1] - first,
            tokens_N=self.tokens_N[first:end],
            last_N=torch.where(last_N < 0, -1, last_N - row * self.segment_BS.shape[1]),
            members_KU=self.members_KU[:, own_U] - first,
            values={name: value[own_U] for name, value in self.values.items()},
        )

    @staticmethod
    def joined(rows: Sequence["Units"]) -> "Units":
        """Join the units of rows."""
        starts, places = [0], [0]
        for row in rows:
            starts.append(starts[-1] + len(row.tokens_N))
            places.append(places[-1] + row.segment_BS.numel())
        pairs = list(zip(rows, starts, strict=False))
        lasts = [torch.where(row.last_N < 0, -1, row.last_N + place) for row, place in zip(rows, places, strict=False)]
        return Units(
            segment_BS=torch.cat([row.segment_BS + start for row, start in pairs]),
            tokens_N=torch.cat([row.tokens_N for row in rows]),
            last_N=torch.cat(lasts),
            members_KU=torch.cat([row.members_KU + start for row, start in pairs], dim=1),
            values={name: torch.cat([row.values[name] for row in rows]) for name in rows[0].values},
        )


# shapes: B rows of the microbatch, S positions of a row that this rank holds, T = B · whole positions of a row


@define(kw_only=True, eq=False)
class Microbatch:
    """Rows of packed segments. A segment is a run of positions that attend only to each other.

    Under context parallel a rank holds some positions of every row: tensors [B, S] have these, all else describes whole
    rows. Tokens are None if the rank's pipeline stages need none.
    """

    input_ids_BS: Tensor | None
    """int64."""
    labels_BS: Tensor | None
    """int64: the token to predict at each position, or IGNORE_INDEX."""
    positions_BS: Tensor
    """int64: position within the segment, from 0."""
    real_BS: Tensor
    """bool: True for a token of a document, False for padding of any kind."""
    cumulative_lengths: Tensor
    """int32 [segments + 1]: segment bounds over the T positions of whole rows, none across rows, padding included."""
    real_lengths: Tensor
    """int32 [segments]: number of tokens in each segment; they come first, padding after them."""
    dataset_B: Tensor | None = None
    """int64: number of each row's dataset among the training datasets; None if there is only one."""
    place_B: Tensor | None = None
    """int64: number of rows of the run before each row; None in evaluation."""
    in_row_BS: Tensor | None = None
    """int64: position in the row; None if the rank holds whole rows."""
    text_BS: Tensor | None = None
    """int64: number of each position's text, if texts are scored one by one; arbitrary for padding."""
    num_valid: int
    """Number of labels here that are not IGNORE_INDEX, counted on the host when they are made."""

    columns: dict[str, Tensor] = field(factory=dict)
    """Numbers that the loss reads for each label, float32 or float64 [B, S]; with several per label, int32 or float32
    [B, S, width]."""
    units: Units | None = None
    """Sequences or pairs of whole rows; None if no loss needs them."""

    @property
    def num_units(self) -> int:
        """Number of sequences or pairs with a loss, in whole rows; 0 if no loss needs them."""
        return 0 if self.units is None else self.units.count

    @property
    def sequence(self) -> int:
        """Positions of a whole row."""
        return self.cumulative_lengths.tolist()[-1] // self.positions_BS.shape[0]


def whole_positions(cumulative_lengths: Tensor, real_lengths: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the position within its segment, int64 [T], and whether it has a token, bool [T]; T is `total`."""
    starts, lengths = cumulative_lengths[:-1].long(), cumulative_lengths.diff()
    positions_T = torch.arange(total) - starts.repeat_interleave(lengths, output_size=total)
    return positions_T, positions_T < real_lengths.repeat_interleave(lengths, output_size=total)


def _square(length: int) -> int:
    return length * length


@frozen
class DocumentSums:
    """Sums over segments of rows, which attend only to themselves.

    tokens: positions with tokens of documents. pairs: Σ s² over the s tokens of every segment. laid_pairs: Σ l² over
    the l positions of every segment, including padding and padding segments. Attention with windows has fewer pairs
    (`Work.pairs`). positions: of whole rows, counted only where their lengths differ.
    """

    tokens: int = 0
    pairs: int = 0
    laid_pairs: int = 0
    positions: int = 0

    @classmethod
    def of(cls, microbatches: Sequence[Microbatch], pairs_of: Callable[[int], int] = _square) -> "DocumentSums":
        """Return the sums over whole rows, even if the microbatches have only a rank's part of their positions.

        pairs_of: number of pairs in a segment of a length.
        """
        tokens = pairs = laid_pairs = 0
        for batch in microbatches:
            real = batch.real_lengths.tolist()
            tokens += sum(real)
            pairs += sum(map(pairs_of, real))
            bounds = batch.cumulative_lengths.tolist()
            laid_pairs += sum(pairs_of(last - first) for first, last in pairwise(bounds))
        return cls(tokens, pairs, laid_pairs)
