"""Packing of documents into rows of a fixed number of training positions.

A document of n tokens (bos … eos) has n - 1 positions: position i reads token i and is to predict token i + 1.
Every piece of a document can be given room for a multiple of `align` positions, the rest of which is padding.
"""

from hashlib import blake2b
from typing import Literal

import numpy as np
from attrs import define
from numba import njit

from .errors import DataError

Oversized = Literal["split", "truncate", "skip", "error"]

# Codes the compiled kernel understands; `error` never reaches it.
_POLICIES: dict[str, int] = {"split": 0, "truncate": 1, "skip": 2, "error": 2}


@define(kw_only=True, frozen=True, eq=False)
class Rows:
    """Packed rows, as segments: runs of positions of one document, in flat arrays."""

    capacity: int
    """Positions in a row."""
    align: int
    """Every segment takes the next multiple of this many positions of its row."""
    document: np.ndarray
    """int64 [segments]: index into the lengths that were packed."""
    start: np.ndarray
    """int64 [segments]: the segment's first position in its document."""
    length: np.ndarray
    """int32 [segments]: positions in the segment, without padding."""
    row_offsets: np.ndarray
    """int64 [rows + 1]: row r has the segments row_offsets[r] up to row_offsets[r + 1]."""
    num_truncated: int
    """Documents that lost their positions beyond the capacity."""
    num_skipped: int
    """Documents left out whole."""
    num_dropped_positions: int
    """Positions lost through either."""

    @property
    def num_rows(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def num_positions(self) -> int:
        """Filled positions over all rows."""
        return int(self.length.sum(dtype=np.int64))

    @property
    def fill(self) -> float:
        """Filled fraction of all positions; 0 without rows."""
        return self.num_positions / (self.num_rows * self.capacity) if self.num_rows else 0.0

    def fingerprint(self) -> str:
        """Hex digest of which positions stand in which row."""
        digest = blake2b(f"{self.capacity} {self.align}".encode(), digest_size=16)
        for values in (self.document, self.start, self.length, self.row_offsets):
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()


def pack_sequential(document_lengths: np.ndarray, capacity: int, oversized: Oversized, align: int = 1) -> Rows:
    """Pack documents in their order: each goes into the open row if it fits, else that row closes and one opens.

    `document_lengths` are tokens, bos and eos included [documents]; `capacity` is in positions, a multiple of `align`,
    and so is the room that a document or a piece of one takes. A document with more positions than `capacity` is
    handled by `oversized`:
    `split` cuts it into full rows of its own, the first one fresh, and packs the remainder like any document;
    `truncate` keeps its first `capacity` positions; `skip` leaves it out; `error` raises.
    Time and memory are linear in documents + segments.
    Raises DataError for an unknown policy, a capacity outside 1 to 2³¹ - 1 or no multiple of `align`, or as `error`
    demands.
    """
    if oversized not in _POLICIES:
        raise DataError(
            f"unknown policy `{oversized}` for long documents", remedy=f"Use one of: {', '.join(_POLICIES)}."
        )
    if not 1 <= capacity < 1 << 31:
        raise DataError(f"a row cannot have {capacity} positions")
    check_align(capacity, align)
    positions = np.asarray(document_lengths, dtype=np.int64) - 1
    assert positions.size == 0 or positions.min() >= 1, "every document has at least bos and eos"
    longer = positions > capacity
    if oversized == "error" and longer.any():
        index = int(longer.argmax())
        raise DataError(
            f"document {index} has {positions[index]} positions, and a row holds {capacity}"
            f" ({int(longer.sum())} documents are longer than a row)",
            remedy="Lengthen the rows, or choose `split`, `truncate` or `skip` for long documents.",
        )
    most = int((-(-positions // capacity)).sum()) if oversized == "split" else len(positions)
    document = np.empty(most, dtype=np.int64)
    start = np.empty(most, dtype=np.int64)
    length = np.empty(most, dtype=np.int32)
    row_offsets = np.zeros(most + 1, dtype=np.int64)
    segments, rows = _pack(positions, capacity, align, _POLICIES[oversized], document, start, length, row_offsets)
    lost = int((positions[longer] - (capacity if oversized == "truncate" else 0)).sum())
    return Rows(
        capacity=capacity,
        align=align,
        document=document[:segments],
        start=start[:segments],
        length=length[:segments],
        row_offsets=row_offsets[: rows + 1].copy(),
        num_truncated=int(longer.sum()) if oversized == "truncate" else 0,
        num_skipped=int(longer.sum()) if oversized == "skip" else 0,
        num_dropped_positions=lost if oversized in ("truncate", "skip") else 0,
    )


def check_align(capacity: int, align: int) -> None:
    """Raise DataError unless rows of `capacity` positions can be filled with multiples of `align`."""
    if align < 1 or capacity % align:
        raise DataError(
            f"rows of {capacity} positions cannot hold documents padded to a multiple of {align}",
            remedy=f"Choose rows whose length is a multiple of {align}." if align > 1 else "Choose 1 or more.",
        )


@njit(cache=True)
def _pack(
    positions: np.ndarray,
    capacity: int,
    align: int,
    policy: int,
    document: np.ndarray,
    start: np.ndarray,
    length: np.ndarray,
    row_offsets: np.ndarray,
) -> tuple[int, int]:
    """Fill the output arrays; returns (segments, rows)."""
    segment = 0
    row = 0
    filled = 0  # positions of the open row; 0 means that none is open
    for index in range(len(positions)):
        remaining = positions[index]
        first = 0
        if remaining > capacity:
            if policy == 2:
                continue
            if policy == 1:
                remaining = capacity
        # A full row closes at once, so an open one always has room; a long document closes it to start afresh.
        # Rows and what fills them are multiples of `align`: what fits does so with its padding.
        if filled and filled + remaining > capacity:
            row += 1
            row_offsets[row] = segment
            filled = 0
        while remaining > 0:
            take = min(remaining, capacity)
            document[segment] = index
            start[segment] = first
            length[segment] = take
            segment += 1
            first += take
            remaining -= take
            filled += -(-take // align) * align
            if filled == capacity:
                row += 1
                row_offsets[row] = segment
                filled = 0
    if filled:
        row += 1
        row_offsets[row] = segment
    return segment, row
