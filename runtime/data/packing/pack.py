"""Packing of documents into rows of a fixed number of training positions, by one of three methods.

`sequential` keeps the documents' order and has one open row. `multipack` is best-fit-decreasing within groups of
consecutive documents; `best_fit` packs the same rows, which are then dealt to data ranks by what they cost
(`dealing.py`). Which rows there are depends on the lengths and the settings alone, never on the number of threads.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np

from ..errors import DataError
from .next_fit import compiled, next_fit
from .rows import POLICIES, SPLIT, Oversized, Rows, check_align, index_type
from .threads import default_threads

Method = Literal["sequential", "multipack", "best_fit"]

# Below this, compiling (or reading compiled code) takes longer than running the same text in Python.
FEW_DOCUMENTS = 10_000
# Below this many documents a thread, starting it does not pay.
DOCUMENTS_PER_THREAD = 200_000

# What a method gives: `document`, `row_offsets`, `cut_segments` and `cut_starts` of `Rows`, and filled positions.
_Filled = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]


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

    def fill(lengths: np.ndarray, policy: int, segments: int, cuts: int, regular: bool, most: int) -> _Filled:
        document, ends = _arrays(len(lengths), segments)
        cut_segments, cut_starts = np.empty(cuts, dtype=np.int64), np.empty(cuts, dtype=np.int64)
        function = next_fit if len(lengths) < FEW_DOCUMENTS else compiled()
        used, rows, cut, positions = function(
            lengths, capacity, align, policy, document, ends[1:], cut_segments, cut_starts
        )  # fmt: skip
        return document[:used], ends[: rows + 1], cut_segments[:cut], cut_starts[:cut], positions

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
    smaller one keeps neighbours together. Up to `threads` threads work at once (None: `default_threads`), and the
    result is the same for any number.
    Working memory, result included: 4 bytes for each document and for each row, or 8 for each row where threads take
    groups of their own; 2 MiB for each thread, and what tables of lengths and rows with as much room need.
    """
    assert group >= 1

    def fill(lengths: np.ndarray, policy: int, segments: int, cuts: int, regular: bool, most: int) -> _Filled:
        document, nothing = _arrays(len(lengths), segments)
        if not len(lengths):
            none = np.empty(0, dtype=np.int64)
            return document, nothing[:1], none, none, 0
        from .multipack import BLOCK, Task, pack

        task = Task(
            lengths=lengths, group=min(group, len(lengths)), capacity=capacity, align=align, policy=policy, most=most,
            regular=regular, segments=segments, cuts=cuts, block=BLOCK,
        )  # fmt: skip
        workers = threads or max(1, min(default_threads(), len(lengths) // DOCUMENTS_PER_THREAD))
        row_offsets, cut_segments, cut_starts, positions = pack(task, document, workers)
        if len(cut_segments):
            order = np.argsort(cut_segments)
            cut_segments, cut_starts = cut_segments[order], cut_starts[order]
        return document[: row_offsets[-1]], row_offsets, cut_segments, cut_starts, positions

    return _pack(document_lengths, capacity, oversized, align, fill)


def _arrays(documents: int, segments: int) -> tuple[np.ndarray, np.ndarray]:
    """`document` [segments] and `row_offsets` [segments + 1], the most that there can be, only their first 0 written.

    Memory that is never written to is never taken.
    """
    document = np.empty(segments, dtype=index_type(documents))
    row_offsets = np.empty(segments + 1, dtype=index_type(segments))
    row_offsets[0] = 0
    return document, row_offsets


def _pack(
    document_lengths: np.ndarray,
    capacity: int,
    oversized: Oversized,
    align: int,
    fill: Callable[[np.ndarray, int, int, int, bool, int], _Filled],
) -> Rows:
    """What all methods have in common: checks, and the count of what is lost."""
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
            f"document {longer[0]} has {lengths[longer[0]] - 1} positions, and a row holds {capacity}"
            f" ({len(longer)} documents are longer than a row)",
            remedy="Lengthen the rows, or choose `split`, `truncate` or `skip` for long documents.",
        )
    positions = lengths[longer].astype(np.int64) - 1
    policy = POLICIES[oversized]
    cuts = int((-(-positions // capacity) - 1).sum()) if policy == SPLIT else 0
    lost = int((positions - (capacity if oversized == "truncate" else 0)).sum()) if policy != SPLIT else 0
    regular = shortest >= 2 and not len(longer)
    document, row_offsets, cut_segments, cut_starts, filled = fill(
        lengths, policy, len(lengths) + cuts, cuts, regular, max(0, min(longest - 1, capacity))
    )
    return Rows(
        capacity=capacity,
        align=align,
        document=document,
        row_offsets=row_offsets,
        cut_segments=cut_segments,
        cut_starts=cut_starts,
        num_positions=int(filled),
        num_truncated=len(longer) if oversized == "truncate" else 0,
        num_skipped=len(longer) if oversized == "skip" else 0,
        num_empty=int(np.count_nonzero(lengths < 2)) if shortest < 2 else 0,
        num_dropped_positions=lost,
    )


def _read_only(document_lengths: np.ndarray) -> np.ndarray:
    """As a contiguous array of int32 or int64 that cannot be written to."""
    lengths = np.asarray(document_lengths)
    if lengths.dtype not in (np.int32, np.int64):
        lengths = lengths.astype(np.int64)
    view = np.ascontiguousarray(lengths).view()
    view.flags.writeable = False
    return view
