"""Packing of documents into rows of a fixed number of training positions, common to all packing methods.

`Rows` records the positions of documents that share a row. A document of n tokens (bos … eos) has n - 1 positions:
position i reads token i and predicts token i + 1. Every piece of a document can be padded to a multiple of `align`
positions. The packing method is a function `pack` in the module `…_run` of its component. The rows depend only on
lengths and settings, never on the number of threads.

The two sides of a pair follow each other in one row, each padded like a document. A pair that is longer than a row is
left out or, with `truncate`, cut: both sides at their ends, to the largest equal number of positions that fits. So a
side that takes half a row or less stays whole while the other side has positions to lose. If a side would lose its
whole answer, or both sides would become equal, the pair is left out.
"""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from hashlib import blake2b
from typing import Final, Literal, TypeVar

import numpy as np
from attrs import define, evolve

from xtrain.dsl.schema.data_components import packing_of
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.base.ops import code_of
from xtrain.runtime.feed.token_store import TokenStore

_T = TypeVar("_T")


def default_threads() -> int:
    """Return the number of threads that this process may keep busy.

    In a run, as many as its matrix products use: `launch.threads`, OMP_NUM_THREADS, or the rank's share of the machine,
    so that ranks of one machine leave each other room. Elsewhere OMP_NUM_THREADS, or the cores.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.get_num_threads()
    setting = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list is for nested teams
    if setting.isdecimal() and int(setting):
        return int(setting)
    return len(os.sched_getaffinity(0))


def in_threads(work: Callable[..., _T], calls: Sequence[tuple]) -> list[_T]:
    """Call `work` with each tuple of arguments in parallel, the first in this thread; returns the results in order.

    It is faster if the work releases the GIL.
    """
    if len(calls) <= 1:
        return [work(*arguments) for arguments in calls]
    with ThreadPoolExecutor(len(calls) - 1) as pool:
        others = [pool.submit(work, *arguments) for arguments in calls[1:]]
        return [work(*calls[0]), *(other.result() for other in others)]


Oversized = Literal["split", "truncate", "skip", "error", "truncate_front"]

# Policies for documents longer than a row, as the kernels take them; `error` never reaches them, and `truncate_front`
# cuts before them.
SPLIT, TRUNCATE, SKIP = 0, 1, 2
POLICIES: Final[dict[str, int]] = {
    "split": SPLIT, "truncate": TRUNCATE, "skip": SKIP, "error": SKIP, "truncate_front": TRUNCATE
}  # fmt: skip
# From this count on, numbers take eight bytes.
MANY = 1 << 31


@define(kw_only=True, frozen=True, eq=False)
class Rows:
    """Packed rows as segments: runs of positions of one document, in flat arrays.

    A segment begins where its document does, unless it is in `cut_segments`, and extends to the end of its document or
    to the capacity of a row, whichever comes first. Together with the documents' lengths this determines the rows.
    """

    capacity: int
    """Positions in a row."""
    align: int
    """Every segment is padded to a multiple of this many positions."""
    document: np.ndarray
    """int32 (int64 from 2³¹ documents on) [segments]: index into the lengths that were packed."""
    row_offsets: np.ndarray
    """int32 (int64 from 2³¹ segments on) [rows + 1]: row r has the segments row_offsets[r] up to row_offsets[r + 1]."""
    cut_segments: np.ndarray
    """int64 [cuts], ascending: the segments that do not begin at the first position of their document."""
    cut_starts: np.ndarray
    """int64 [cuts]: the position of the document at which each of them begins."""
    num_positions: int
    """Filled positions over all rows."""
    num_truncated: int
    """Documents that lost positions because they are longer than a row."""
    num_skipped: int
    """Documents left out because they are longer than a row."""
    num_empty: int
    """Documents left out because they have no position: fewer than two tokens."""
    num_dropped_positions: int
    """Positions lost through truncating or skipping."""
    packed_as: str = ""
    """Fingerprint of the rows before documents were removed; empty if none were."""

    @property
    def num_rows(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def fill(self) -> float:
        """Filled fraction of all positions; 0 without rows."""
        return self.num_positions / (self.num_rows * self.capacity) if self.num_rows else 0.0

    def starts(self, segments: slice) -> np.ndarray:
        """Return the first position, in its document, of each of consecutive segments, int64."""
        begin, end, _ = segments.indices(len(self.document))
        starts = np.zeros(max(0, end - begin), dtype=np.int64)
        first, last = np.searchsorted(self.cut_segments, (begin, end))
        starts[self.cut_segments[first:last] - begin] = self.cut_starts[first:last]
        return starts

    def segments(self, document_lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return document, start and number of positions of all segments, int64 [segments] each.

        `document_lengths` are the packed ones. Takes 24 bytes per segment: for inspection, not for reading rows.
        """
        document = self.document.astype(np.int64)
        start = self.starts(slice(None))
        positions = np.asarray(document_lengths, dtype=np.int64)[document] - 1
        return document, start, np.minimum(positions - start, self.capacity)

    def fingerprint(self) -> str:
        """Return the hex digest of the positions in each row, for the same documents."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = blake2b(f"{self.capacity} {self.align}".encode(), digest_size=16)
        for values in (self.document, self.row_offsets, self.cut_segments, self.cut_starts):
            digest.update(f" {len(values)} ".encode())
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()


def index_type(count: int) -> type[np.int32] | type[np.int64]:
    """Return the integer type for numbers up to `count`."""
    return np.int32 if count < MANY else np.int64


def check_align(capacity: int, align: int) -> None:
    """Raise DataError unless rows of `capacity` positions can be filled with multiples of `align`."""
    if align < 1 or capacity % align:
        raise DataError(
            f"rows of {capacity} positions do not fit documents padded to lengths divisible by {align}",
            remedy=f"Choose a row length divisible by {align}." if align > 1 else "Choose 1 or more.",
        )


# Result of a packing: `document`, `row_offsets`, `cut_segments` and `cut_starts` of `Rows`, and filled positions.
Filled = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]


def pack_rows(
    document_lengths: np.ndarray,
    capacity: int,
    oversized: Oversized,
    align: int = 1,
    *,
    method: str | None = None,
    group: int = 1,
    threads: int | None = None,
) -> Rows:
    """Pack documents by a packing method; None: the default of specs.

    See the function `pack` of `sequential` for the arguments and errors, and of `multipack` for `group` and `threads`,
    which have no effect where documents keep their order.
    """
    packing = packing_of(method)
    module = code_of(packing, packing.run_module())
    return module.pack(document_lengths, capacity, oversized, align, group=group, threads=threads)


def arrays(documents: int, segments: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `document` [segments] and `row_offsets` [segments + 1] of the largest size; only the first offset, 0, is
    set.

    Memory that is never written is never taken.
    """
    document = np.empty(segments, dtype=index_type(documents))
    row_offsets = np.empty(segments + 1, dtype=index_type(segments))
    row_offsets[0] = 0
    return document, row_offsets


def packed(
    document_lengths: np.ndarray,
    capacity: int,
    oversized: Oversized,
    align: int,
    fill: Callable[[np.ndarray, int, int, int, bool, int], Filled],
) -> Rows:
    """Pack by `fill`, with the checks and the count of lost positions that all methods share."""
    if oversized not in POLICIES:
        raise DataError(
            f"unknown policy `{oversized}` for long documents", remedy=f"Use one of: {', '.join(POLICIES)}."
        )
    if not 1 <= capacity < 1 << 31:
        raise DataError(f"a row cannot have {capacity} positions")
    check_align(capacity, align)
    lengths = _read_only(document_lengths)
    shortest, longest = (int(lengths.min()), int(lengths.max())) if len(lengths) else (2, 2)
    longer = np.flatnonzero(lengths > capacity + 1) if longest > capacity + 1 else np.empty(0, dtype=np.int64)
    if oversized == "error" and len(longer):
        raise DataError(
            f"document {longer[0]} has {lengths[longer[0]] - 1} positions, but a row holds {capacity}"
            f" ({len(longer)} documents are longer than a row)",
            remedy="Lengthen the rows, or choose `split`, `truncate` or `skip` for long documents.",
        )
    positions = lengths[longer].astype(np.int64) - 1
    policy = POLICIES[oversized]
    cut_front = oversized == "truncate_front"
    seen = _read_only(np.minimum(lengths, capacity + 1)) if cut_front and len(longer) else lengths
    cuts = int((-(-positions // capacity) - 1).sum()) if policy == SPLIT else 0
    lost = int((positions - (capacity if policy == TRUNCATE else 0)).sum()) if policy != SPLIT else 0
    regular = shortest >= 2 and (cut_front or not len(longer))
    document, row_offsets, cut_segments, cut_starts, filled = fill(
        seen, policy, len(lengths) + cuts, cuts, regular, max(0, min(longest - 1, capacity))
    )
    if cut_front and len(longer):
        cut_segments = np.flatnonzero(lengths[document] > capacity + 1)
        cut_starts = lengths[document[cut_segments]].astype(np.int64) - 1 - capacity
    return Rows(
        capacity=capacity,
        align=align,
        document=document,
        row_offsets=row_offsets,
        cut_segments=cut_segments,
        cut_starts=cut_starts,
        num_positions=int(filled),
        num_truncated=len(longer) if policy == TRUNCATE else 0,
        num_skipped=len(longer) if oversized == "skip" else 0,
        num_empty=int(np.count_nonzero(lengths < 2)) if shortest < 2 else 0,
        num_dropped_positions=lost,
    )


def _read_only(document_lengths: np.ndarray) -> np.ndarray:
    """Return a read-only, contiguous array of int32 or int64."""
    lengths = np.asarray(document_lengths)
    if lengths.dtype not in (np.int32, np.int64):
        lengths = lengths.astype(np.int64)
    view = np.ascontiguousarray(lengths).view()
    view.flags.writeable = False
    return view


def sides_of(store: TokenStore, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the stored positions of the preferred and the other side of pairs, int64 [documents] both."""
    assert store.firsts is not None
    first = store.firsts[documents].astype(np.int64)
    return first - 1, store.lengths_of(documents) - first - 1


def cut_sides(first: np.ndarray, second: np.ndarray, capacity: int, align: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of both sides in a row of `capacity` positions, int64 [pairs] both."""
    room = _room(first, align) + _room(second, align)
    shorter = np.minimum(_room(first, align), _room(second, align))
    limit = np.where(room <= capacity, capacity, np.maximum(capacity // 2 // align * align, capacity - shorter))
    return np.minimum(first, limit), np.minimum(second, limit)


def pack_pairs(
    store: TokenStore,
    documents: np.ndarray,
    capacity: int,
    oversized: Oversized,
    align: int = 1,
    *,
    method: str | None = None,
    group: int = 1,
) -> Rows:
    """Pack the pairs `documents`, int64, of a store; arguments and errors as in `pack_rows`, but without `split`.

    The packing sees a pair as a document with the padded length of both sides.
    """
    first, second = sides_of(store, documents)
    long = _room(first, align) + _room(second, align) > capacity
    if oversized == "error" and long.any():
        which = int(np.flatnonzero(long)[0])
        raise DataError(
            f"pair {documents[which]} has sides of {first[which]:,} and {second[which]:,} positions, but a row holds"
            f" {capacity:,} ({int(long.sum()):,} pairs are longer than a row)",
            remedy="Lengthen the rows, or choose `truncate` or `skip` for long pairs.",
        )
    assert oversized != "split"
    positions = first + second
    if oversized == "truncate":
        cut = cut_sides(first, second, capacity, align)
        left_out = np.zeros(len(documents), dtype=bool)
        for index in np.flatnonzero(long).tolist():
            left_out[index] = not _is_compared(store, documents, index, *cut)
        first, second = cut
    else:
        left_out = long
    room = np.where(left_out, 0, _room(first, align) + _room(second, align))
    rows = pack_rows(room + 1, capacity, "error", align, method=method, group=group)
    filled = int((first + second)[~left_out].sum())
    return evolve(
        rows,
        num_positions=filled,
        num_truncated=int((long & ~left_out).sum()),
        num_skipped=int(left_out.sum()),
        num_empty=0,
        num_dropped_positions=int(positions.sum()) - filled,
    )


def _room(positions: np.ndarray, align: int) -> np.ndarray:
    return -(-positions // align) * align


def _is_compared(store: TokenStore, documents: np.ndarray, index: int, first: np.ndarray, second: np.ndarray) -> bool:
    """Return True if each side has a predicted token in so many positions, and the sides differ."""
    assert store.firsts is not None
    begin = int(store.offsets[documents[index]])
    middle = begin + int(store.firsts[documents[index]])
    sides = [slice(begin, begin + 1 + int(first[index])), slice(middle, middle + 1 + int(second[index]))]
    if np.array_equal(store.tokens[sides[0]], store.tokens[sides[1]]):
        return False
    return store.trained is None or all(bool(store.trained[side][1:].any()) for side in sides)
