"""Documents into the rows that were planned for their lengths; compiled.

A plan says how many documents of a length go where, in placements; the documents of a length take them in their order.
So a part of the documents can be placed as soon as it is known how many of each length come before: block by block,
which keeps what is sorted in the processor's cache, and by several threads.
"""

import numpy as np

from xtrain.runtime.data.jit import kernel
from xtrain.runtime.data.packing.best_fit import EACH, EARLIER, FIRST, ROWS
from xtrain.runtime.data.packing.counting import ONE, remainder, size_of, sort
from xtrain.runtime.data.packing.rows import SPLIT


@kernel
def begin(number, sizes, remainders, align, most, begins, placements, places, later):
    """Where range `number` of documents begins to place those of each size, and their remainders.

    `sizes` and `remainders` [ranges, capacity + 2] are the counts of all ranges, `begins` the first placement of each
    length in units of `align`. Documents of as many units take turns: longer ones before shorter ones, those that
    fit as they are before remainders, in their order each. `places` and `later` [capacity + 2, 2] get the placement
    and the documents placed in it before, for documents as they are and for remainders.
    """
    long = np.int64(0)
    for part in range(len(sizes)):
        long += np.int64(sizes[part, -1])
    if number == 0 and align == 1 and not long:
        for size in range(1, most + 1):
            places[size, 0], places[size, 1] = begins[size], 0
        return
    at, done = np.int64(0), np.int64(0)
    for size in range(most, 0, -1):
        for table, cursors in ((sizes, places), (remainders, later)):
            for part in range(len(table)):
                if part == number:
                    cursors[size, 0], cursors[size, 1] = at, done
                done += np.int64(table[part, size])
                while done and done >= np.int64(placements[at, ROWS]) * np.int64(placements[at, EACH]):
                    done -= np.int64(placements[at, ROWS]) * np.int64(placements[at, EACH])
                    at += 1


@kernel
def place(
    lengths, first, capacity, policy, most, sizes, places, later, placements, offsets, document,
    segment, cuts, starts, ends, ordered,
):  # fmt: skip
    """Write the documents of a range, the first of which is number `first`, to where the plan has them.

    `sizes` are its counts, `places` and `later` what `begin` gave. `offsets` [rows + 1] are where the planned rows
    begin in `document`, and full rows of long documents begin at `segment` of it. For every segment that does not begin
    at the first position of its document, its number goes to `cuts` and its begin to `starts`. `ends` [capacity + 2]
    and `ordered` are memory to work in; as many documents as `ordered` holds are sorted at once.
    """
    beyond, noted = capacity + 1, 0
    for block in range(0, len(lengths), len(ordered)):
        some = lengths[block : block + len(ordered)]
        alone = len(some) == len(lengths)
        for size in range(most + 1):
            ends[size] = sizes[size] if alone else 0
        ends[beyond] = sizes[beyond] if alone else 0
        if not alone:
            for index in range(len(some)):
                ends[size_of(some[index], beyond)] += ONE
        sort(some, first + block, beyond, most, ends, ordered)
        begin = np.int64(ends[beyond])
        for at in range(begin):
            size = np.int64(lengths[ordered[at] - first]) - 1
            if size <= capacity:  # it has no token at all
                continue
            if policy == SPLIT:
                for piece in range(size // capacity):
                    document[segment] = ordered[at]
                    if piece:
                        cuts[noted], starts[noted] = segment, piece * capacity
                        noted += 1
                    segment += 1
            rest = remainder(size, capacity, policy)
            if rest:
                there = _lay(ordered, at, at + 1, placements, later, rest, offsets, document)
                if policy == SPLIT:
                    cuts[noted], starts[noted] = there, size - rest
                    noted += 1
        for size in range(most, 0, -1):
            end = np.int64(ends[size])
            if begin < end:
                _lay(ordered, begin, end, placements, places, size, offsets, document)
            begin = end


@kernel
def _lay(ordered, begin, end, placements, cursors, size, offsets, document):
    """Write ordered[begin:end], documents of one size, from where its cursor stands on; the place of the first one."""
    at, done = np.int64(cursors[size, 0]), np.int64(cursors[size, 1])
    there, taken = np.int64(-1), begin
    while taken < end:
        first, rows = np.int64(placements[at, FIRST]), np.int64(placements[at, ROWS])
        each, earlier = np.int64(placements[at, EACH]), np.int64(placements[at, EARLIER])
        if each == 1:  # most often, and twice as fast without a loop in the loop
            here = min(end - taken, rows - done)
            if taken == begin:
                there = offsets[first + done] + earlier
            for number in range(here):
                to = np.uint64(offsets[np.uint64(first + done + number)] + earlier)
                document[to] = ordered[np.uint64(taken + number)]
        else:
            here = min(end - taken, rows * each - done)
            row, within = first, np.int64(0)
            if done:
                row, within = first + done // each, done % each
            if taken == begin:
                there = offsets[row] + earlier + within
            item, stop = taken, taken + here
            while item < stop:
                to = np.int64(offsets[np.uint64(row)]) + earlier + within
                more = min(stop - item, each - within)
                for number in range(more):
                    document[np.uint64(to + number)] = ordered[np.uint64(item + number)]
                item, row, within = item + more, row + 1, np.int64(0)
        taken, done = taken + here, done + here
        if done == rows * each:
            at, done = at + 1, 0
    cursors[size, 0], cursors[size, 1] = at, done
    return there
