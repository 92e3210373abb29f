"""Whole groups of documents packed by best-fit-decreasing: counted, planned and placed, one after the other; compiled.

A group that several threads pack together is counted in ranges, planned once, and placed in the same ranges.
"""

import numpy as np

from xtrain.runtime.data.jit import kernel
from xtrain.runtime.data.packing.best_fit import fit, open_rows
from xtrain.runtime.data.packing.counting import CUTS, FULL, count
from xtrain.runtime.data.packing.placing import begin, place


@kernel
def placements_for(documents, most):
    """Placements to have room for at first. What is not used takes no memory, and what proves too small is copied."""
    return min(documents, 8 * most) + 3


@kernel
def plan(sizes, remainders, extra, capacity, align, most, begins, placements, runs, offsets):
    """The rows of a group that was counted in ranges: (placements, runs, rows that are planned, positions).

    `sizes` and `remainders` [ranges, capacity + 2] and `extra` [ranges, 2] are what `count` gave; only 0 … `most` and
    capacity + 1 may occur among the sizes. `begins`, `placements` and `runs` are those of `fit`. `offsets`,
    of which the first is set, gets where every row ends: full rows of long documents first, then those that are
    planned.
    """
    units = np.zeros(capacity // align + 1, np.int64)
    full, positions = np.int64(0), np.int64(0)
    for part in range(len(sizes)):
        full += extra[part, FULL]
        for size in range(1, most + 1):
            here = np.int64(sizes[part, size]) + np.int64(remainders[part, size])
            positions += here * size
            if align == 1:
                units[size] += here
            elif here:
                units[(size + align - 1) // align] += here
    tables = fit(units, (most + align - 1) // align, capacity // align, begins, placements, runs)
    placements, _, runs, num_runs, rows = tables
    for row in range(full):
        offsets[row + 1] = offsets[0] + row + 1
    open_rows(runs[1:num_runs], rows, offsets[full + 1 :], np.int64(offsets[full]))
    return placements, runs, rows, positions + full * capacity


@kernel
def pack_groups(lengths, group, first_group, last_group, capacity, align, policy, most, work, block, document,
                offsets, cuts, starts):  # fmt: skip
    """Pack some groups of `group` documents, one after the other: (rows, segments in `cuts`, positions).

    No size beyond `most` occurs, beside those longer than a row. `offsets`, of which the first is set, gets
    where every row ends; `document` the documents of each row, and `cuts` and `starts` the segments that do not begin
    at the first position of their document, in any order. `work` [any], unsigned, is for its type alone: that of all
    counts. Blocks of `block` documents are sorted at once.
    """
    sizes, remainders = np.zeros((1, capacity + 2), work.dtype), np.zeros((1, capacity + 2), work.dtype)
    extra, ends = np.zeros((1, 2), np.int64), np.empty(capacity + 2, work.dtype)
    places, later = np.empty((capacity + 2, 2), work.dtype), np.empty((capacity + 2, 2), work.dtype)
    begins = np.empty(capacity // align + 1, work.dtype)
    room = placements_for(min(group, len(lengths)), most)
    placements, runs = np.empty((room, 4), work.dtype), np.empty((room, 4), work.dtype)
    ordered = np.empty(min(block, group, len(lengths)), document.dtype)
    rows, noted, positions = 0, 0, np.int64(0)
    for number in range(first_group, last_group):
        first = number * group
        part = lengths[first : min(first + group, len(lengths))]
        for size in range(most + 1):
            sizes[0, size] = 0
        if sizes[0, -1]:
            sizes[0, -1] = 0
            remainders[:] = 0
        count(part, capacity, policy, sizes[0], remainders[0], extra[0])
        segment, full = np.int64(offsets[rows]), extra[0, FULL]
        placements, runs, planned, used = plan(
            sizes, remainders, extra, capacity, align, most, begins, placements, runs, offsets[rows:]
        )
        begin(0, sizes, remainders, align, most, begins, placements, places, later)
        place(
            part, first, capacity, policy, most, sizes[0], places, later, placements, offsets[rows + full :],
            document, segment, cuts[noted:], starts[noted:], ends, ordered,
        )  # fmt: skip
        rows, noted, positions = rows + full + planned, noted + extra[0, CUTS], positions + used
    return rows, noted, positions


@kernel
def place_range(lengths, first, number, capacity, align, policy, most, sizes, remainders, begins, placements,
                block, segment, document, offsets, cuts, starts):  # fmt: skip
    """Place range `number` of a group that is planned; the arguments are those of `begin` and `place`."""
    places, later = np.empty((capacity + 2, 2), sizes.dtype), np.empty((capacity + 2, 2), sizes.dtype)
    begin(number, sizes, remainders, align, most, begins, placements, places, later)
    ends, ordered = np.empty(capacity + 2, sizes.dtype), np.empty(max(1, min(block, len(lengths))), document.dtype)
    place(
        lengths, first, capacity, policy, most, sizes[number], places, later, placements, offsets, document,
        segment, cuts, starts, ends, ordered,
    )  # fmt: skip
