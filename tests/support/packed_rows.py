"""Packed rows written out, and the rules of packing again, written for reading."""

from itertools import pairwise
from math import ceil

import numpy as np

from xtrain.runtime.feed.packing.rows import Rows

Segment = tuple[int, int, int]


def row_segments(rows: Rows, lengths: list[int]) -> list[list[Segment]]:
    """(document, start, positions) of the segments of each row."""
    segments = list(zip(*(values.tolist() for values in rows.segments(np.array(lengths, np.int64))), strict=True))
    bounds = rows.row_offsets.tolist()
    assert (bounds[0], bounds[-1]) == (0, len(segments))
    assert rows.num_positions == sum(length for *_, length in segments)
    return [segments[a:b] for a, b in pairwise(bounds)]


def room(positions: int, align: int) -> int:
    return ceil(positions / align) * align


def plain_next_fit(lengths: list[int], capacity: int, oversized: str, align: int = 1) -> list[list[Segment]]:
    """Closed rows and one open row."""
    closed: list[list[Segment]] = []
    open_row: list[Segment] = []
    for document, tokens in enumerate(lengths):
        positions, start = tokens - 1, 0
        if positions < 1 or (positions > capacity and oversized == "skip"):
            continue
        if positions > capacity and oversized == "truncate":
            positions = capacity
        if sum(room(length, align) for *_, length in open_row) + room(positions, align) > capacity:
            closed.append(open_row)
            open_row = []
        while positions - start > capacity:
            closed.append([(document, start, capacity)])
            start += capacity
        open_row.append((document, start, positions - start))
    return [row for row in [*closed, open_row] if row]


def items_of(lengths: list[int], capacity: int, oversized: str, align: int) -> tuple[list[int], int]:
    """What is to be fitted in, in multiples of `align`, and how many full rows are cut off first."""
    items, full = [], 0
    for positions in (tokens - 1 for tokens in lengths if tokens > 1):
        if positions > capacity:
            if oversized == "skip":
                continue
            full += positions // capacity if oversized == "split" else 0
            positions = positions % capacity if oversized == "split" else capacity
        if positions:
            items.append(room(positions, align) // align)
    return items, full


def plain_first_fit(items: list[int], capacity: int) -> list[int]:
    """What is left in each row."""
    left: list[int] = []
    for item in items:
        row = next((row for row, rest in enumerate(left) if rest >= item), None)
        if row is None:
            left.append(capacity - item)
        else:
            left[row] -= item
    return left


def plain_best_fit_decreasing(items: list[int], capacity: int) -> list[int]:
    """What is left in each row, ascending."""
    left: list[int] = []
    for item in sorted(items, reverse=True):
        fits = [rest for rest in left if rest >= item]
        if fits:
            left.remove(min(fits))
            left.append(min(fits) - item)
        else:
            left.append(capacity - item)
    return sorted(left)
