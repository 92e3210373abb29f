"""Row order: a permutation per epoch, the same from anywhere."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.curriculum import RowOrder


@given(st.integers(1, 50), st.integers(0, 2**64 - 1), st.integers(0, 5))
@settings(deadline=None)
def test_every_epoch_is_a_permutation(num_rows: int, seed: int, epoch: int):
    rows = RowOrder(num_rows, seed).rows(epoch * num_rows, num_rows)
    assert sorted(rows.tolist()) == list(range(num_rows))


@given(st.integers(1, 20), st.integers(0, 100), st.integers(0, 60))
@settings(deadline=None)
def test_a_range_is_its_positions_one_by_one_across_epochs(num_rows: int, start: int, count: int):
    one_by_one = [RowOrder(num_rows, 3).row(position) for position in range(start, start + count)]
    assert RowOrder(num_rows, 3).rows(start, count).tolist() == [row for _, row in one_by_one]
    assert [epoch for epoch, _ in one_by_one] == [p // num_rows for p in range(start, start + count)]


def test_earlier_positions_do_not_change_later_ones():
    walked, jumped = RowOrder(10, 0), RowOrder(10, 0)
    for position in range(95):
        walked.row(position)
    assert walked.row(95) == jumped.row(95)
    assert walked.row(2) == RowOrder(10, 0).row(2)


def test_epochs_and_seeds_differ():
    def epoch(seed: int, number: int) -> tuple[int, ...]:
        return tuple(RowOrder(100, seed).rows(number * 100, 100).tolist())

    assert len({epoch(0, 0), epoch(0, 1), epoch(1, 0), epoch(1, 1)}) == 4


def test_orders_that_cannot_be():
    with pytest.raises(DataError, match="no rows to train on"):
        RowOrder(0, 0)
    with pytest.raises(DataError, match="seed -1"):
        RowOrder(1, -1)
