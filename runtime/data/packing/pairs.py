"""Pairs in rows: the two sides of one, behind each other in one row, each padded like a document of its own.

A pair that is longer than a row is left out or, with `truncate`, cut: both sides at their ends, to the same number of
positions, the largest with which they fit. So a side that takes half a row or less stays whole as long as the other one
has positions to lose. If no answer would be left of a side, or both would be the same, the pair is left out.
"""

import numpy as np
from attrs import evolve

from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.packing.pack import pack_rows
from xtrain.runtime.data.packing.rows import Oversized, Rows
from xtrain.runtime.data.stores.store import TokenStore


def sides_of(store: TokenStore, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the preferred and of the other side of pairs as they are stored, int64 [documents] both."""
    assert store.firsts is not None
    first = store.firsts[documents].astype(np.int64)
    return first - 1, store.lengths_of(documents) - first - 1


def cut_sides(first: np.ndarray, second: np.ndarray, capacity: int, align: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions of both sides as they lie in a row of `capacity` positions, int64 [pairs] both."""
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
    """Rows of the pairs `documents`, int64, of a store; arguments and errors as `pack_rows`. `split` is none of them.

    To the packing a pair is a document that takes the room of both sides.
    """
    first, second = sides_of(store, documents)
    long = _room(first, align) + _room(second, align) > capacity
    if oversized == "error" and long.any():
        which = int(np.flatnonzero(long)[0])
        raise DataError(
            f"pair {documents[which]} has sides of {first[which]:,} and {second[which]:,} positions, and a row holds"
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
    """Whether a token of each side is predicted if they have so many positions, and they differ."""
    assert store.firsts is not None
    begin = int(store.offsets[documents[index]])
    middle = begin + int(store.firsts[documents[index]])
    sides = [slice(begin, begin + 1 + int(first[index])), slice(middle, middle + 1 + int(second[index]))]
    if np.array_equal(store.tokens[sides[0]], store.tokens[sides[1]]):
        return False
    return store.trained is None or all(bool(store.trained[side][1:].any()) for side in sides)
