"""Ticks are round, and their labels differ."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.tui.curves.axis import labels, log_ticks, one_label, own_labels, short_label, ticks


@pytest.mark.parametrize(("low", "high", "most", "expected"), [
    (0, 10, 5, [0, 2, 4, 6, 8, 10]),
    (2.31, 2.39, 4, [2.32, 2.34, 2.36, 2.38]),
    (-1, 1, 4, [-1, -0.5, 0, 0.5, 1]),
    (0, 1_000_000, 5, [0, 200_000, 400_000, 600_000, 800_000, 1_000_000]),
    (5, 5, 3, [5]),
])  # fmt: skip
def test_ticks_are_round(low: float, high: float, most: int, expected: list[float]) -> None:
    assert ticks(low, high, most) == pytest.approx(expected)


def test_steps_are_whole_and_bytes_are_binary() -> None:
    assert ticks(1, 3, 10, "count") == [1, 2, 3]
    assert ticks(0, 3 * 2**30, 3, "bytes") == [0, 2**30, 2 * 2**30, 3 * 2**30]


@settings(max_examples=50, deadline=None)
@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12), st.integers(1, 20))
def test_ticks_lie_inside_at_equal_distances(low: float, width: float, most: int) -> None:
    width = max(width, 1e-6 * abs(low))
    high = low + width
    found = ticks(low, high, most)
    assert len(found) <= most + 1
    room = 1e-6 * width + 1e-9 * abs(low)
    assert all(low - room <= value <= high + room for value in found)
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert all(gap == pytest.approx(gaps[0], rel=1e-3) for gap in gaps)


def test_what_has_no_ticks() -> None:
    assert ticks(math.nan, 1, 3) == ticks(0, math.inf, 3) == ticks(0, 1, 0) == []
    assert log_ticks(-1, 1, 3) == log_ticks(0, math.inf, 3) == []


def test_powers_of_ten_where_there_are_two_of_them() -> None:
    assert log_ticks(0.5, 2000, 10) == pytest.approx([1, 10, 100, 1000])
    assert log_ticks(1, 1e9, 4) == pytest.approx([1, 1e3, 1e6, 1e9])
    assert log_ticks(1.5, 30, 4) == pytest.approx([2, 5, 10, 20])
    assert log_ticks(2.1, 2.4, 4) == pytest.approx([2.1, 2.2, 2.3, 2.4])


@pytest.mark.parametrize(("values", "unit", "expected"), [
    ([2.0, 2.5, 3.0], "number", ["2.0", "2.5", "3.0"]),
    ([1e-4, 2e-4], "number", ["1e-4", "2e-4"]),
    ([0, 0.5e-4, 1e-4], "number", ["0.0", "0.5e-4", "1.0e-4"]),
    ([10_000, 12_000], "number", ["10k", "12k"]),
    ([0, 0.5, 1], "share", ["0", "50%", "100%"]),
    ([0, 2**30, 2 * 2**30], "bytes", ["0", "1 GiB", "2 GiB"]),
    ([0.001, 0.002], "seconds", ["1 ms", "2 ms"]),
    ([60, 120], "seconds", ["60 s", "120 s"]),
    ([7200, 14400], "seconds", ["2 h", "4 h"]),
])  # fmt: skip
def test_labels_of_one_axis(values: list[float], unit: str, expected: list[str]) -> None:
    assert labels(values, unit) == expected  # type: ignore[arg-type]


def test_labels_of_steps_say_what_they_are_in_their_own_unit() -> None:
    assert own_labels([0, 500, 1000, 1500]) == ["0", "500", "1k", "1.5k"]
    assert own_labels([800_000, 1_000_000, 1_200_000]) == ["800k", "1M", "1.2M"]
    # So close that a unit would need too many digits: all of them.
    assert own_labels([1_000_010, 1_000_012]) == ["1,000,010", "1,000,012"]


def test_a_value_alone() -> None:
    assert one_label(2.34567) == "2.3457"
    assert one_label(14.0) == "14"
    assert one_label(17248.59) == "17.249k"
    assert one_label(3.00e-4) == "3.0000e-4"
    assert one_label(0.0) == "0"
    assert one_label(math.inf) == "inf"
    assert one_label(0.4125, "share") == "41.250%"
    assert one_label(1_542_451_200, "bytes") == "1.4365 GiB"
    assert short_label(0.99957) == "1"
    assert short_label(0.0166, "number") == "0.0166"


@settings(max_examples=50, deadline=None)
@given(
    st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["number", "count", "share", "bytes", "seconds"])
)
def test_any_value_has_a_label(value: float, unit: str) -> None:
    assert one_label(value, unit) and short_label(value, unit)  # type: ignore[arg-type]
