"""`Rows`: which runs of positions of which documents share a row.

A document of n tokens (bos … eos) has n - 1 positions: position i reads token i and is to predict token i + 1.
Every piece of a document can be given room for a multiple of `align` positions, the rest of which is padding.
"""

from functools import cached_property
from hashlib import blake2b
from typing import Final, Literal

import numpy as np
from attrs import define

from xtrain.runtime.data.errors import DataError

Oversized = Literal["split", "truncate", "skip", "error", "truncate_front"]

# What is done with a document longer than a row, as the kernels know it; `error` never reaches them, and with
# `truncate_front` they see none.
SPLIT, TRUNCATE, SKIP = 0, 1, 2
POLICIES: Final[dict[str, int]] = {
    "split": SPLIT, "truncate": TRUNCATE, "skip": SKIP, "error": SKIP, "truncate_front": TRUNCATE
}  # fmt: skip
# From so many things on, their numbers take eight bytes.
MANY = 1 << 31


@define(kw_only=True, frozen=True, eq=False)
class Rows:
    """Packed rows as segments: runs of positions of one document, in flat arrays.

    A segment begins where its document does, unless it is in `cut_segments`, and goes on to the end of its document or
    to the capacity of a row, whichever is first: that is all one needs to know beside the lengths of the documents.
    """

    capacity: int
    """Positions in a row."""
    align: int
    """Every segment takes the next multiple of this many positions of its row."""
    document: np.ndarray
    """int32 (int64 from 2³¹ documents on) [segments]: index into the lengths that were packed."""
    row_offsets: np.ndarray
    """int32 (int64 from 2³¹ segments on) [rows + 1]: row r has the segments row_offsets[r] up to row_offsets[r + 1]."""
    cut_segments: np.ndarray
    """int64 [cuts], ascending: the segments that do not begin at the first position of their document."""
    cut_starts: np.ndarray
    """int64 [cuts]: the position of the document at which each of those begins."""
    num_positions: int
    """Filled positions over all rows."""
    num_truncated: int
    """Documents that lost positions because they have more than a row."""
    num_skipped: int
    """Documents left out whole, because they are longer than a row."""
    num_empty: int
    """Documents left out because they have no position: fewer than two tokens."""
    num_dropped_positions: int
    """Positions lost through truncating or skipping."""

    @property
    def num_rows(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def fill(self) -> float:
        """Filled fraction of all positions; 0 without rows."""
        return self.num_positions / (self.num_rows * self.capacity) if self.num_rows else 0.0

    def starts(self, segments: slice) -> np.ndarray:
        """The first position, in its document, of each of consecutive segments, int64."""
        begin, end, _ = segments.indices(len(self.document))
        starts = np.zeros(max(0, end - begin), dtype=np.int64)
        first, last = np.searchsorted(self.cut_segments, (begin, end))
        starts[self.cut_segments[first:last] - begin] = self.cut_starts[first:last]
        return starts

    def segments(self, document_lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All segments, written out: document, start and number of positions of each, int64 [segments] all three.

        `document_lengths` are those that were packed. Takes 24 bytes a segment: to look at rows, not to read them.
        """
        document = self.document.astype(np.int64)
        start = self.starts(slice(None))
        positions = np.asarray(document_lengths, dtype=np.int64)[document] - 1
        return document, start, np.minimum(positions - start, self.capacity)

    def fingerprint(self) -> str:
        """Hex digest of which positions stand in which row, for the same documents."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = blake2b(f"{self.capacity} {self.align}".encode(), digest_size=16)
        for values in (self.document, self.row_offsets, self.cut_segments, self.cut_starts):
            digest.update(f" {len(values)} ".encode())
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()


def index_type(count: int) -> type[np.int32] | type[np.int64]:
    """What numbers up to `count` are kept as."""
    return np.int32 if count < MANY else np.int64


def check_align(capacity: int, align: int) -> None:
    """Raise DataError unless rows of `capacity` positions can be filled with multiples of `align`."""
    if align < 1 or capacity % align:
        raise DataError(
            f"rows of {capacity} positions cannot hold documents padded to a multiple of {align}",
            remedy=f"Choose rows whose length is a multiple of {align}." if align > 1 else "Choose 1 or more.",
        )
