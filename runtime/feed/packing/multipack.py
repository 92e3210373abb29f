"""Best-fit-decreasing of documents in groups; threads share whole groups, or ranges if groups are few.

A group is counted, planned and placed; kernels are compiled with numba. Several threads that pack a group together
count ranges of it, plan it once, and place the same ranges. A plan records how many documents of each length go into
which rows; the documents of a length take these places in their order. So a part of the documents can be placed once it
is known how many of each length come before: block by block, which keeps the sorted part in the processor's cache, and
by several threads.
"""

from itertools import pairwise

import numpy as np
from attrs import frozen

from xtrain.runtime.base.jit import kernel
from xtrain.runtime.feed.packing.best_fit import (
    CUTS,
    EACH,
    EARLIER,
    FIRST,
    FULL,
    ONE,
    ROWS,
    count,
    count_segments,
    fit,
    open_rows,
    remainder,
    size_of,
    sort,
)
from xtrain.runtime.feed.packing.rows import SPLIT, in_threads, index_type


@kernel
def begin(number, sizes, remainders, align, most, begins, placements, places, later):
    """Find where range `number` of documents begins to place each size and its remainders.

    `sizes` and `remainders` [ranges, capacity + 2] are the counts of all ranges, `begins` the first placement of each
    length in units of `align`. Documents of equally many units take turns: longer ones first, whole ones before
    remainders, in order within each. `places` and `later` [capacity + 2, 2] get the placement and the documents placed
    in it before, for whole documents and for remainders.
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
    """Write the documents of a range, numbered from `first`, to their planned places.

    `sizes` are its counts, `places` and `later` the results of `begin`. `offsets` [rows + 1] has the begin of each
    planned row in `document`, and full rows of long documents begin at `segment` there. For every segment that does not
    begin at the first position of its document, its number goes to `cuts` and its begin to `starts`. `ends` [capacity +
    2] and `ordered` are work memory; as many documents as `ordered` holds are sorted at once.
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
            if size <= capacity:  # it has no token
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
    """Write ordered[begin:end], documents of one size, from their cursor on; returns the place of the first one."""
    at, done = np.int64(cursors[size, 0]), np.int64(cursors[size, 1])
    there, taken = np.int64(-1), begin
    while taken < end:
        first, rows = np.int64(placements[at, FIRST]), np.int64(placements[at, ROWS])
        each, earlier = np.int64(placements[at, EACH]), np.int64(placements[at, EARLIER])
        if each == 1:  # most often, and twice as fast without a nested loop
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


@kernel
def placements_for(documents, most):
    """Return the initial number of placements. Unused ones take no memory, and a table that is too small is copied."""
    return min(documents, 8 * most) + 3


@kernel
def plan(sizes, remainders, extra, capacity, align, most, begins, placements, runs, offsets):
    """Plan the rows of a group that was counted in ranges; returns (placements, runs, planned rows, positions).

    `sizes` and `remainders` [ranges, capacity + 2] and `extra` [ranges, 2] are the results of `count`; only 0 … `most`
    and capacity + 1 occur among the sizes. `begins`, `placements` and `runs` are as in `fit`. `offsets`, whose first
    value is set, gets the end of every row: full rows of long documents first, then planned ones.
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
    """Pack groups of `group` documents one after the other; returns (rows, segments in `cuts`, positions).

    No size is above `most`, except documents longer than a row. `offsets`, whose first value is set, gets the end of
    every row; `document` the documents of each row, and `cuts` and `starts` the segments that do not begin at the first
    position of their document, in any order. `work` [any], unsigned, only sets the type of all counts. Blocks of
    `block` documents are sorted at once.
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
    """Place range `number` of a planned group; arguments as in `begin` and `place`."""
    places, later = np.empty((capacity + 2, 2), sizes.dtype), np.empty((capacity + 2, 2), sizes.dtype)
    begin(number, sizes, remainders, align, most, begins, placements, places, later)
    ends, ordered = np.empty(capacity + 2, sizes.dtype), np.empty(max(1, min(block, len(lengths))), document.dtype)
    place(
        lengths, first, capacity, policy, most, sizes[number], places, later, placements, offsets, document,
        segment, cuts, starts, ends, ordered,
    )  # fmt: skip


# Documents that are sorted at once: their numbers take 2 MiB, which fits a core's own cache.
BLOCK = 1 << 19

# The begin of the first row and the end of each row; segments that do not begin where their document does, and their
# begins; filled positions.
_Packed = tuple[np.ndarray, np.ndarray, np.ndarray, int]


@frozen(kw_only=True, eq=False)
class Task:
    """Documents to pack, and the settings."""

    lengths: np.ndarray
    """Tokens of each document, int32 or int64, contiguous and read-only: kernels are compiled for one kind of array."""
    group: int
    capacity: int
    align: int
    policy: int
    most: int
    """Largest number of positions of a document or remainder, at most `capacity`."""
    regular: bool
    """True if all documents have a position and fit into a row."""
    segments: int
    """Upper bound; so is `cuts`."""
    cuts: int
    block: int

    @property
    def index(self) -> type[np.signedinteger]:
        """Integer type for numbers of segments and documents."""
        return index_type(self.segments)

    @property
    def counts(self) -> type[np.unsignedinteger]:
        return np.uint32 if self.index is np.int32 else np.uint64


def pack_documents(task: Task, document: np.ndarray, threads: int) -> _Packed:
    """Fill `document` [segments] with the documents of the rows, by up to `threads` threads; returns the rows."""
    groups = -(-len(task.lengths) // task.group)
    if threads > 1 and groups < threads:
        parts, base = [], 0
        for number in range(groups):
            parts.append(_group(task, document, number, base, threads))
            base = int(parts[-1][0][-1])
    else:
        parts = _spans(task, document, list(pairwise([groups * part // threads for part in range(threads + 1)])))
    if len(parts) == 1:
        return parts[0]
    offsets = np.concatenate([parts[0][0][:1], *(part[0][1:] for part in parts)])
    cuts, starts = (np.concatenate([part[column] for part in parts]) for column in (1, 2))
    return offsets, cuts, starts, sum(part[3] for part in parts)


def _spans(task: Task, document: np.ndarray, spans: list[tuple[int, int]]) -> list[_Packed]:
    """Pack whole groups in each thread."""

    def counted(first: int, last: int) -> tuple[int, int]:
        part = task.lengths[first * task.group : last * task.group]
        return (len(part), 0) if task.regular else count_segments(part, task.capacity, task.policy)

    def packed(first: int, last: int, base: int, segments: int, cuts: int) -> _Packed:
        offsets = np.empty(segments + 1, dtype=task.index)
        offsets[0] = base
        cut_segments, cut_starts = np.empty((2, cuts), dtype=np.int64)
        rows, noted, positions = pack_groups(
            task.lengths, task.group, first, last, task.capacity, task.align, task.policy, task.most,
            np.empty(0, task.counts), task.block, document, offsets, cut_segments, cut_starts,
        )  # fmt: skip
        return offsets[: rows + 1], cut_segments[:noted], cut_starts[:noted], positions

    sizes = in_threads(counted, spans) if len(spans) > 1 else [(task.segments, task.cuts)]
    bases = np.cumsum([0, *(segments for segments, _ in sizes)]).tolist()
    return in_threads(packed, [(*span, base, *size) for span, base, size in zip(spans, bases, sizes, strict=False)])


def _group(task: Task, document: np.ndarray, number: int, base: int, threads: int) -> _Packed:
    """Pack a group by several threads, which share its documents in ranges."""
    first = number * task.group
    lengths = task.lengths[first : first + task.group]
    ranges = list(enumerate(pairwise([len(lengths) * part // threads for part in range(threads + 1)])))
    sizes, remainders = np.zeros((2, threads, task.capacity + 2), dtype=task.counts)
    extra = np.zeros((threads, 2), dtype=np.int64)

    def counted(part: int, bounds: tuple[int, int]) -> None:
        count(lengths[slice(*bounds)], task.capacity, task.policy, sizes[part], remainders[part], extra[part])

    in_threads(counted, ranges)
    full, cuts = extra[:, FULL].sum(), extra[:, CUTS].sum()
    offsets = np.empty(len(lengths) + full + 1, dtype=task.index)
    offsets[0] = base
    begins = np.empty(task.capacity // task.align + 1, dtype=task.counts)
    tables = np.empty((2, placements_for(len(lengths), task.most), 4), dtype=task.counts)
    layout = (task.capacity, task.align, task.most)
    placements, _, planned, positions = plan(sizes, remainders, extra, *layout, begins, *tables, offsets)
    cut_segments, cut_starts = np.empty((2, cuts), dtype=np.int64)

    def placed(part: int, bounds: tuple[int, int]) -> None:
        before, noted = extra[:part, FULL].sum(), extra[:part, CUTS].sum()
        place_range(
            lengths[slice(*bounds)], first + bounds[0], part, task.capacity, task.align, task.policy, task.most,
            sizes, remainders, begins, placements, task.block, base + before, document, offsets[full:],
            cut_segments[noted:], cut_starts[noted:],
        )  # fmt: skip

    in_threads(placed, ranges)
    return offsets[: full + planned + 1], cut_segments, cut_starts, positions
