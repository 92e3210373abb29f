"""From numbers of ranks to levels of cells."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.tui.pages.rank_figures import LEVELS, Scale, around, between, from_zero, heat, numbers

NAN = float("nan")


def words(value: float) -> str:
    return f"{value:g}"


def test_ten_levels_of_equal_width() -> None:
    scale = between(0.0, 10.0, words)
    values = np.array([-1.0, 0.0, 0.99, 1.0, 5.5, 9.0, 10.0, 99.0, NAN])
    assert scale.levels(values).tolist() == [0, 0, 0, 1, 5, 9, 9, 9, -1]
    assert scale.bounds(5) == ["2", "4", "6", "8"]


def test_what_hardly_differs_looks_alike() -> None:
    values = np.array([1.0, 1.01, 0.99, 1.005])
    levels = around(values, words).levels(values)
    assert levels.max() - levels.min() <= 1


def test_one_that_is_far_off_stands_out() -> None:
    values = np.array([1.0, 1.01, 0.99, 1.5])
    levels = around(values, words).levels(values)
    assert levels[3] == LEVELS - 1 and levels[:3].max() <= 2


def test_little_is_little_whatever_the_others_have() -> None:
    values = np.array([0.0, 0.001, 0.002])
    assert from_zero(values, words, 0.05).levels(values).tolist() == [0, 0, 0]
    assert from_zero(values, words, 0.0).levels(values).tolist() == [0, 5, 9]


@pytest.mark.parametrize("values", [np.empty(0), np.array([NAN, NAN]), np.zeros(3)])
def test_scales_of_nothing(values: np.ndarray) -> None:
    for scale in (around(values, words), from_zero(values, words, 0.0)):
        assert list(scale.edges) == sorted(set(scale.edges)) and len(scale.edges) == LEVELS - 1
        assert set(scale.levels(values).tolist()) <= {0, -1}


CELLS = st.lists(
    st.tuples(st.integers(0, 5), st.one_of(st.just(NAN), st.floats(-5, 5)), st.integers(0, 2)), min_size=1, max_size=40
)


@settings(deadline=None)
@given(CELLS)
def test_a_cell_shows_the_worst_of_its_ranks(ranks: list[tuple[int, float, int]]) -> None:
    cells, values, states = (np.array(column) for column in zip(*ranks, strict=True))
    scale = Scale(edges=tuple(range(9)), words=words)
    found = heat(cells, 6, values.astype(float), states, scale)
    for cell in range(6):
        own = [rank for rank in range(len(ranks)) if cells[rank] == cell]
        if not own:
            assert (found.rank[cell], found.level[cell]) == (-1, -1)
            continue
        worst = max(own, key=lambda rank: (states[rank], np.nan_to_num(values[rank], nan=-np.inf), -rank))
        assert found.rank[cell] == worst and found.state[cell] == states[worst]
        assert found.value[cell] == values[worst] or np.isnan(values[worst])


def test_a_rank_that_is_gone_is_worse_than_a_slow_one() -> None:
    found = heat(np.array([0, 0]), 1, np.array([9.0, NAN]), np.array([0, 6]), between(0, 10, words))
    assert (found.rank[0], found.state[0], found.level[0]) == (1, 6, -1)


def test_what_is_not_known_is_no_number() -> None:
    assert np.isnan(numbers([1.0, None])).tolist() == [False, True]
