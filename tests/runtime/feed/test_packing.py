"""Packing: every position exactly once, rows never over capacity, and the rule that decides where rows end."""

from typing import get_args

import numpy as np
import pytest
from examples import drawn
from hypothesis import given
from hypothesis import strategies as st
from packed_rows import Segment, plain_next_fit, room, row_segments

from xtrain.components.packings import sequential_run as packing
from xtrain.components.packings.sequential_run import pack as pack_sequential
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.packing.rows import Oversized, Rows, pack_rows

LENGTHS = st.lists(st.integers(0, 30), max_size=60)
CAPACITIES = st.integers(1, 12)


def pack(lengths: list[int], capacity: int, oversized: Oversized, align: int = 1) -> Rows:
    return pack_sequential(np.array(lengths, dtype=np.int64), capacity, oversized, align)


def layout(lengths: list[int], capacity: int, oversized: Oversized, align: int = 1) -> list[list[Segment]]:
    return row_segments(pack(lengths, capacity, oversized, align), lengths)


@given(LENGTHS, CAPACITIES, st.sampled_from(["split", "truncate", "skip"]))
@drawn(50, 1000)
def test_packing_is_next_fit_in_order(lengths: list[int], capacity: int, oversized: Oversized):
    assert layout(lengths, capacity, oversized) == plain_next_fit(lengths, capacity, oversized)


@given(LENGTHS, st.integers(1, 4), st.integers(1, 4), st.sampled_from(["split", "truncate", "skip"]))
@drawn(50, 1000)
def test_rows_are_laid_out_by_padded_lengths(lengths: list[int], units: int, align: int, oversized: Oversized):
    capacity = units * align
    rows = pack(lengths, capacity, oversized, align)
    assert row_segments(rows, lengths) == plain_next_fit(lengths, capacity, oversized, align)
    assert all(sum(room(length, align) for *_, length in row) <= capacity for row in row_segments(rows, lengths))


def test_padding_takes_room_of_the_row():
    # 3, 3 and 5 positions: side by side as they are in 12, in two rows of 12 if each takes a multiple of 4.
    assert [len(row) for row in layout([4, 4, 6], 12, "error")] == [3]
    assert [len(row) for row in layout([4, 4, 6], 12, "error", 4)] == [2, 1]
    # A long document: two full rows and a remainder of 2, which takes 4 beside the next one's 8.
    split = layout([27, 8, 5], 12, "split", 4)
    assert split == [[(0, 0, 12)], [(0, 12, 12)], [(0, 24, 2), (1, 0, 7)], [(2, 0, 4)]]


@given(LENGTHS, CAPACITIES)
@drawn(50, 1000)
def test_splitting_keeps_every_position_exactly_once_and_in_order(lengths: list[int], capacity: int):
    rows = pack(lengths, capacity, "split")
    seen = [
        (document, position)
        for row in row_segments(rows, lengths)
        for document, start, length in row
        for position in range(start, start + length)
    ]
    assert seen == [(document, position) for document, n in enumerate(lengths) for position in range(n - 1)]
    assert rows.num_positions == len(seen)
    assert rows.num_empty == sum(n < 2 for n in lengths)
    assert (rows.num_truncated, rows.num_skipped, rows.num_dropped_positions) == (0, 0, 0)


@given(LENGTHS, CAPACITIES, st.sampled_from(["split", "truncate", "skip"]))
@drawn(50, 1000)
def test_rows_are_neither_empty_nor_over_capacity_and_losses_are_counted(
    lengths: list[int], capacity: int, oversized: Oversized
):
    rows = pack(lengths, capacity, oversized)
    assert all(0 < sum(length for *_, length in row) <= capacity for row in row_segments(rows, lengths))
    assert rows.num_positions + rows.num_dropped_positions == sum(max(n - 1, 0) for n in lengths)
    too_long = sum(n - 1 > capacity for n in lengths)
    assert rows.num_truncated == (too_long if oversized == "truncate" else 0)
    assert rows.num_skipped == (too_long if oversized == "skip" else 0)
    assert rows.fill == (rows.num_positions / (rows.num_rows * capacity) if rows.num_rows else 0.0)


def test_sequential_packing_of_the_reference_lengths():
    # 4, 5, 3 and 8 positions into rows of 10.
    rows = pack([5, 6, 4, 9], 10, "error")
    assert [[length for *_, length in row] for row in row_segments(rows, [5, 6, 4, 9])] == [[4, 5], [3], [8]]
    assert rows.fill == 20 / 30


def test_a_long_document_starts_afresh_and_its_remainder_shares_a_row():
    assert layout([3, 12, 3], 4, "split") == [
        [(0, 0, 2)],
        [(1, 0, 4)],
        [(1, 4, 4)],
        [(1, 8, 3)],
        [(2, 0, 2)],
    ]
    assert layout([3, 11, 3], 4, "split")[-1] == [(1, 8, 2), (2, 0, 2)]


def test_an_empty_document_has_the_one_position_from_bos_to_eos():
    assert layout([2, 2], 4, "error") == [[(0, 0, 1), (1, 0, 1)]]


def test_the_error_policy_names_the_document():
    with pytest.raises(DataError, match=r"document 1 has 9 positions, but a row holds 8 \(2 documents"):
        pack([9, 10, 11], 8, "error")


@pytest.mark.parametrize("method", [None, "multipack", "best_fit"])
@pytest.mark.parametrize("align", [1, 2])
def test_the_front_of_long_documents_is_cut_off(method: str | None, align: int):
    lengths = [9, 3, 30, 5, 11, 2, 9, 10]
    rows = pack_rows(np.array(lengths), 8, "truncate_front", align, method=method, group=4)
    segments = [each for row in row_segments(rows, lengths) for each in row]
    expected = [(document, max(0, length - 9), min(length - 1, 8)) for document, length in enumerate(lengths)]
    assert sorted(segments) == expected and rows.capacity == 8
    assert (rows.num_truncated, rows.num_skipped, rows.num_dropped_positions) == (3, 0, 21 + 2 + 1)
    assert rows.num_positions == sum(positions for *_, positions in expected)


def test_settings_that_cannot_be_packed_with():
    assert set(get_args(Oversized)) == {"split", "truncate", "skip", "error", "truncate_front"}
    with pytest.raises(DataError, match="unknown policy `drop`"):
        pack([3], 8, "drop")  # pyright: ignore[reportArgumentType]
    for capacity in (0, 1 << 31):
        with pytest.raises(DataError, match=f"{capacity} positions"):
            pack([3], capacity, "split")


@pytest.mark.parametrize(("capacity", "align"), [(8, 3), (8, 16), (8, 0), (8, -2)])
def test_rows_that_are_no_multiple_of_what_documents_are_padded_to(capacity: int, align: int):
    message = f"rows of 8 positions do not fit documents padded to lengths divisible by {align}"
    with pytest.raises(DataError, match=message):
        pack([3], capacity, "split", align)


def test_no_documents_give_no_rows():
    rows = pack([], 8, "split")
    assert (rows.num_rows, rows.fill) == (0, 0.0)


def test_the_types_are_as_documented():
    rows = pack([3, 12], 4, "split")
    types = [values.dtype for values in (rows.document, rows.row_offsets, rows.cut_segments, rows.cut_starts)]
    assert types == [np.int32, np.int32, np.int64, np.int64]


def test_the_fingerprint_follows_the_layout():
    assert pack([3, 4], 8, "split").fingerprint() == pack([3, 4], 8, "skip").fingerprint()
    others = [pack([3, 4], 9, "split"), pack([3, 4], 3, "split"), pack([12, 4], 3, "split"), pack([13, 4], 3, "skip")]
    others.append(pack([3, 4], 8, "split", 2))
    assert pack([3, 4], 8, "split").fingerprint() not in {rows.fingerprint() for rows in others}


@given(LENGTHS, CAPACITIES, st.sampled_from(["split", "truncate", "skip"]), st.sampled_from([np.int32, np.int64]))
@drawn(15, 300)
def test_many_documents_are_packed_like_few(lengths: list[int], capacity: int, oversized: Oversized, kind: type):
    """From some number of documents on the same text runs compiled."""
    few = pack(lengths, capacity, oversized)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "FEW_DOCUMENTS", 0)
        many = pack_sequential(np.array(lengths, dtype=kind), capacity, oversized)
    assert many.fingerprint() == few.fingerprint()
    assert many.num_positions == few.num_positions
