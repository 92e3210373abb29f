"""What of a curve falls into each column, and what its moving average is."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.tui.curves.canvas import Curve, Line, next_point


def curve(y: list[float] | np.ndarray, x: list[float] | np.ndarray | None = None) -> Curve:
    values = np.asarray(y, dtype=float)
    return Curve(Line("loss", np.arange(len(values), dtype=float) if x is None else np.asarray(x), values))


def test_every_column_holds_its_extremes() -> None:
    columns = curve([1, 5, 2, 3, 0, 4]).columns(0, 5, 2)
    assert columns.low.tolist() == [1, 0] and columns.high.tolist() == [5, 4]


def test_a_spike_among_a_million_points_is_seen() -> None:
    y = np.full(1_000_000, 2.0)
    y[777_777], y[123_456] = 9.0, -3.0
    columns = curve(y).columns(0, 999_999, 300)
    assert columns.high.max() == 9.0 and columns.low.min() == -3.0
    assert np.argmax(columns.high) == 777_777 * 300 // 1_000_000


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-100, 100) | st.just(math.nan), min_size=1, max_size=80), st.integers(1, 40))
def test_no_point_that_is_seen_is_left_out(values: list[float], number: int) -> None:
    columns = curve(values).columns(0, max(1, len(values) - 1), number)
    finite = [value for value in values if not math.isnan(value)]
    if not finite:
        assert np.isnan(columns.low).all() and np.isnan(columns.high).all()
        return
    assert np.nanmax(columns.high) == max(finite) and np.nanmin(columns.low) == min(finite)


def test_between_two_points_lies_the_line_that_joins_them() -> None:
    columns = curve([0.0, 10.0], [0, 10]).columns(0, 10, 10)
    assert columns.low[1:-1].tolist() == pytest.approx([1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5])
    assert columns.joined.all()


def test_what_lies_outside_is_not_in_a_column_but_the_line_to_it_is() -> None:
    columns = curve([0.0, 10.0, 20.0], [0, 10, 20]).columns(5, 15, 2)
    assert columns.high.tolist() == [7.5, 10.0]


def test_where_there_is_no_value_there_is_a_gap() -> None:
    columns = curve([1, 1, math.nan, math.inf, 1, 1]).columns(0, 5, 6)
    assert np.isnan(columns.low).tolist() == [False, False, True, True, False, False]
    assert columns.joined.tolist() == [True, False, False, False, True]


def test_logarithms_leave_out_what_has_none_and_say_so() -> None:
    found = curve([100, 0, -5, 10])
    assert found.left_out == 2
    columns = found.positive.columns(0, 3, 4, log=True)
    assert columns.high[[0, 3]].tolist() == [2, 1] and np.isnan(columns.high[1:3]).all()


def test_points_out_of_order_are_put_in_order() -> None:
    found = curve([3, 1, 2], [30, 10, 20])
    assert found.x.tolist() == [10, 20, 30] and found.y.tolist() == [1, 2, 3]
    assert curve([1, 2, 3], [1, math.nan, 3]).x.tolist() == [1, 3]


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"loss: .*places"):
        Curve(Line("loss", np.arange(3.0), np.arange(4.0)))


def average_of_tensorboard(values: list[float], weight: float) -> list[float]:
    """As its front end computes it: an exponential average divided by what it lacks at first."""
    last, found = 0.0, []
    for count, value in enumerate(values, start=1):
        last = last * weight + (1 - weight) * value
        found.append(last / (1 - weight**count))
    return found


@pytest.mark.parametrize("weight", [0.9, 0.99, 0.999])
def test_smoothing_is_that_of_tensorboard(weight: float) -> None:
    values = np.random.default_rng(1).normal(3, 1, 500)
    smooth = curve(values).smoothed(weight, 0, 499, 10_000)
    assert smooth.y == pytest.approx(np.array(average_of_tensorboard(values.tolist(), weight)), rel=1e-9)


@pytest.mark.parametrize("number", [1, 7, 300])
def test_smoothing_in_few_columns_is_the_same_at_their_ends(number: int) -> None:
    values = np.random.default_rng(2).normal(3, 1, 5000)
    smooth = curve(values).smoothed(0.99, 0, 4999, number)
    expected = average_of_tensorboard(values.tolist(), 0.99)
    assert len(smooth) == number
    assert smooth.y.tolist() == pytest.approx([expected[int(x)] for x in smooth.x], rel=1e-9)


def test_smoothing_of_a_part_knows_what_came_before() -> None:
    values = np.concatenate((np.full(500, 9.0), np.full(500, 1.0)))
    smooth = curve(values).smoothed(0.99, 500, 600, 50)
    expected = average_of_tensorboard(values.tolist(), 0.99)
    assert smooth.y.tolist() == pytest.approx([expected[int(x)] for x in smooth.x], rel=1e-9)


def test_smoothing_of_a_part_goes_on_to_the_point_behind_it() -> None:
    smooth = curve([4.0, 2.0], [0, 100]).smoothed(0.99, 20, 50, 30)
    assert smooth.x.tolist() == [0, 100]
    assert np.isfinite(smooth.columns(20, 50, 30).low).all()


def test_smoothing_goes_by_steps_not_by_points() -> None:
    """Logged every tenth step, a point ten steps back counts what it counts in a run that logs all of them."""
    rare = curve([5.0, 1.0], [0, 10]).smoothed(0.9, 0, 10, 100)
    assert rare.y[-1] == pytest.approx((1 + 5 * 0.9**10) / (1 + 0.9**10))
    # Over tokens it is the steps that count as well.
    line = Line("loss", np.array([0.0, 4e6]), np.array([5.0, 1.0]), steps=np.array([0.0, 10.0]))
    assert Curve(line).smoothed(0.9, 0, 4e6, 100).y[-1] == rare.y[-1]


def test_smoothing_leaves_gaps_and_survives_great_distances() -> None:
    smooth = curve([1, math.nan, math.nan, 2], [0, 1, 2, 1e9]).smoothed(0.9, 0, 1e9, 1000)
    assert smooth.y[-1] == 2.0
    gap = curve([1, 1, math.nan, 1]).smoothed(0.9, 0, 3, 4)
    assert np.isnan(gap.y).tolist() == [False, False, True, False]


def test_the_nearest_point_with_a_value() -> None:
    found = curve([1.5, math.nan, 2.5], [0, 10, 20])
    assert found.at(9) == (0.0, 1.5) and found.at(11) == (20.0, 2.5) and found.at(500) == (20.0, 2.5)
    assert found.last == 2.5
    assert curve([]).at(3) is None and curve([]).last is None and curve([math.nan]).at(0) is None


def test_the_next_point_is_another_one() -> None:
    curves = [curve([1, 2, 3], [0, 100, 200]), curve([1, math.nan, 2], [50, 60, 300])]
    assert next_point(curves, 0, 1) == 50
    assert next_point(curves, 50, 1) == 100  # at 60 there is no value
    assert next_point(curves, 100, -1) == 50
    assert next_point(curves, 100, 95) == 200
    assert next_point(curves, 300, 1) == 300 and next_point(curves, 0, -10) == 0
    assert next_point([], 3, 1) == 3


def test_a_million_points_take_milliseconds() -> None:
    found = curve(np.random.default_rng(0).normal(3, 1, 1_000_000))

    def seconds() -> float:
        begin = time.thread_time()
        found.columns(0, 999_999, 300)
        return time.thread_time() - begin

    assert min(seconds() for _ in range(10)) < 0.005
