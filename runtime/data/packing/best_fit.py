"""Best-fit-decreasing over runs of equal lengths; compiled.

Best-fit-decreasing takes documents from the longest to the shortest and lays each into the fullest row that has room
for it (Johnson 1973: at most 11/9 of the fewest rows, plus a constant). Lengths are small integers, so there are few
kinds of documents and few kinds of open rows: all documents of a length and all rows with the same room left are placed
together. A row's room shrinks as documents enter it, so the fullest row that takes one takes as many of them as it has
room for before another row is looked at. What comes out are placements: so many rows, from this one on, hold so many
more documents of a length each. Which documents those are is of no interest here; `placing.py` sees to it.

Lengths here are in units of `align` positions, from 1 to the row's capacity in units.
"""

import numpy as np

from xtrain.runtime.data.jit import kernel
from xtrain.runtime.data.packing.rooms import add_room, least_room, no_rooms, remove_room

# Columns of a placement: its first row, rows, documents of the length for each of them, documents each has had before.
FIRST, ROWS, EACH, EARLIER = range(4)
# Columns of a run, rows side by side that hold alike: its first row, rows, documents in each, and the number of the
# next run with as much room, 0 for none. The run number 0 is none.
NUMBER, NEXT = 2, 3
# Where the work stands: the length under way, its documents that are left, rows, placements and runs so far.
UNITS, LEFT, OPENED, PLACED, RUN = range(5)
STANDS = 5


@kernel
def fit(counts, longest, capacity, begins, placements, runs):
    """Plan the rows of documents counted by length: (placements, how many, runs, how many, rows).

    `counts` [capacity + 1] are the documents of each length. `begins` [capacity + 1] gets the first placement of every
    length there is; those of a length stand together. `placements` and `runs` [any, 4], unsigned, are memory to work
    in; those returned are these or larger ones, with room for a placement more.
    """
    words, summary = no_rooms(capacity)
    heads = np.zeros(capacity + 1, runs.dtype)
    stands = np.zeros(STANDS, np.int64)
    stands[UNITS], stands[RUN] = longest + 1, 1
    shortest = 1
    while shortest < longest and not counts[shortest]:
        shortest += 1
    while not _fit_on(counts, shortest, capacity, begins, placements, runs, heads, words, summary, stands):
        # Arrays that could change while a loop runs cost it five times the time: so they grow out here.
        placements, runs = _grown(placements), _grown(runs)
    return placements, stands[PLACED], runs, stands[RUN], stands[OPENED]


@kernel
def _grown(table):
    # Loops, as numba takes a second to compile what copies one array into another.
    wider = np.empty((2 * len(table), table.shape[1]), table.dtype)
    for row in range(len(table)):
        for column in range(table.shape[1]):
            wider[row, column] = table[row, column]
    return wider


@kernel
def _fit_on(counts, shortest, capacity, begins, placements, runs, heads, words, summary, stands):
    """Go on where the work stands, to the end or until a table is full; whether that was the end."""
    units, left, rows, placed, run = stands[UNITS], stands[LEFT], stands[OPENED], stands[PLACED], stands[RUN]
    while True:
        while left == 0 and units > shortest:
            units -= 1
            left = np.int64(counts[units])
            begins[units] = placed
        if left == 0 or placed + 3 > len(placements) or run + 2 > len(runs):
            stands[UNITS], stands[LEFT], stands[OPENED], stands[PLACED], stands[RUN] = units, left, rows, placed, run
            return left == 0
        free = np.int64(0)  # a run whose entry can be used again
        room = np.int64(least_room(words, summary, np.uint64(units)))
        if room > capacity:  # no row takes one: open as many as are needed
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
            # Divisions take longer than all else here, and mostly there is room for one document only.
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
            if after >= shortest:  # else nothing has room there any more
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
    """Note a placement, and the run of its rows as the first of those with as much room `after` it."""
    placements[placed, FIRST], placements[placed, ROWS] = first, rows
    placements[placed, EACH], placements[placed, EARLIER] = each, earlier
    at = np.uint64(run)
    runs[at, FIRST], runs[at, ROWS], runs[at, NUMBER], runs[at, NEXT] = first, rows, earlier + each, heads[after]
    heads[after] = run


@kernel
def open_rows(runs, rows, ends, base):
    """Set ends [rows] to where each planned row ends, if the first one begins at `base`."""
    for run in range(len(runs)):
        first = np.int64(runs[run, FIRST])
        ends[first : first + np.int64(runs[run, ROWS])] = np.int64(runs[run, NUMBER])
    end = base
    for row in range(rows):
        end += ends[row]
        ends[row] = end
