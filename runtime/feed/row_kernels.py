"""Compiled kernels of the loader: assignment of rows to data ranks, and layout of rows as model inputs.

Attention costs the sum of the squares of the documents' lengths, which differs between rows that are equally full.
`deal` balances this cost between ranks and microbatches. It chooses only who takes which row of a step, so steps see
the same rows in every layout. It depends only on the costs of these rows: every rank computes the same result.

`lay_rows` lays out rows of a token store in one pass over memory. The result equals that of the stages `to_tensor`,
`flatten`, `shift_tokens` and `pack` bit for bit; these handle each document in Python.
"""

import numpy as np

from xtrain.runtime.base.jit import kernel
from xtrain.runtime.feed.microbatch import IGNORE_INDEX
from xtrain.runtime.feed.packing.rows import Rows, cut_sides, sides_of
from xtrain.runtime.feed.token_store import TokenStore


def row_costs(store: TokenStore, documents: np.ndarray, rows: Rows, indices: np.ndarray) -> np.ndarray:
    """Return the sum of length² over the segments of each row, int64 [indices].

    documents: int64, document index in `rows` → document of the store.
    """
    costs = np.empty(len(indices), dtype=np.int64)
    if store.firsts is not None:
        for at, index in enumerate(indices):
            pairs = documents[rows.document[rows.row_offsets[index] : rows.row_offsets[index + 1]]]
            costs[at] = sum((side**2).sum() for side in cut_sides(*sides_of(store, pairs), rows.capacity, rows.align))
        return costs
    cuts = (rows.cut_segments, rows.cut_starts)
    _row_costs(indices, rows.row_offsets, rows.document, *cuts, documents, store.offsets, rows.capacity, costs)
    return costs


def deal(costs: np.ndarray, accumulate: int, data_ranks: int, micro: int) -> np.ndarray:
    """Return the indices of the rows of a step, int64 [accumulate, data_ranks, micro], each once.

    The ranks wait for each other in every microbatch, so rows of similar cost go into the same one: sorted by cost, the
    rows are cut into `accumulate` groups. Within a group the next costliest row goes to the rank with the lowest cost
    so far, in this microbatch or else in this step, and room for it (longest processing time first, Graham 1969).
    """
    dealt = np.empty((accumulate, data_ranks, micro), dtype=np.int64)
    _deal(costs, np.argsort(-costs, kind="stable"), dealt)
    return dealt


@kernel
def _row_costs(indices, row_offsets, document, cut_segments, cut_starts, documents, offsets, capacity, costs):
    for at in range(len(indices)):
        cost = np.int64(0)
        first, last = row_offsets[indices[at]], row_offsets[indices[at] + 1]
        cut = np.searchsorted(cut_segments, first)
        for segment in range(first, last):
            index = documents[document[segment]]
            positions = offsets[index + 1] - offsets[index] - 1
            if cut < len(cut_segments) and cut_segments[cut] == segment:
                positions -= cut_starts[cut]
                cut += 1
            positions = min(positions, capacity)
            cost += positions * positions
        costs[at] = cost


@kernel
def _deal(costs, order, dealt):
    accumulate, ranks, micro = dealt.shape
    total = np.zeros(ranks, np.int64)
    for number in range(accumulate):
        spent, filled = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
        for at in range(number * ranks * micro, (number + 1) * ranks * micro):
            best = -1
            for rank in range(ranks):
                if filled[rank] < micro and (
                    best < 0 or spent[rank] < spent[best] or (spent[rank] == spent[best] and total[rank] < total[best])
                ):
                    best = rank
            dealt[number, best, filled[best]] = order[at]
            filled[best] += 1
            spent[best] += costs[order[at]]
            total[best] += costs[order[at]]


@kernel
def lay_rows(
    indices, row_offsets, document, cut_segments, cut_starts, row_capacity, documents, offsets, tokens, trained,
    align, pad_segment, before, ids, labels, positions, real, bounds, real_lengths,
):  # fmt: skip
    """Fill the outputs for some rows (a negative index is a row of padding); returns (segments, labels).

    `row_offsets` … `row_capacity` are fields of `Rows`; `documents` int64 maps its document indices to documents of the
    store; `offsets`, `tokens` and `trained` are fields of the store. Outputs, all contiguous: int64 `ids`, `labels`,
    `positions` and bool `real` [rows, positions]; int32 `bounds` and `real_lengths` with room for a segment per
    position, and one more. Bounds count from `before`: rows of several stores share outputs, one call after the other.
    If the samples of a row do not fit, it returns (-1 - row, positions needed).
    """
    capacity = ids.shape[1]
    segments, valid = 0, 0
    begins, lengths = np.empty(256, np.int64), np.empty(256, np.int64)
    bounds[0] = before
    for row in range(len(indices)):
        filled = 0
        index = indices[row]
        first, last = (row_offsets[index], row_offsets[index + 1]) if index >= 0 else (row_offsets[0], row_offsets[0])
        cut = _first_at_least(cut_segments, first)
        if last - first > len(begins):
            begins, lengths = np.empty(2 * (last - first), np.int64), np.empty(2 * (last - first), np.int64)
        # Documents are far apart in memory. Their places are looked up first, for all of a row, so that these reads
        # overlap instead of each waiting for the copy before it.
        for segment in range(first, last):
            origin = documents[document[segment]]
            begin, end = offsets[origin], offsets[origin + 1]
            if cut < len(cut_segments) and cut_segments[cut] == segment:
                begin += cut_starts[cut]
                cut += 1
            begins[segment - first], lengths[segment - first] = begin, min(end - begin - 1, row_capacity)
        for segment in range(last - first):
            begin, length = begins[segment], lengths[segment]
            room = length if align == 1 else (length + align - 1) // align * align
            if filled + room > capacity:
                return -1 - row, filled + room
            # Slices of one row each: the loops over them need no multiplication and become vector instructions.
            _copy(tokens[begin : begin + length], ids[row, filled : filled + length])
            following = tokens[begin + 1 : begin + 1 + length]
            # Compiled once with masks and once without, so the check costs nothing.
            if trained is None:
                _copy(following, labels[row, filled : filled + length])
                valid += length
            else:
                mask = trained[begin + 1 : begin + 1 + length]
                valid += _copy_trained(following, mask, labels[row, filled : filled + length])
            _count(positions[row, filled : filled + room])
            real[row, filled : filled + length] = True
            _blank(row, filled + length, filled + room, ids, labels, real)
            filled += room
            real_lengths[segments] = length
            segments += 1
            bounds[segments] = before + row * capacity + filled
        _blank(row, filled, capacity, ids, labels, real)
        while filled < capacity:
            room = min(pad_segment, capacity - filled)
            _count(positions[row, filled : filled + room])
            filled += room
            real_lengths[segments] = 0
            segments += 1
            bounds[segments] = before + row * capacity + filled
    return segments, valid


@kernel
def _first_at_least(ascending, value):
    low, high = 0, len(ascending)
    while low < high:
        middle = (low + high) >> 1
        if ascending[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def _copy(source, target):
    for at in range(len(target)):
        target[at] = source[at]


@kernel
def _copy_trained(source, mask, target):
    trained = 0
    for at in range(len(target)):
        target[at] = source[at] if mask[at] else IGNORE_INDEX
        trained += mask[at] != 0
    return trained


@kernel
def _count(target):
    for at in range(len(target)):
        target[at] = at


@kernel
def _blank(row, begin, end, ids, labels, real):
    ids[row, begin:end] = 0
    labels[row, begin:end] = IGNORE_INDEX
    real[row, begin:end] = False
