"""Best-fit-decreasing over runs of equal lengths; compiled.

Best-fit-decreasing takes documents from the longest to the shortest and lays each into the fullest row that has room
for it (Johnson 1973: at most 11/9 of the fewest rows, plus a constant). Lengths are small integers, so there are few
kinds of documents and few kinds of open rows: all documents of a length and all rows with the same room left are placed
together. A row's room shrinks as documents enter it, so the fullest row that takes one takes as many of them as it has
room for before another row is looked at. The work is that of counting lengths, once, and of writing the order.

Lengths here are in units of `align` positions, from 1 to the row's capacity C in units.
"""

import numpy as np

from .jit import kernel
from .rows import SPLIT, TRUNCATE

# Columns of a count: documents or remainders to fit in, full rows cut off documents longer than a row, shortest and
# longest length in positions of what is to fit in.
ITEMS, FULL, SHORTEST, LONGEST = range(4)
COLUMNS = 4


@kernel
def _size(length, capacity, policy):
    """Positions of what a document of so many tokens leaves to fit in, 0 for nothing."""
    size = max(np.int64(length) - 1, 0)
    if size > capacity:
        size = size % capacity if policy == SPLIT else capacity if policy == TRUNCATE else 0
    return size


@kernel
def _count(lengths, first, last, capacity, policy, counts, columns):
    """Count the documents first … last - 1 by what they leave to fit in; fills `columns` int64 [COLUMNS].

    `counts` int32 [capacity + 2] is 0 and gets the number of each size at 1 … capacity, what is longer at the end.
    """
    least, most = np.int64(1) << 62, np.int64(0)
    for index in range(first, last):
        least, most = min(least, np.int64(lengths[index])), max(most, np.int64(lengths[index]))
    for index in range(first, last):
        counts[min(max(np.int64(lengths[index]) - 1, 0), capacity + 1)] += 1
    longer, full = np.int64(counts[capacity + 1]), np.int64(0)
    items = last - first - longer
    if longer:
        for index in range(first, last):
            size = np.int64(lengths[index]) - 1
            if size > capacity:
                if policy == SPLIT:
                    full += size // capacity
                rest = _size(lengths[index], capacity, policy)
                counts[rest] += 1
                items += 1
        least, most = np.int64(0), capacity + 1
    items -= counts[0]
    shortest, longest = max(least - 1, 1), min(most - 1, capacity)
    while shortest <= longest and counts[longest] == 0:
        longest -= 1
    while shortest < longest and counts[shortest] == 0:
        shortest += 1
    counts[0] = 0
    columns[ITEMS], columns[FULL], columns[SHORTEST], columns[LONGEST] = items, full, shortest, longest


@kernel
def _sort(lengths, first, last, capacity, policy, longer, cursor, ordered):
    """Write the indices first … last - 1 to `ordered`, each where `cursor` of its size stands, and move that on.

    `cursor` int64 [capacity + 1, 2] is where the next document of each size goes, and 1, or 0 for a size that is not
    wanted now: those all go to one place behind the others, which costs less than to ask.
    """
    if longer:
        for index in range(first, last):
            size = _size(lengths[index], capacity, policy)
            ordered[cursor[size, 0]] = index
            cursor[size, 0] += cursor[size, 1]
    else:
        for index in range(first, last):
            size = max(np.int64(lengths[index]) - 1, 0)
            ordered[cursor[size, 0]] = index
            cursor[size, 0] += cursor[size, 1]


# A de Bruijn sequence: its 64 windows of six bits are all different, so that of a lone bit times it tells which bit.
_SEQUENCE = np.uint64(0x03F79D71B4CB0A89)
_BIT_OF = np.empty(64, np.int64)
for _bit in range(64):
    _BIT_OF[((0x03F79D71B4CB0A89 << _bit) & (2**64 - 1)) >> 58] = _bit


@kernel
def _lowest_bit(word):
    """Index of the lowest set bit of a uint64 that is not 0."""
    lone = word & (~word + np.uint64(1))
    return _BIT_OF[(lone * _SEQUENCE) >> np.uint64(58)]


@kernel
def _tightest(words, summary, units):
    """The smallest marked number from `units` on, or -1. `summary` marks the words that are not 0."""
    at = units >> 6
    word = words[at] >> np.uint64(units & 63)
    if word:
        return units + _lowest_bit(word)
    at += 1
    block = at >> 6
    if block >= len(summary):
        return -1
    word = summary[block] >> np.uint64(at & 63)
    if word:
        at += _lowest_bit(word)
        return (at << 6) + _lowest_bit(words[at])
    for later in range(block + 1, len(summary)):
        if summary[later]:
            at = (later << 6) + _lowest_bit(summary[later])
            return (at << 6) + _lowest_bit(words[at])
    return -1


@kernel
def _mark(words, summary, units):
    words[units >> 6] |= np.uint64(1) << np.uint64(units & 63)
    summary[units >> 12] |= np.uint64(1) << np.uint64((units >> 6) & 63)


@kernel
def _unmark(words, summary, units):
    words[units >> 6] &= ~(np.uint64(1) << np.uint64(units & 63))
    if not words[units >> 6]:
        summary[units >> 12] &= ~(np.uint64(1) << np.uint64((units >> 6) & 63))


@kernel
def _grown(table):
    # Loops, as numba takes a second to compile what copies one array into another.
    wider = np.empty((2 * len(table), table.shape[1]), table.dtype)
    for row in range(len(table)):
        for column in range(table.shape[1]):
            wider[row, column] = table[row, column]
    return wider


@kernel
def _fit(counts, shortest, longest, capacity, heads, words, summary, placements, runs):
    """Plan the rows of documents counted by length.

    Returns (table of placements, of runs of rows, number of placements, of runs, of rows); the tables are those given,
    or larger ones. A placement [4] is (first row, rows, documents for each of them, first document in the order from
    long to short). A run of rows [4] is (first row, rows, documents in each, next run with as much room). `heads` int32
    [C + 1] is all -1, `words` and `summary` uint64 all 0, and they are so again in the end.
    """
    num_placements, num_runs, rows, item = 0, 0, 0, 0
    for units in range(longest, shortest - 1, -1):
        left = np.int64(counts[units])
        while left > 0:
            if num_placements + 2 > len(placements):
                placements = _grown(placements)
            if num_runs + 2 > len(runs):
                runs = _grown(runs)
            room = _tightest(words, summary, units)
            if room < 0:  # no row takes one: open as many as are needed
                room, held = capacity, np.int64(0)
                each = room // units
                whole = left // each
                first, rest = np.int64(rows), left - whole * each
                rows += whole + (rest > 0)
                free = -1
            else:
                run = heads[room]
                first, available, held = np.int64(runs[run, 0]), np.int64(runs[run, 1]), np.int64(runs[run, 2])
                # Divisions take longer than all else here, and mostly there is room for one document only.
                each = 1 if room < 2 * units else room // units
                if left >= available * each:
                    whole, rest = available, np.int64(0)
                else:
                    whole = left if each == 1 else left // each
                    rest = left - whole * each
                used = whole + (rest > 0)
                free = -1
                if used == available:
                    heads[room] = runs[run, 3]
                    free = run  # its entry is used again
                    if heads[room] < 0:
                        _unmark(words, summary, room)
                else:
                    runs[run, 0] += used
                    runs[run, 1] -= used
            for part in range(2):
                here, taken = (whole, each) if part == 0 else (np.int64(rest > 0), rest)
                if here == 0:
                    continue
                placements[num_placements, 0], placements[num_placements, 1] = first, here
                placements[num_placements, 2], placements[num_placements, 3] = taken, item
                num_placements += 1
                if free < 0:
                    free = num_runs
                    num_runs += 1
                after = room - taken * units
                runs[free, 0], runs[free, 1], runs[free, 2], runs[free, 3] = first, here, held + taken, heads[after]
                if after >= shortest:  # else nothing has room there any more
                    heads[after] = free
                    _mark(words, summary, after)
                free = -1
                first += here
                item += here * taken
                left -= here * taken
    room = _tightest(words, summary, 0)
    while room >= 0:
        heads[room] = -1
        _unmark(words, summary, room)
        room = _tightest(words, summary, room)
    return placements, runs, num_placements, num_runs, rows


@kernel
def _open(runs, rows, ends, base):
    """Set ends [rows] to where each planned row begins; their documents stand from `base` on."""
    for run in range(len(runs)):
        first = runs[run, 0]
        ends[first : first + runs[run, 1]] = runs[run, 2]
    begin = base
    for row in range(rows):
        size = ends[row]
        ends[row] = begin
        begin += size


@kernel
def _fill(placements, ordered, skipped, ends, document):
    """Write the documents of some placements, and move on what will be the ends of their rows.

    `ordered` are documents from long to short, without the first `skipped`.
    """
    for number in range(len(placements)):
        first, here, each = placements[number, 0], placements[number, 1], placements[number, 2]
        item = placements[number, 3] - skipped
        if each == 1:  # most often, and twice as fast without a loop in the loop
            for row in range(first, first + here):
                document[ends[row]] = ordered[item + row - first]
                ends[row] += 1
            continue
        for row in range(first, first + here):
            at = ends[row]
            for _ in range(each):
                document[at] = ordered[item]
                at += 1
                item += 1
            ends[row] = at


@kernel
def _cut(lengths, first, last, capacity, base, document, ends, starts, at_segments):
    """The full rows of documents longer than a row; (rows, segments noted as not beginning at 0)."""
    row, noted = 0, 0
    for index in range(first, last):
        size = np.int64(lengths[index]) - 1
        if size <= capacity:
            continue
        for piece in range(size // capacity):
            document[base + row] = index
            if piece:
                at_segments[noted] = base + row
                starts[noted] = piece * capacity
                noted += 1
            row += 1
            ends[row - 1] = base + row
    return row, noted


@kernel
def pack_groups(
    lengths,
    group,
    first_group,
    last_group,
    capacity,
    align,
    policy,
    counted,
    counts,
    bases,
    document,
    ends,
    cuts,
    starts,
    ordered,
    halved,
):
    """Pack some groups of `group` documents, one after the other; (rows, segments that do not begin at 0).

    `counted` and `counts` are what `count_groups` gave, `bases` int64 [groups] the first segment of each group. Writes
    `document` from there on, the end of every row to `ends`, and for every segment that does not begin at its
    document's first position, in order, its index to `cuts` and its begin to `starts`. `ordered`, of the
    type of `document`, has room for a group and one more. Groups of `halved` documents or
    more are sorted in two halves if rows of few documents take much memory.
    """
    units = capacity // align
    by_unit = np.zeros(units + 1, np.int32)
    cursor = np.empty((capacity + 1, 2), np.int64)
    heads = np.empty(units + 1, np.int32)
    heads[:] = -1
    words = np.zeros((units >> 6) + 1, np.uint64)
    summary = np.zeros((units >> 12) + 1, np.uint64)
    placements, runs = np.empty((1024, 4), document.dtype), np.empty((1024, 4), document.dtype)
    rows, noted = 0, 0
    for number in range(first_group, last_group):
        first, last = number * group, min((number + 1) * group, len(lengths))
        items, full = counted[number, ITEMS], counted[number, FULL]
        shortest, longest = counted[number, SHORTEST], counted[number, LONGEST]
        if last_group - first_group > 1:
            _count(lengths, first, last, capacity, policy, counts, counted[number])
        base = bases[number]
        if full:
            more, cut = _cut(lengths, first, last, capacity, base, document, ends[rows:], starts[noted:], cuts[noted:])
            rows, noted, base = rows + more, noted + cut, base + more
        fewest, most = (shortest + align - 1) // align, (longest + align - 1) // align
        if align == 1:
            sizes = counts
        else:
            for size in range(shortest, longest + 1):
                by_unit[(size + align - 1) // align] += counts[size]
            sizes = by_unit
        tables = _fit(sizes, fewest, most, units, heads, words, summary, placements, runs)
        placements, runs, num_placements, num_runs, more = tables
        by_unit[fewest : most + 1] = 0
        _open(runs[:num_runs], more, ends[rows:], base)
        # Halves take half the memory, and a pass more: worth it where rows and tables take much of it too.
        done, item, placed = longest, 0, 0
        part = items if items < halved or 4 * more + 40 * num_placements < 3 * items // 2 else (items + 1) // 2
        while item < items:
            begin, from_placement = item, placed
            cursor[0, 1] = 0
            cursor[shortest : longest + 1, 1] = 0
            # What is as long in units is placed together, so it is not parted.
            while done >= shortest and (item - begin < part or done % align):
                cursor[done, 0], cursor[done, 1] = item - begin, 1
                item += counts[done]
                done -= 1
            cursor[0, 0] = item - begin
            for size in range(shortest, longest + 1):
                if cursor[size, 1] == 0:
                    cursor[size, 0] = item - begin
            _sort(lengths, first, last, capacity, policy, counts[capacity + 1] > 0, cursor, ordered)
            while placed < num_placements and placements[placed, 3] < item:
                placed += 1
            _fill(placements[from_placement:placed], ordered, begin, ends[rows:], document)
        counts[capacity + 1] = 0
        counts[shortest : longest + 1] = 0
        rows += more
        if full:
            for segment in range(base, base + items):
                size = np.int64(lengths[document[segment]]) - 1
                if size > capacity:
                    cuts[noted] = segment
                    starts[noted] = size - size % capacity
                    noted += 1
    return rows, noted


@kernel
def count_groups(lengths, group, first_group, last_group, capacity, policy, counted, counts):
    """Fill the rows first_group … last_group - 1 of `counted`, int64 [groups, COLUMNS].

    `counts` int32 [capacity + 2] is 0, and so it is in the end, but for a single group: then it is that group's.
    """
    for number in range(first_group, last_group):
        last = min((number + 1) * group, len(lengths))
        _count(lengths, number * group, last, capacity, policy, counts, counted[number])
        if last_group - first_group > 1:
            counts[counted[number, SHORTEST] : counted[number, LONGEST] + 1] = 0
            counts[capacity + 1] = 0
