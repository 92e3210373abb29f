"""Documents by what they leave to fit into rows: counted, and sorted; compiled.

A document of n tokens has n - 1 positions. Longer than a row, it may be cut into full rows, and what is left of it is a
remainder; all others fit in as they are. Counts are unsigned, which spares a loop the question whether an index counts
from the end.
"""

import numpy as np

from xtrain.runtime.data.jit import kernel
from xtrain.runtime.data.packing.rows import SPLIT, TRUNCATE

ONE = np.uint64(1)
# What is counted beside the documents of each size: full rows cut off long documents, and segments that do not begin
# where their document does.
FULL, CUTS = range(2)


@kernel
def remainder(size, capacity, policy):
    """Positions to fit in of a document of `size`, which is more than `capacity`; 0 for none."""
    return size % capacity if policy == SPLIT else capacity if policy == TRUNCATE else 0


@kernel
def size_of(length, beyond):
    """Positions of a document of so many tokens, uint64; `beyond` for all with as many or more, or without a token."""
    return min(np.uint64(np.int64(length) - 1), np.uint64(beyond))


@kernel
def count(lengths, capacity, policy, sizes, remainders, extra):
    """Count documents by what they leave to fit in.

    `sizes` and `remainders` [capacity + 2], all 0, get the number of documents, and of remainders of long ones, with
    each number of positions; remainders[0] those that leave nothing, and sizes[capacity + 1] the documents that are
    longer than a row, or have no token. `extra` gets FULL and CUTS.
    """
    beyond = capacity + 1
    for index in range(len(lengths)):
        sizes[size_of(lengths[index], beyond)] += ONE
    full, cuts = np.int64(0), np.int64(0)
    if sizes[beyond]:
        for index in range(len(lengths)):
            size = np.int64(lengths[index]) - 1
            if size > capacity:
                rest = remainder(size, capacity, policy)
                remainders[rest] += ONE
                if policy == SPLIT:
                    full += size // capacity
                    cuts += size // capacity - (rest == 0)
    extra[FULL], extra[CUTS] = full, cuts


@kernel
def count_segments(lengths, capacity, policy):
    """Segments that documents are placed as, and those of them that do not begin where their document does."""
    segments, cuts = np.int64(0), np.int64(0)
    for index in range(len(lengths)):
        size = np.int64(lengths[index]) - 1
        if size <= capacity:
            segments += size > 0
        elif policy == SPLIT:
            segments += (size + capacity - 1) // capacity
            cuts += (size + capacity - 1) // capacity - 1
        else:
            segments += remainder(size, capacity, policy) > 0
    return segments, cuts


@kernel
def sort(lengths, first, beyond, most, ends, ordered):
    """Sort documents, numbered from `first`, by what they leave to fit in.

    `ends` [beyond + 1] are the documents of each size, counted by `size_of`, of which only 0 … `most` and `beyond` may
    occur. `ordered` gets their numbers: those beyond, then from the longest to the shortest, and at last
    those without a position, in ascending order in each of them; `ends` becomes where each size ends.
    """
    begin = np.uint64(ends[beyond])
    ends[beyond] = 0
    for size in range(most, 0, -1):
        here = ends[size]
        ends[size] = begin
        begin += here
    ends[0] = begin
    for index in range(len(lengths)):
        size = size_of(lengths[index], beyond)
        at = ends[size]
        ordered[at] = first + index
        ends[size] = at + ONE
