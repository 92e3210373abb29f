"""Which positions of its rows a context-parallel rank holds.

Attention is causal, so late positions cost more than early ones. Rank r of a ring of R therefore takes the chunks r
and 2R - 1 - r of the 2R equal chunks of every segment, which costs every rank the same (Brandon et al. 2023,
arXiv 2311.09431; per segment as in zhuzilin/ring-flash-attention). The part of a ring rank is then cut contiguously
over its ulysses ranks.
"""

# shapes: B rows, S positions of a whole row

import torch
from attrs import evolve
from torch import Tensor

from xtrain.runtime.data.collate.batch import Microbatch
from xtrain.runtime.data.collate.samples import IGNORE_INDEX
from xtrain.runtime.data.errors import DataError


def zigzag(lengths: Tensor, ring: int, rank: int) -> Tensor:
    """int64 [positions / ring]: what `rank` holds of consecutive segments of the given lengths, in its order.

    Raises DataError if a segment cannot be cut into 2 · ring equal chunks.
    """
    lengths = lengths.to(torch.int64)
    chunks = lengths // (2 * ring)
    if (chunks * (2 * ring) != lengths).any():
        length = int(lengths[chunks * (2 * ring) != lengths][0])
        raise DataError(
            f"a segment of {length} positions cannot be cut into {2 * ring} equal chunks, two for each of {ring} ranks",
            remedy=f"Pad documents to a multiple of {2 * ring} positions.",
        )
    starts = lengths.cumsum(0) - lengths
    early, late = starts + rank * chunks, starts + (2 * ring - 1 - rank) * chunks
    sizes = chunks.repeat_interleave(2)
    shifts = torch.stack((early, late), dim=1).flatten() - (sizes.cumsum(0) - sizes)
    total = int(sizes.sum())
    return shifts.repeat_interleave(sizes, output_size=total).add_(torch.arange(total))


def local_positions(batch: Microbatch, ring: int, ulysses: int, ring_rank: int, ulysses_rank: int) -> Tensor:
    """int64 [B, S / ring / ulysses]: this rank's positions, as indices into the flattened whole rows."""
    rows, sequence = batch.positions_BS.shape
    if sequence % (ring * ulysses):
        raise DataError(f"rows of {sequence} positions cannot be cut evenly over {ring} · {ulysses} ranks")
    ring_part = zigzag(batch.cumulative_lengths.diff(), ring, ring_rank) if ring > 1 else torch.arange(rows * sequence)
    return ring_part.view(rows, ulysses, -1)[:, ulysses_rank]


def local_part(batch: Microbatch, ring: int, ulysses: int, ring_rank: int, ulysses_rank: int) -> Microbatch:
    """The microbatch with this rank's positions only. What speaks of whole rows stays. Raises as `local_positions`."""
    index = local_positions(batch, ring, ulysses, ring_rank, ulysses_rank)
    labels_BS = None if batch.labels_BS is None else batch.labels_BS.take(index)
    return evolve(
        batch,
        input_ids_BS=None if batch.input_ids_BS is None else batch.input_ids_BS.take(index),
        labels_BS=labels_BS,
        positions_BS=batch.positions_BS.take(index),
        real_BS=batch.real_BS.take(index),
        in_row_BS=index % batch.sequence,
        text_BS=None if batch.text_BS is None else batch.text_BS.take(index),
        columns={name: column_BS.flatten(0, 1)[index] for name, column_BS in batch.columns.items()},
        units=None if batch.units is None else batch.units.at(index),
        num_valid=0 if labels_BS is None else int((labels_BS != IGNORE_INDEX).sum()),
    )
