"""Dealing a step's rows to data ranks: each once, costs even, the same rows in every layout."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.components.packings.multipack_run import pack as pack_multipack
from xtrain.runtime.feed.row_kernels import deal, row_costs


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32))
@settings(deadline=None)
def test_every_row_is_dealt_once(accumulate: int, data_ranks: int, micro: int, seed: int):
    costs = np.random.default_rng(seed).integers(0, 1000, accumulate * data_ranks * micro)
    dealt = deal(costs, accumulate, data_ranks, micro)
    assert dealt.shape == (accumulate, data_ranks, micro)
    assert sorted(dealt.flatten().tolist()) == list(range(len(costs)))


def test_rows_of_a_microbatch_cost_the_ranks_alike():
    # Two microbatches of two ranks with two rows: the dear ones together, the dearest beside the cheapest of them.
    dealt = deal(np.array([1, 90, 2, 100, 60, 4, 3, 50]), 2, 2, 2)
    assert [[sorted(hand) for hand in hands] for hands in dealt.tolist()] == [[[3, 7], [1, 4]], [[0, 5], [2, 6]]]


def test_a_rank_that_had_the_dearer_row_gets_the_cheaper_one_next():
    dealt = deal(np.array([10, 8, 6, 5]), 2, 2, 1)
    assert dealt.tolist() == [[[0], [1]], [[3], [2]]]


def test_costs_are_sums_of_squares_of_segments():
    lengths = np.array([6, 4, 12, 3])
    rows = pack_multipack(lengths, 8, "split", group=10)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    store = type("Store", (), {"offsets": offsets, "firsts": None})()
    costs = row_costs(store, np.arange(4), rows, np.arange(rows.num_rows))  # pyright: ignore[reportArgumentType]
    # A full row of the third document (11 positions), then 5 + 3 and its rest of 3 with 2.
    assert costs.tolist() == [64, 25 + 9, 9 + 4]


@pytest.mark.parametrize(("data_ranks", "micro", "accumulate"), [(2, 4, 1), (4, 2, 4), (8, 1, 8)])
def test_ranks_wait_far_less_than_without(data_ranks: int, micro: int, accumulate: int):
    """Log-normal documents in rows of 8,192: what the slowest rank of each microbatch costs, over the mean."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(350), 1.1, 20_000)).astype(np.int64), 2, 8193)
    rows = pack_multipack(lengths, 8192, "split", group=10**6)
    store = type("Store", (), {"offsets": np.concatenate([[0], np.cumsum(lengths)]), "firsts": None})()
    costs = row_costs(store, np.arange(len(lengths)), rows, np.arange(rows.num_rows))  # pyright: ignore[reportArgumentType]
    each, waits = data_ranks * micro * accumulate, Counter()
    order = rng.permutation(rows.num_rows)
    for first in range(0, len(order) - each, each):
        step = costs[order[first : first + each]]
        for name, dealt in (
            ("in order", np.arange(each).reshape(accumulate, data_ranks, micro)),
            ("by cost", deal(step, accumulate, data_ranks, micro)),
        ):
            spent = step[dealt].sum(axis=2)
            waits[name] += float(spent.max(axis=1).sum() / spent.mean(axis=1).sum() - 1)
    assert waits["by cost"] < waits["in order"] / 3
