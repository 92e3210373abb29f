"""Packing of documents into rows of a fixed number of training positions: what all packings have in common.

Each is a function `pack` in the module `…_run` of its component. Which rows there are depends on the lengths and the
settings alone, never on the number of threads.
"""

from collections.abc import Callable

import numpy as np

from xtrain.dsl.schema.packings import packing_of
from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.packing.rows import POLICIES, SPLIT, TRUNCATE, Oversized, Rows, check_align, index_type
from xtrain.runtime.ops import code_of

# What a packing gives: `document`, `row_offsets`, `cut_segments` and `cut_starts` of `Rows`, and filled positions.
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
    """Pack documents by a packing, of a spec that names none if `method` is None.

    See the function `pack` of `sequential` for the arguments and for what is raised, and that of `multipack` for
    `group` and `threads`, which mean nothing where documents keep their order.
    """
    packing = packing_of(method)
    module = code_of(packing, packing.run_module())
    return module.pack(document_lengths, capacity, oversized, align, group=group, threads=threads)


def arrays(documents: int, segments: int) -> tuple[np.ndarray, np.ndarray]:
    """`document` [segments] and `row_offsets` [segments + 1], the most that there can be, only their first 0 written.

    Memory that is never written to is never taken.
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
    """As a contiguous array of int32 or int64 that cannot be written to."""
    lengths = np.asarray(document_lengths)
    if lengths.dtype not in (np.int32, np.int64):
        lengths = lengths.astype(np.int64)
    view = np.ascontiguousarray(lengths).view()
    view.flags.writeable = False
    return view
