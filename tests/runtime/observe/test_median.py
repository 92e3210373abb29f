"""A median of the latest values and their spread, held against those that numpy computes of the same values."""

import numpy as np
import pytest

from xtrain.runtime.observe.detectors import NORMAL, RunningMedian


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_it_is_that_of_the_latest_values(size):
    values = np.random.default_rng(0).lognormal(size=400).round(1)  # with some that are equal
    window = RunningMedian(size)
    for number, value in enumerate(values, 1):
        window.add(float(value))
        latest = values[max(0, number - size) : number]
        assert len(window) == len(latest)
        assert window.median == pytest.approx(np.median(latest))
        away = np.sort(np.abs(latest - np.median(latest)))
        assert window.deviation == pytest.approx(NORMAL * away[len(away) // 2])
        upper = np.sort(latest)[3 * len(latest) // 4]
        assert window.above == pytest.approx(NORMAL * (upper - np.median(latest)))


def test_of_normal_noise_both_spreads_are_its_standard_deviation():
    window = RunningMedian(20_000)
    for value in np.random.default_rng(1).normal(3.0, 0.25, 20_000):
        window.add(float(value))
    assert window.deviation == pytest.approx(0.25, rel=0.03)
    assert window.above == pytest.approx(0.25, rel=0.03)


def test_it_begins_anew():
    window = RunningMedian(3)
    window.add(1.0)
    window.clear()
    window.add(5.0)
    assert (len(window), window.median, window.deviation) == (1, 5.0, 0.0)
