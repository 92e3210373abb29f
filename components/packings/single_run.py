"""A row for each document."""

import numpy as np

from xtrain.runtime.feed.packing.rows import SPLIT, TRUNCATE, Filled, Oversized, Rows, arrays, packed


def pack(
    document_lengths: np.ndarray,
    capacity: int,
    oversized: Oversized,
    align: int = 1,
    *,
    group: int = 1,
    threads: int | None = None,
) -> Rows:
    """Put each document, and each piece of a split document, into a row of its own.

    Arguments and errors are those of `sequential`; `group` and `threads` are ignored.
    """

    def fill(lengths: np.ndarray, policy: int, segments: int, cuts: int, regular: bool, most: int) -> Filled:
        positions = np.maximum(lengths.astype(np.int64) - 1, 0)
        pieces = -(-positions // capacity)
        if policy != SPLIT:
            pieces = np.where(positions > capacity, int(policy == TRUNCATE), np.minimum(pieces, 1))
        used = int(pieces.sum())
        document, ends = arrays(len(lengths), used)
        document[:] = np.repeat(np.arange(len(lengths)), pieces)
        ends[:] = np.arange(used + 1)
        starts = (np.arange(used) - np.repeat(pieces.cumsum() - pieces, pieces)) * capacity
        (cut_segments,) = np.nonzero(starts)
        filled = int(np.minimum(positions[document] - starts, capacity).sum())
        return document, ends, cut_segments, starts[cut_segments], filled

    return packed(document_lengths, capacity, oversized, align, fill)
