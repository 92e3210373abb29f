"""Packing of documents into rows of a fixed number of training positions, by one of three methods.

`sequential` keeps the documents' order and has one open row. `multipack` is best-fit-decreasing within groups of
consecutive documents; `best_fit` packs the same rows, which are then dealt to data ranks by what they cost
(`dealing.py`). Which rows there are depends on the lengths and the settings alone, never on the number of threads.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Literal, TypeVar

import numpy as np

from .errors import DataError
from .next_fit import compiled, next_fit
from .rows import POLICIES, SPLIT, Oversized, Rows, check_align

Method = Literal["sequential", "multipack", "best_fit"]

# Below this, compiling (or reading compiled code) takes longer than running the same text in Python.
FEW_DOCUMENTS = 10_000
# Below this many documents a thread, starting it does not pay.
DOCUMENTS_PER_THREAD = 200_000
# Groups from this size on are sorted by halves where they take many rows.
HALVED = 1 << 18

# What a method gives: `document`, `row_offsets`, `cut_segments` and `cut_starts` of `Rows`.
_Filled = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
_T = TypeVar("_T")


def pack_rows(
    document_lengths: np.ndarray,
    capacity: int,
    oversized: Oversized,
    align: int = 1,
    *,
    method: Method,
    group: int,
    threads: int | None = None,
) -> Rows:
    """Pack documents by `method`; `group` is that of `pack_multipack`, and means nothing to `sequential`."""
    if method == "sequential":
        return pack_sequential(document_lengths, capacity, oversized, align)
    return pack_multipack(document_lengths, capacity, oversized, align, group=group, threads=threads)


def pack_sequential(document_lengths: np.ndarray, capacity: int, oversized: Oversized, align: int = 1) -> Rows:
    """Pack documents in their order: each goes into the open row if it fits, else that row closes and one opens.

    `document_lengths` are tokens, bos and eos included, integers [documents]; `capacity` is in positions, a multiple of
    `align`, and so is the room that a document or a piece of one takes. A document of fewer than two tokens has no
    position and is left out. One with more positions than `capacity` is handled by `oversized`:
    `split` cuts it into full rows of its own, the first one fresh, and packs the remainder like any document;
    `truncate` keeps its first `capacity` positions; `skip` leaves it out; `error` raises.
    Time is linear in documents + segments; beyond the result it takes a byte for each document.
    Raises DataError for an unknown policy, a capacity outside 1 to 2³¹ - 1 or no multiple of `align`, or as `error`
    demands.
    """

    def fill(lengths: np.ndarray, policy: int, segments: int, cuts: int) -> _Filled:
        document, ends = _arrays(len(lengths), segments)
        cut_segments, cut_starts = np.empty(cuts, dtype=np.int64), np.empty(cuts, dtype=np.int64)
        function = next_fit if len(lengths) < FEW_DOCUMENTS else compiled()
        used, rows, cut = function(
            lengths, capacity, align, policy, document, ends[1:], cut_segments, cut_starts
        )  # fmt: skip
        return document[:used], ends[: rows + 1], cut_segments[:cut], cut_starts[:cut]

    return _pack(document_lengths, capacity, oversized, align, fill)


def pack_multipack(
    document_lengths: np.ndarray,
    capacity: int,
    oversized: Oversized,
    align: int = 1,
    *,
    group: int,
    threads: int | None = None,
) -> Rows:
    """Pack each `group` of consecutive documents by best-fit-decreasing: rows hold documents of one group only.

    The arguments, and what is raised, are those of `pack_sequential`; the full rows of a split document stand before
    the other rows of its group. A larger group fills rows better (99.99 % at 100,000 documents of usual lengths), a
    smaller one keeps neighbours together. Groups are packed by up to `threads` threads (None: as many as there are
    processors) and the result is the same for any number.
    Working memory, result included: 4 bytes for each document, 2 to 4 for each document of a group that is being
    packed, 4 to 8 for each row.
    """
    assert group >= 1

    def fill(lengths: np.ndarray, policy: int, segments: int, cuts: int) -> _Filled:
        from .best_fit import COLUMNS, FULL, ITEMS, count_groups, pack_groups

        if not len(lengths):
            none = np.empty(0, dtype=np.int64)
            return (*_arrays(0, 0), none, none)
        groups = -(-len(lengths) // group)
        workers = min(
            groups, threads or max(1, min(len(os.sched_getaffinity(0)), len(lengths) // DOCUMENTS_PER_THREAD))
        )
        bounds = [groups * worker // workers for worker in range(workers + 1)]
        spans = list(pairwise(bounds))
        counted = np.empty((groups, COLUMNS), dtype=np.int64)
        # A thread has one table of counts, so that the only group of a thread need not be counted twice.
        tables = {first: np.zeros(capacity + 2, dtype=np.int32) for first, _ in spans}
        _in_threads(lambda a, b: count_groups(lengths, group, a, b, capacity, policy, counted, tables[a]), spans)
        sizes = counted[:, ITEMS] + counted[:, FULL]
        bases = np.cumsum(sizes) - sizes
        document, _ = _arrays(len(lengths), int(sizes.sum()))

        def pack(first: int, last: int) -> _Filled:
            _, ends = _arrays(len(lengths), int(sizes[first:last].sum()))
            room = int(counted[first:last, FULL].sum())
            cut_segments, cut_starts = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64)
            plan = (counted, tables[first], bases)
            # From numpy, which asks for large pages: documents sorted by length go everywhere at once. Half of it may
            # never be touched, and then takes no memory.
            ordered = np.empty(min(group, len(lengths)) + 1, dtype=document.dtype)
            out = (document, ends[1:], cut_segments, cut_starts, ordered)
            rows, cut = pack_groups(lengths, group, first, last, capacity, align, policy, *plan, *out, HALVED)
            return document, ends[: rows + 1], cut_segments[:cut], cut_starts[:cut]

        parts = _in_threads(pack, spans)
        if len(parts) == 1:
            return parts[0]
        ends = np.concatenate([np.zeros(1, dtype=parts[0][1].dtype), *(part[1][1:] for part in parts)])
        cut_segments, cut_starts = (np.concatenate([part[column] for part in parts]) for column in (2, 3))
        return document, ends, cut_segments, cut_starts

    return _pack(document_lengths, capacity, oversized, align, fill)


def _in_threads(work: Callable[[int, int], _T], spans: list[tuple[int, int]]) -> list[_T]:
    """`work` on each span, in their order."""
    if len(spans) <= 1:
        return [work(*span) for span in spans]
    with ThreadPoolExecutor(len(spans)) as pool:  # the kernels let go of the interpreter
        return list(pool.map(lambda span: work(*span), spans))


def _arrays(documents: int, segments: int) -> tuple[np.ndarray, np.ndarray]:
    """`document` [segments] and `row_offsets` [segments + 1], the most that there can be, only their first 0 written.

    Memory that is never written to is never taken.
    """
    document = np.empty(segments, dtype=np.int32 if documents < 1 << 31 else np.int64)
    row_offsets = np.empty(segments + 1, dtype=np.int32 if segments < 1 << 31 else np.int64)
    row_offsets[0] = 0
    return document, row_offsets


def _pack(
    document_lengths: np.ndarray,
    capacity: int,
    oversized: Oversized,
    align: int,
    fill: Callable[[np.ndarray, int, int, int], _Filled],
) -> Rows:
    """What all methods have in common: checks, and the count of what is lost."""
    if oversized not in POLICIES:
        raise DataError(
            f"unknown policy `{oversized}` for long documents", remedy=f"Use one of: {', '.join(POLICIES)}."
        )
    if not 1 <= capacity < 1 << 31:
        raise DataError(f"a row cannot have {capacity} positions")
    check_align(capacity, align)
    lengths = np.asarray(document_lengths)
    if lengths.dtype not in (np.int32, np.int64):
        lengths = lengths.astype(np.int64)
    longer = np.flatnonzero(lengths > capacity + 1)
    if oversized == "error" and len(longer):
        raise DataError(
            f"document {longer[0]} has {lengths[longer[0]] - 1} positions, and a row holds {capacity}"
            f" ({len(longer)} documents are longer than a row)",
            remedy="Lengthen the rows, or choose `split`, `truncate` or `skip` for long documents.",
        )
    empty = np.count_nonzero(lengths < 2)
    positions = lengths[longer].astype(np.int64) - 1
    policy = POLICIES[oversized]
    cuts = int((-(-positions // capacity) - 1).sum()) if policy == SPLIT else 0
    document, row_offsets, cut_segments, cut_starts = fill(lengths, policy, len(lengths) + cuts, cuts)
    lost = int((positions - (capacity if oversized == "truncate" else 0)).sum()) if policy != SPLIT else 0
    without = lengths[lengths < 2].sum(dtype=np.int64) if empty else 0
    total = int(lengths.sum(dtype=np.int64) - without) - (len(lengths) - empty)
    return Rows(
        capacity=capacity,
        align=align,
        document=document,
        row_offsets=row_offsets,
        cut_segments=cut_segments,
        cut_starts=cut_starts,
        num_positions=int(total - lost),
        num_truncated=len(longer) if oversized == "truncate" else 0,
        num_skipped=len(longer) if oversized == "skip" else 0,
        num_empty=int(empty),
        num_dropped_positions=lost,
    )
