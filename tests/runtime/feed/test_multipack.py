"""Best-fit-decreasing within groups: every position once, rows as full as the rule makes them, one result."""

from collections import Counter

import numpy as np
import pytest
from examples import drawn
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packed_rows import items_of, plain_best_fit_decreasing, plain_first_fit, room, row_segments

from xtrain.components.packings.multipack_run import pack as pack_multipack
from xtrain.dsl.schema.data_components import PACKINGS
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.packing import multipack
from xtrain.runtime.feed.packing import rows as rows_module
from xtrain.runtime.feed.packing.rows import Oversized, Rows, pack_rows

LENGTHS = st.lists(st.integers(0, 40), max_size=80)
GROUPS = st.integers(1, 90)
UNITS = st.integers(1, 20)
ALIGNS = st.integers(1, 3)
POLICIES = st.sampled_from(["split", "truncate", "skip"])


def pack(lengths: list[int], capacity: int, oversized: Oversized, align: int, group: int, threads: int = 1) -> Rows:
    return pack_multipack(np.array(lengths, dtype=np.int64), capacity, oversized, align, group=group, threads=threads)


@given(LENGTHS, UNITS, ALIGNS, POLICIES, GROUPS)
@example([0, 1, 2, 8, 9, 10, 17], 8, 1, "split", 3)
@example([9, 9, 9], 8, 1, "split", 100)
@settings(deadline=None)
def test_every_position_stands_in_one_row_that_has_room(
    lengths: list[int], units: int, align: int, oversized: Oversized, group: int
):
    capacity = units * align
    rows = pack(lengths, capacity, oversized, align, group)
    written = row_segments(rows, lengths)
    assert all(0 < sum(room(length, align) for *_, length in row) <= capacity for row in written)
    seen = Counter((d, p) for row in written for d, start, length in row for p in range(start, start + length))
    expected = {
        document: 0
        if n - 1 > capacity and oversized == "skip"
        else min(n - 1, capacity)
        if oversized == "truncate"
        else n - 1
        for document, n in enumerate(lengths)
    }
    assert seen == Counter((document, position) for document, count in expected.items() for position in range(count))
    assert rows.num_empty == sum(n < 2 for n in lengths)
    assert (np.diff(rows.cut_segments) > 0).all()  # one row's cuts are found by searching
    # Documents of one row are of one group.
    assert all(len({document // group for document, *_ in row}) == 1 for row in written)


@given(LENGTHS, UNITS, ALIGNS, POLICIES, GROUPS)
@settings(deadline=None)
def test_rows_are_as_full_as_best_fit_decreasing_makes_them(
    lengths: list[int], units: int, align: int, oversized: Oversized, group: int
):
    rows = pack(lengths, units * align, oversized, align, group)
    found = sorted(
        units - sum(room(length, align) // align for *_, length in row) for row in row_segments(rows, lengths)
    )
    expected: list[int] = []
    for first in range(0, len(lengths), group):
        items, full = items_of(lengths[first : first + group], units * align, oversized, align)
        expected += [0] * full + plain_best_fit_decreasing(items, units)
    assert found == sorted(expected)


@given(LENGTHS, UNITS, ALIGNS, POLICIES, GROUPS, st.integers(1, 9), st.integers(1, 5))
@settings(deadline=None)
def test_documents_sorted_in_blocks_are_packed_alike(
    lengths: list[int], units: int, align: int, oversized: Oversized, group: int, block: int, threads: int
):
    whole = pack(lengths, units * align, oversized, align, group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multipack, "BLOCK", block)
        blocks = pack(lengths, units * align, oversized, align, group, threads)
    assert blocks.fingerprint() == whole.fingerprint()


@given(LENGTHS, UNITS, GROUPS)
@settings(deadline=None)
def test_no_more_rows_than_first_fit(lengths: list[int], capacity: int, group: int):
    """First fit in the order of the documents can be better by luck, but never by more than two ninths and a row."""
    found = pack(lengths, capacity, "split", 1, group=len(lengths) + 1).num_rows
    items, full = items_of(lengths, capacity, "split", 1)
    assert found <= full + len(plain_first_fit(items, capacity)) * 11 / 9 + 1


@pytest.mark.parametrize("capacity", [1024, 4000])
@pytest.mark.parametrize("kind", ["log-normal", "uniform", "short"])
def test_usual_lengths_take_fewer_rows_than_first_fit_and_next_to_the_fewest(kind: str, capacity: int):
    rng = np.random.default_rng(3)
    lengths = {
        "log-normal": np.clip(np.exp(rng.normal(np.log(100), 1.1, 3000)).astype(int), 2, capacity + 1),
        "uniform": rng.integers(2, capacity + 2, 3000),
        "short": rng.geometric(1 / 30, 3000) + 1,
    }[kind].tolist()
    found = pack(lengths, capacity, "error", 1, group=10**6)
    items, _ = items_of(lengths, capacity, "error", 1)
    assert found.num_rows <= len(plain_first_fit(items, capacity))
    assert found.num_rows <= -(-sum(items) // capacity) * (1.02 if kind == "uniform" else 1.001) + 1


@given(LENGTHS, UNITS, ALIGNS, POLICIES, GROUPS, st.integers(2, 9))
@settings(deadline=None)
def test_any_number_of_threads_packs_alike(
    lengths: list[int], units: int, align: int, oversized: Oversized, group: int, threads: int
):
    one = pack(lengths, units * align, oversized, align, group)
    more = pack(lengths, units * align, oversized, align, group, threads)
    assert more.fingerprint() == one.fingerprint()
    assert (more.num_positions, more.num_rows) == (one.num_positions, one.num_rows)


@pytest.mark.slow  # it compiles everything three times more
@given(LENGTHS, UNITS, ALIGNS, POLICIES, GROUPS, st.integers(1, 3))
@drawn(25, 500)
def test_other_sizes_of_numbers_pack_alike(
    lengths: list[int], units: int, align: int, oversized: Oversized, group: int, threads: int
):
    """Lengths of four bytes, and results of eight, as from 2³¹ documents on."""
    usual = pack(lengths, units * align, oversized, align, group)
    small = np.array(lengths, dtype=np.int32)
    short = pack_multipack(small, units * align, oversized, align, group=group, threads=threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "MANY", 0)
        many = pack(lengths, units * align, oversized, align, group, threads)
    assert many.document.dtype == many.row_offsets.dtype == np.int64
    assert short.fingerprint() == usual.fingerprint()
    assert row_segments(many, lengths) == row_segments(usual, lengths)


@given(LENGTHS, UNITS, ALIGNS, POLICIES, GROUPS)
@settings(deadline=None)
def test_a_group_is_packed_as_if_it_were_alone(
    lengths: list[int], units: int, align: int, oversized: Oversized, group: int
):
    whole = row_segments(pack(lengths, units * align, oversized, align, group), lengths)
    apart = []
    for first in range(0, len(lengths), group):
        alone = lengths[first : first + group]
        rows = row_segments(pack(alone, units * align, oversized, align, group), alone)
        apart += [[(first + document, *rest) for document, *rest in row] for row in rows]
    assert whole == apart


@pytest.mark.parametrize("oversized", ["split", "truncate", "skip"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_documents_of_usual_lengths(oversized: Oversized, threads: int):
    """More than are sorted at once, some of them longer than a row, some without a position."""
    lengths = np.exp(np.random.default_rng(4).normal(5, 1.5, 700_000)).astype(np.int64)
    capacity = 2048
    whole = pack_multipack(lengths, capacity, oversized, group=10**6, threads=threads)
    document, start, positions = whole.segments(lengths)
    rows = np.add.reduceat(positions, whole.row_offsets[:-1])
    assert rows.max() <= capacity and rows.sum() == whole.num_positions
    longer = lengths - 1 > capacity
    expected = np.minimum(lengths - 1, capacity if oversized != "split" else 1 << 40)
    expected[longer] *= oversized != "skip"
    assert np.array_equal(np.bincount(document, weights=positions, minlength=len(lengths)), np.maximum(expected, 0))
    assert len(set(zip(document[start > 0].tolist(), start[start > 0].tolist(), strict=True))) == (start > 0).sum()
    assert not (start % capacity).any()
    assert whole.num_rows <= -(-whole.num_positions // capacity) * 1.001
    if threads > 1:
        assert whole.fingerprint() == pack_multipack(lengths, capacity, oversized, group=10**6, threads=1).fingerprint()


def test_rows_too_long_for_one_word_of_the_search():
    """The table of open rows has two levels; lengths far apart use both."""
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(2, 40, 300), rng.integers(100_000, 300_000, 200)])
    rng.shuffle(lengths)
    rows = pack(lengths.tolist(), 300_000, "error", 1, group=1000)
    items, _ = items_of(lengths.tolist(), 300_000, "error", 1)
    left = sorted(300_000 - sum(length for *_, length in row) for row in row_segments(rows, lengths.tolist()))
    assert left == plain_best_fit_decreasing(items, 300_000)


def test_groups_are_packed_apart():
    # Ten halves: pairs within a group of two, of three there is always one left over.
    assert pack([5] * 10, 8, "error", 1, group=10).num_rows == 5
    assert pack([5] * 10, 8, "error", 1, group=3).num_rows == 2 + 2 + 2 + 1


def test_the_error_policy_and_bad_settings_are_those_of_sequential_packing():
    with pytest.raises(DataError, match="document 1 has 9 positions"):
        pack([9, 10, 11], 8, "error", 1, group=2)
    with pytest.raises(DataError, match="padded to lengths divisible by 3"):
        pack([9], 8, "split", 3, group=2)


@given(LENGTHS, UNITS, ALIGNS, POLICIES, GROUPS)
@settings(deadline=None)
def test_all_methods_keep_and_lose_the_same(
    lengths: list[int], units: int, align: int, oversized: Oversized, group: int
):
    packed = [
        pack_rows(np.array(lengths, np.int64), units * align, oversized, align, method=method, group=group)
        for method in PACKINGS
    ]
    for name in ("num_positions", "num_truncated", "num_skipped", "num_empty", "num_dropped_positions"):
        assert len({getattr(rows, name) for rows in packed}) == 1
    segments = [sorted(segment for row in row_segments(rows, lengths) for segment in row) for rows in packed]
    assert segments[0] == segments[1] == segments[2]


@pytest.mark.parametrize("method", PACKINGS)
def test_long_documents_are_an_error_where_they_are_declared_one(method: str):
    with pytest.raises(DataError, match="document 1 has 9 positions"):
        pack_rows(np.array([9, 10, 11]), 8, "error", method=method, group=2)
    assert pack_rows(np.array([9, 9]), 8, "error", method=method, group=2).num_rows == 2


def test_a_method_is_chosen_by_name():
    lengths = np.array([5, 8, 5, 2])
    by_name = {
        method: row_segments(pack_rows(lengths, 8, "split", method=method, group=100), lengths.tolist())
        for method in ("sequential", "multipack", "best_fit")
    }
    assert [[d for d, *_ in row] for row in by_name["sequential"]] == [[0], [1], [2, 3]]
    assert [[d for d, *_ in row] for row in by_name["multipack"]] == [[1, 3], [0, 2]]
    assert by_name["best_fit"] == by_name["multipack"]
