"""The hold-out: its size, and that nothing but its arguments decides it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.packing.stored_rows import split_holdout


def offsets_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


LENGTHS = st.lists(st.integers(2, 50), min_size=2, max_size=60)
SEEDS = st.integers(0, 2**63)


@given(LENGTHS, st.floats(0, 1), SEEDS)
@settings(deadline=None)
def test_both_parts_are_ascending_and_together_everything(lengths: list[int], fraction: float, seed: int):
    train, held_out = split_holdout(offsets_of(lengths), fraction, seed)
    assert train.dtype == held_out.dtype == np.int64
    assert sorted([*train, *held_out]) == list(range(len(lengths)))
    assert list(train) == sorted(train)
    assert list(held_out) == sorted(held_out)
    if 0 < fraction < 1:
        assert len(held_out) >= 1
        assert len(train) >= 1


@given(LENGTHS, st.floats(0.01, 0.99), SEEDS)
@settings(deadline=None)
def test_the_hold_out_reaches_the_fraction_and_no_document_more_than_needed(
    lengths: list[int], fraction: float, seed: int
):
    _, held_out = split_holdout(offsets_of(lengths), fraction, seed)
    tokens, wanted = np.asarray(lengths)[held_out], fraction * sum(lengths)
    if len(held_out) < len(lengths) - 1:
        assert tokens.sum() >= wanted
    if len(held_out) > 1:
        # The document taken last is unknown here, but it is one of them.
        assert tokens.sum() - tokens.max() < wanted


def test_the_ends():
    offsets = offsets_of([5, 6, 7])
    assert [part.tolist() for part in split_holdout(offsets, 0.0, 1)] == [[0, 1, 2], []]
    assert [part.tolist() for part in split_holdout(offsets, 1.0, 1)] == [[], [0, 1, 2]]


def test_the_seed_decides_and_the_choice_is_stable():
    offsets = offsets_of([10] * 20)
    # The first of a permutation by Philox with the key (seed, 2^64 - 1), until they have a fifth of the tokens.
    assert [split_holdout(offsets, 0.2, seed)[1].tolist() for seed in (0, 1)] == [[1, 6, 9, 16], [8, 11, 13, 16]]
    assert split_holdout(offsets_of([5, 1, 40, 2, 9, 3]), 0.3, 7)[1].tolist() == [2]
    assert len({tuple(split_holdout(offsets, 0.2, seed)[1]) for seed in range(10)}) > 5


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_fraction_that_is_none(fraction: float):
    with pytest.raises(DataError, match="outside 0 to 1"):
        split_holdout(offsets_of([5, 5]), fraction, 0)


def test_one_document_cannot_be_in_both_parts():
    with pytest.raises(DataError, match="cannot be split"):
        split_holdout(offsets_of([5]), 0.5, 0)
    assert split_holdout(offsets_of([5]), 0.0, 0)[0].tolist() == [0]
