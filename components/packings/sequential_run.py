"""Next fit: documents in order, one open row. Plain Python, compiled by numba for large inputs."""

from functools import cache
from typing import Any

import numpy as np

from xtrain.runtime.feed.packing.rows import SKIP, TRUNCATE, Filled, Oversized, Rows, arrays, packed

# Below this, compiling (or reading compiled code) takes longer than running the Python code.
FEW_DOCUMENTS = 10_000


def pack(
    document_lengths: np.ndarray,
    capacity: int,
    oversized: Oversized,
    align: int = 1,
    *,
    group: int = 1,
    threads: int | None = None,
) -> Rows:
    """Pack documents in order: each goes into the open row if it fits; otherwise that row closes and a new one opens.

    `document_lengths` are integers [documents], in tokens, bos and eos included; `capacity` is in positions. `capacity`
    and the room of a document or piece are divisible by `align`. A document of fewer than two tokens has no position
    and is left out. A document with more positions than `capacity` is handled by `oversized`: `split` cuts it into full
    rows of its own, starting with a new row, and packs the remainder like any document; `truncate` keeps its first
    `capacity` positions; `skip` leaves it out; `error` raises. `group` and `threads` are ignored. Time is linear in
    documents + segments; memory beyond the result is a byte per document. Raises DataError for an unknown policy, a
    capacity outside 1 to 2³¹ - 1 or not divisible by `align`, or as `error` requires.
    """

    def fill(lengths: np.ndarray, policy: int, segments: int, cuts: int, regular: bool, most: int) -> Filled:
        document, ends = arrays(len(lengths), segments)
        cut_segments, cut_starts = np.empty(cuts, dtype=np.int64), np.empty(cuts, dtype=np.int64)
        function = next_fit if len(lengths) < FEW_DOCUMENTS else compiled()
        used, rows, cut, positions = function(
            lengths, capacity, align, policy, document, ends[1:], cut_segments, cut_starts
        )  # fmt: skip
        return document[:used], ends[: rows + 1], cut_segments[:cut], cut_starts[:cut], positions

    return packed(document_lengths, capacity, oversized, align, fill)


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
    """Fill `document`, the row ends and the cuts, as in `Rows`; return (segments, rows, cuts, positions).

    A document without room in the open row closes it. A document longer than a row closes it too; if split, it starts a
    new row, and its remainder shares a row with the next documents.
    """
    segment, row, cut, positions = 0, 0, 0, 0
    filled = 0  # positions of the open row; 0: no row is open
    for index in range(len(lengths)):
        remaining = int(lengths[index]) - 1
        if remaining > capacity:
            if policy == SKIP:
                continue
            if policy == TRUNCATE:
                remaining = capacity
        # A full row closes at once, so an open row always has room; a long document closes it and starts a new one.
        # Rows and their contents are divisible by `align`, so a document that fits also fits with its padding.
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
    """Return `next_fit` compiled to machine code."""
    from xtrain.runtime.base.jit import kernel

    return kernel(next_fit)
