"""The parts of best-fit-decreasing: the set of rooms, the plan for lengths that were counted, and its tables."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_rows import plain_best_fit_decreasing

from xtrain.runtime.feed.packing.best_fit import (
    EACH,
    EARLIER,
    FIRST,
    ROWS,
    add_room,
    fit,
    least_room,
    no_rooms,
    open_rows,
    remove_room,
)


@given(st.integers(1, 9000), st.data())
@settings(deadline=None)
def test_the_least_room_that_is_enough(capacity: int, data):
    words, summary = no_rooms(capacity)
    rooms: set[int] = set()
    some = st.integers(0, capacity)
    for room in data.draw(st.lists(some, max_size=12)):
        (remove_room if room in rooms else add_room)(words, summary, room)
        rooms ^= {room}
    for needed in data.draw(st.lists(some, min_size=1, max_size=12)):
        found = int(least_room(words, summary, np.uint64(needed)))
        enough = [room for room in rooms if room >= needed]
        assert found == min(enough) if enough else found > capacity


def planned(counts: np.ndarray, tables: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Placements, runs and rows of documents counted by length, with tables of so many lines to begin with."""
    begins = np.zeros(len(counts), np.uint32)
    work = np.empty((2, tables, 4), np.uint32)
    placements, placed, runs, num_runs, rows = fit(counts, len(counts) - 1, len(counts) - 1, begins, *work)
    used = np.flatnonzero(counts)[::-1]
    assert (np.diff(begins[used].astype(int)) > 0).all()  # of each length some, the longest first
    return placements[:placed].astype(np.int64), runs[1:num_runs], rows


LENGTHS = st.lists(st.integers(1, 30), max_size=60)


@given(LENGTHS, st.integers(1, 100))
@settings(deadline=None)
def test_a_plan_places_each_document_once_in_rows_that_have_room(lengths: list[int], tables: int):
    counts = np.bincount(np.array(lengths, np.int64), minlength=31)
    placements, runs, rows = planned(counts, tables)
    left, documents, placed = [30] * rows, [0] * rows, []
    units = [int(size) for size in np.flatnonzero(counts)[::-1]]
    for place in placements.tolist():
        while units and placed.count(units[0]) == counts[units[0]]:
            units.pop(0)
        for row in range(place[FIRST], place[FIRST] + place[ROWS]):
            assert documents[row] == place[EARLIER]
            documents[row] += place[EACH]
            left[row] -= place[EACH] * units[0]
            placed += [units[0]] * place[EACH]
    assert Counter(placed) == Counter(lengths)
    assert sorted(left) == plain_best_fit_decreasing(lengths, 30)
    ends = np.zeros(rows, np.int64)
    open_rows(runs, rows, ends, 5)
    assert ends.tolist() == (5 + np.cumsum(documents)).tolist()


def test_tables_that_grow_give_the_same_plan():
    counts = np.bincount(np.random.default_rng(1).integers(1, 2000, 5000), minlength=2001)
    small, large = planned(counts, 3), planned(counts, 100_000)
    assert len(small[0]) > 1000
    assert all(np.array_equal(one, other) for one, other in zip(small, large, strict=True))
