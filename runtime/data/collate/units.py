"""`Units`: the sequences or pairs of a microbatch, for losses that are divided by their number or look across tokens.

A sequence is a segment; the two sides of a pair are neighbouring segments of a row. One counts only if each of its
segments has a label that a loss is taken at.
"""

# shapes: B rows, S positions of a row that this rank holds, N segments of whole rows, U units, K sides: 1 or 2

from collections.abc import Callable, Sequence
from typing import Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from xtrain.runtime.data.collate.samples import IGNORE_INDEX, Sample
from xtrain.runtime.data.errors import DataError

# The sides of a unit, as samples say theirs.
SIDES: Final = {"sequence": [0], "pair": [0, 1]}


@frozen(kw_only=True, eq=False)
class Units:
    """Segments are numbered over whole rows, so that all ranks that hold positions of a row call them the same.

    segment_BS: int64, the segment of each position. tokens_N: int64, how many of its positions have a label that a loss
    is taken at, on all ranks together. last_N: int64, where this rank has the last token of each, in its rows one after
    the other; −1 of those that another rank has, and of padding. members_KU: int64, the segments of each unit. values:
    name → float64 [U].
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
        """bounds: [N + 1], and real_lengths: [N], as those of a microbatch. samples: what lies in each segment; None:
        padding. names: of the values that are wanted.

        Raises DataError where sides do not follow each other as those of `unit` do, or a value is missing.
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
                f"the loss is of each {unit}, and these rows hold other documents",
                remedy=f"Train on documents that are {unit}s, or choose a loss of their kind.",
            )
        found = [real[first : first + count] for first in range(0, len(real), count)]
        found = [members for members in found if all(counted[number] for number in members)]
        given: dict[str, Tensor] = {}
        for name in names:
            numbers = [sample.values.get(name) for members in found if (sample := samples[members[0]]) is not None]
            if None in numbers:
                raise DataError(f"the loss reads `{name}` of each {unit}, and not every document has it")
            given[name] = torch.tensor(numbers, dtype=torch.float64)
        return cls(
            segment_BS=segment_T.view_as(labels_BS),
            tokens_N=tokens_N,
            last_N=torch.where(real_lengths > 0, bounds[:-1].long() + real_lengths - 1, -1),
            members_KU=torch.tensor(found, dtype=torch.int64).view(-1, count).T.contiguous(),
            values=given,
        )

    @property
    def count(self) -> int:
        return self.members_KU.shape[1]

    @property
    def share_BS(self) -> Tensor:
        """float64: 1 / the labels of the segment of each position; 0 in segments without one."""
        share_N = self.tokens_N.double().reciprocal().masked_fill_(self.tokens_N == 0, 0.0)
        return share_N[self.segment_BS]

    def at(self, index_BS: Tensor) -> "Units":
        """Of these positions of whole rows alone, as indices into the flattened rows."""
        place_T = torch.full((self.segment_BS.numel(),), -1)
        place_T[index_BS.flatten()] = torch.arange(index_BS.numel())
        last_N = torch.where(self.last_N < 0, -1, place_T[self.last_N])
        return evolve(self, segment_BS=self.segment_BS.take(index_BS), last_N=last_N)

    def to(self, device: torch.device) -> "Units":
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def each(self, change: Callable[[Tensor], Tensor]) -> "Units":
        """With every tensor changed."""
        return Units(
            segment_BS=change(self.segment_BS),
            tokens_N=change(self.tokens_N),
            last_N=change(self.last_N),
            members_KU=change(self.members_KU),
            values={name: change(value) for name, value in self.values.items()},
        )

    def part(self, row: int, first: int, end: int) -> "Units":
        """Those of one row, whose segments are `first` to `end`."""
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
        """Of rows one below the other."""
        starts, places = [0], [0]
        for each in rows:
            starts.append(starts[-1] + len(each.tokens_N))
            places.append(places[-1] + each.segment_BS.numel())
        pairs = list(zip(rows, starts, strict=False))
        lasts = [
            torch.where(each.last_N < 0, -1, each.last_N + place) for each, place in zip(rows, places, strict=False)
        ]
        return Units(
            segment_BS=torch.cat([each.segment_BS + start for each, start in pairs]),
            tokens_N=torch.cat([each.tokens_N for each in rows]),
            last_N=torch.cat(lasts),
            members_KU=torch.cat([each.members_KU + start for each, start in pairs], dim=1),
            values={name: torch.cat([each.values[name] for each in rows]) for name in rows[0].values},
        )
