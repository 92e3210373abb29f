"""Next fit: documents in their order, one open row. Plain Python, which numba compiles where there is much to pack."""

from functools import cache
from typing import Any

import numpy as np

from .rows import SKIP, TRUNCATE


def next_fit(
    lengths: np.ndarray,
    capacity: int,
    align: int,
    policy: int,
    document: np.ndarray,
    ends: np.ndarray,
    cut_segments: np.ndarray,
    cut_starts: np.ndarray,
) -> tuple[int, int, int, int]:
    """Fill `document`, the row ends and the cuts, as `Rows` has them; returns (segments, rows, cuts, positions).

    A document that has no room in the open row closes it. One that is longer than a row closes it too and, if it is
    split, starts afresh; its remainder shares a row with what follows.
    """
    segment, row, cut, positions = 0, 0, 0, 0
    filled = 0  # positions of the open row; 0 means that none is open
    for index in range(len(lengths)):
        remaining = int(lengths[index]) - 1
        if remaining > capacity:
            if policy == SKIP:
                continue
            if policy == TRUNCATE:
                remaining = capacity
        # A full row closes at once, so an open one always has room; a long document closes it to start afresh.
        # Rows and what fills them are multiples of `align`: what fits does so with its padding.
        if filled and remaining > capacity - filled:
            ends[row] = segment
            row += 1
            filled = 0
        first = 0
        while remaining > 0:
            take = min(remaining, capacity)
            document[segment] = index
            if first:
                cut_segments[cut] = segment
                cut_starts[cut] = first
                cut += 1
            segment += 1
            first += take
            remaining -= take
            positions += take
            filled += take if align == 1 else (take + align - 1) // align * align
            if filled == capacity:
                ends[row] = segment
                row += 1
                filled = 0
    if filled:
        ends[row] = segment
        row += 1
    return segment, row, cut, positions


@cache
def compiled() -> Any:
    """`next_fit` in machine code."""
    from ..jit import kernel

    return kernel(next_fit)
