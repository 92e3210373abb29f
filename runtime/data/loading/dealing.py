"""Which of a step's rows each data rank takes, so that none of them waits long for another; compiled.

Attention costs the sum of the squares of the documents' lengths, which differs from row to row however full they are.
The rows of a step are what they are; only who takes which of them, and in which microbatch, is chosen here, so steps
see the same rows in every layout. Pure arithmetic on the costs of these rows: every rank comes to the same answer.
"""

import numpy as np

from xtrain.runtime.data.jit import kernel
from xtrain.runtime.data.packing.pairs import cut_sides, sides_of
from xtrain.runtime.data.packing.rows import Rows
from xtrain.runtime.data.stores.store import TokenStore


def row_costs(store: TokenStore, documents: np.ndarray, rows: Rows, indices: np.ndarray) -> np.ndarray:
    """The sum of length² over the segments of each of some rows, int64 [indices].

    `documents` int64 says which document of the store each document index in `rows` stands for.
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
    """Indices of the rows of a step, int64 [accumulate, data_ranks, micro], each of them once.

    The ranks wait for each other in every microbatch, so rows of like cost go into the same one: sorted by cost, the
    rows are cut into `accumulate` stretches. Within a stretch the next dearest row goes to the rank that has the least
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
