"""Best-fit-decreasing over runs of equal lengths, compiled with numba.

Best-fit-decreasing takes documents from the longest to the shortest and puts each into the fullest row with enough room
(Johnson 1973: at most 11/9 of the fewest rows, plus a constant). Lengths are small integers, so there are few kinds of
documents and few kinds of open rows: all documents of a length and all rows with the same room left are placed
together. The room of a row shrinks as documents enter it, so the fullest row that takes one document takes as many as
fit before another row is considered. The results are placements: a number of rows, from a first one on, receive a
number of documents of one length each. `multipack.py` decides which documents these are.

Lengths here are in units of `align` positions, from 1 to the row's capacity in units. The room that open rows have left
is a bitset with a successor query (smallest room >= n): bit r is set if a row has room r. A second level of bits, the
summary, marks the nonzero words, so a query reads two or three words.

A document of n tokens has n - 1 positions. If it is longer than a row, it may be cut into full rows and a remainder.
Counts are unsigned, which spares a loop the check for negative indices.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from xtrain.runtime.base.jit import kernel
from xtrain.runtime.feed.packing.rows import SPLIT, TRUNCATE

SIX, WORD = np.uint64(6), np.uint64(63)
ONE = np.uint64(1)


def _lowest_bit(typing, word):
    """Return the index of the lowest set bit of a nonzero uint64, in one instruction."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


# Callers pass other arguments than the function above takes: numba adds the types.
lowest_bit: Any = intrinsic(_lowest_bit)


@kernel
def no_rooms(capacity):
    """Return an empty set of rooms 0 … capacity: its words and their summary, uint64.

    The last bit of the words, beyond the capacity, is always set, so that every search ends.
    """
    words = np.zeros((capacity + 1 >> 6) + 1, np.uint64)
    summary = np.zeros((len(words) >> 6) + 1, np.uint64)
    add_room(words, summary, len(words) * 64 - 1)
    return words, summary


@kernel
def least_room(words, summary, needed):
    """Return the least room in the set from `needed` on; beyond the capacity if there is none. Both uint64."""
    # With only uint64 numbers, numba counts no references here; otherwise a search takes three times as long.
    at = needed >> SIX
    word = words[at] >> (needed & WORD)
    if word:
        return needed + lowest_bit(word)
    at += ONE
    block = at >> SIX
    word = summary[block] >> (at & WORD)
    if word:
        at += lowest_bit(word)
        return (at << SIX) + lowest_bit(words[at])
    block += ONE
    while not summary[block]:
        block += ONE
    at = (block << SIX) + lowest_bit(summary[block])
    return (at << SIX) + lowest_bit(words[at])


@kernel
def add_room(words, summary, room):
    bit = np.uint64(room)
    at = bit >> SIX
    words[at] |= ONE << (bit & WORD)
    summary[at >> SIX] |= ONE << (at & WORD)


@kernel
def remove_room(words, summary, room):
    """Remove a room that is in the set."""
    bit = np.uint64(room)
    at = bit >> SIX
    words[at] ^= ONE << (bit & WORD)
    if not words[at]:
        summary[at >> SIX] ^= ONE << (at & WORD)


# Counts in addition to the documents of each size: full rows cut off long documents, and segments that do not begin
# where their document does.
FULL, CUTS = range(2)


@kernel
def remainder(size, capacity, policy):
    """Return the positions to place of a document of `size` > `capacity`; 0 for none."""
    return size % capacity if policy == SPLIT else capacity if policy == TRUNCATE else 0


@kernel
def size_of(length, beyond):
    """Return the positions of a document of `length` tokens, uint64; `beyond` for longer ones or without tokens."""
    return min(np.uint64(np.int64(length) - 1), np.uint64(beyond))


@kernel
def count(lengths, capacity, policy, sizes, remainders, extra):
    """Count documents by the positions to place.

    `sizes` and `remainders` [capacity + 2], all 0, get the number of documents, and of remainders of long ones, with
    each number of positions; remainders[0] those with nothing to place, and sizes[capacity + 1] the documents that are
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
    """Return the number of segments of all documents, and of those that do not begin where their document does."""
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
    """Sort documents, numbered from `first`, by the positions to place.

    `ends` [beyond + 1] has the number of documents of each size as `size_of` counts; only 0 … `most` and `beyond`
    occur. `ordered` gets their numbers: those beyond, then from the longest to the shortest, then those without a
    position, ascending within each size; `ends` becomes the end of each size.
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


# Columns of a placement: its first row, number of rows, documents of the length in each, documents in each before.
FIRST, ROWS, EACH, EARLIER = range(4)
# Columns of a run of adjacent, equally filled rows: first row, number of rows, documents in each, and the number of the
# next run with as much room. Run number 0 means none.
NUMBER, NEXT = 2, 3
# State of the planning: current length, its unplaced documents, and the numbers of rows, placements and runs so far.
UNITS, LEFT, OPENED, PLACED, RUN = range(5)
STANDS = 5


@kernel
def fit(counts, longest, capacity, begins, placements, runs):
    """Plan the rows of documents counted by length; returns (placements, their number, runs, their number, rows).

    `counts` [capacity + 1] has the number of documents of each length. `begins` [capacity + 1] gets the first placement
    of every length that occurs; placements of a length are adjacent. `placements` and `runs` [any, 4], unsigned, are
    work memory; the returned arrays are these or larger ones, with room for one more placement.
    """
    words, summary = no_rooms(capacity)
    heads = np.zeros(capacity + 1, runs.dtype)
    stands = np.zeros(STANDS, np.int64)
    stands[UNITS], stands[RUN] = longest + 1, 1
    shortest = 1
    while shortest < longest and not counts[shortest]:
        shortest += 1
    while not _fit_on(counts, shortest, capacity, begins, placements, runs, heads, words, summary, stands):
        # Arrays that could change within a loop make it five times slower: they grow outside.
        placements, runs = _grown(placements), _grown(runs)
    return placements, stands[PLACED], runs, stands[RUN], stands[OPENED]


@kernel
def _grown(table):
    # Loops, because numba takes a second to compile an array copy.
    wider = np.empty((2 * len(table), table.shape[1]), table.dtype)
    for row in range(len(table)):
        for column in range(table.shape[1]):
            wider[row, column] = table[row, column]
    return wider


@kernel
def _fit_on(counts, shortest, capacity, begins, placements, runs, heads, words, summary, stands):
    """Continue from the current state, to the end or until a table is full; return True at the end."""
    units, left, rows, placed, run = stands[UNITS], stands[LEFT], stands[OPENED], stands[PLACED], stands[RUN]
    while True:
        while left == 0 and units > shortest:
            units -= 1
            left = np.int64(counts[units])
            begins[units] = placed
        if left == 0 or placed + 3 > len(placements) or run + 2 > len(runs):
            stands[UNITS], stands[LEFT], stands[OPENED], stands[PLACED], stands[RUN] = units, left, rows, placed, run
            return left == 0
        free = np.int64(0)  # a run whose entry can be reused
        room = np.int64(least_room(words, summary, np.uint64(units)))
        if room > capacity:  # no row has room: open as many as needed
            room, earlier, first = capacity, np.int64(0), rows
            each = room // units
            whole = left if each == 1 else left // each
            rest = left - whole * each
            rows += whole + (rest > 0)
        else:
            head = heads[room]
            first, available, earlier = (
                np.int64(runs[head, FIRST]),
                np.int64(runs[head, ROWS]),
                np.int64(runs[head, NUMBER]),
            )
            # Divisions are the slowest part, and mostly there is room for one document only.
            each = 1 if room < 2 * units else room // units
            whole, rest = available, np.int64(0)
            if left < available * each:
                whole = left if each == 1 else left // each
                rest = left - whole * each
            used = whole + (rest > 0)
            if used == available:
                free = np.int64(head)
                heads[room] = runs[head, NEXT]
                if not heads[room]:
                    remove_room(words, summary, room)
            else:
                runs[head, FIRST], runs[head, ROWS] = first + used, available - used
        if whole:
            if not free:
                free, run = run, run + 1
            after = room - each * units
            _place(placements, placed, runs, free, heads, first, whole, each, earlier, after)
            if after >= shortest:  # otherwise no document fits any more
                add_room(words, summary, after)
            placed += 1
            first, left, free = first + whole, left - whole * each, np.int64(0)
        if rest:
            if not free:
                free, run = run, run + 1
            after = room - rest * units
            _place(placements, placed, runs, free, heads, first, 1, rest, earlier, after)
            if after >= shortest:
                add_room(words, summary, after)
            placed += 1
            left -= rest


@kernel
def _place(placements, placed, runs, run, heads, first, rows, each, earlier, after):
    """Record a placement, and the run of its rows as the first one with room `after` left."""
    placements[placed, FIRST], placements[placed, ROWS] = first, rows
    placements[placed, EACH], placements[placed, EARLIER] = each, earlier
    at = np.uint64(run)
    runs[at, FIRST], runs[at, ROWS], runs[at, NUMBER], runs[at, NEXT] = first, rows, earlier + each, heads[after]
    heads[after] = run


@kernel
def open_rows(runs, rows, ends, base):
    """Set ends [rows] to the end of each planned row; the first one begins at `base`."""
    for run in range(len(runs)):
        first = np.int64(runs[run, FIRST])
        ends[first : first + np.int64(runs[run, ROWS])] = np.int64(runs[run, NUMBER])
    end = base
    for row in range(rows):
        end += ends[row]
        ends[row] = end
