"""What is taken for a sign that something is wrong, and what is not."""

from collections.abc import Iterable

import numpy as np
import pytest

from xtrain.runtime.observe.detectors import (
    DiskDetector,
    Finding,
    HighLossDetector,
    LossSpikeDetector,
    MemoryDetector,
    SlowDetector,
    StarvationDetector,
)

GIB = 2**30


def numbered(findings: Iterable[Finding | None]) -> list[tuple[int, Finding]]:
    return [(number, each) for number, each in enumerate(findings) if each is not None]


def spikes(losses: Iterable[float], deviations: float = 6.0, phase: str = "train") -> list[tuple[int, Finding]]:
    detector = LossSpikeDetector(deviations, 100)
    return numbered(detector.take(float(loss), phase) for loss in losses)


def curve(steps: int, seed: int = 0, spread: float = 0.05) -> np.ndarray:
    """A loss that falls as losses do, with the noise of batches."""
    numbers = np.arange(steps)
    noise = np.random.default_rng(seed).normal(0, spread, steps)
    return 2 + 8 * np.exp(-numbers / 100) + 2 * (numbers + 10) ** -0.3 + noise


def late(steps: int) -> np.ndarray:
    """The same once it falls slowly."""
    return curve(1000 + steps)[1000:]


@pytest.mark.parametrize("seed", range(4))
def test_a_noisy_curve_that_falls_raises_nothing(seed):
    assert spikes(curve(4000, seed)) == []


def test_losses_of_small_batches_with_their_long_tail_raise_next_to_nothing():
    tail = np.exp(0.25 * np.random.default_rng(3).standard_normal(4000)) - 1
    assert len(spikes(curve(4000, spread=0) + 0.2 * tail)) <= 2  # raised once, and cleared


def test_a_spike_is_raised_at_its_first_step_and_cleared_once_it_is_over():
    losses = late(600)
    losses[300:305] += 1.0
    (first, raised), (last, cleared) = spikes(losses)
    assert (first, raised.state, raised.value) == (300, "raised", losses[300])
    assert raised.limit is not None and raised.limit < losses[300]
    assert "deviations above the median of the last 100 steps" in raised.message
    assert cleared.state == "cleared" and 310 <= last <= 330


def test_it_needs_a_while_before_it_judges():
    losses = [2.0 + 0.01 * (number % 5) for number in range(50)]
    assert spikes([*losses[:49], 9.0]) == []
    assert [number for number, _ in spikes([*losses, 9.0])] == [50]


def test_a_loss_that_stays_where_it_has_jumped_to_is_what_is_usual_then():
    losses = late(800)
    losses[300:] += 1.0
    (_, raised), (last, cleared) = spikes(losses)
    assert raised.state == "raised" and cleared.state == "cleared"
    assert 340 < last < 400 and "before the spike 2.2" in cleared.message


def test_another_mixture_is_not_a_spike():
    detector = LossSpikeDetector(6.0, 100)
    losses = curve(300)
    found = numbered(detector.take(float(loss), "first") for loss in losses)
    found += numbered(detector.take(float(loss) + 3, "second") for loss in losses)
    assert found == []


def test_a_phase_that_begins_ends_a_spike():
    detector = LossSpikeDetector(6.0, 100)
    losses = [*(2 + 0.01 * (number % 7) for number in range(100)), 9.0]
    assert [each.state for _, each in numbered(detector.take(loss, "first") for loss in losses)] == ["raised"]
    over = detector.take(9.0, "second")
    assert over is not None and over.state == "cleared"


def test_a_loss_without_noise_has_to_rise_by_more_than_a_hair():
    assert spikes([2.0] * 200 + [2.02]) == []
    assert len(spikes([2.0] * 200 + [2.03])) == 1


def test_a_loss_may_be_0():
    assert spikes([0.0] * 200 + [5e-4]) == []
    assert len(spikes([0.0] * 200 + [1e-3])) == 1


@pytest.mark.parametrize(("deviations", "found"), [(3.0, True), (12.0, False)])
def test_how_far_is_what_the_plan_says(deviations, found):
    losses = late(400)
    losses[300] = losses[200:300].mean() + 0.05 * 8
    assert bool([each for number, each in spikes(losses, deviations) if number == 300]) == found


def test_steps_that_take_much_longer_are_reported_once_and_their_end_too():
    detector = SlowDetector(2.0, 100)
    seconds = [1.0] * 60 + [3.0] * 20 + [1.0] * 20
    (first, raised), (last, cleared) = numbered(map(detector.take, seconds))
    assert (first, raised.state, raised.value, raised.limit) == (64, "raised", 3.0, 2.0)
    assert (last, cleared.state) == (84, "cleared")


@pytest.mark.parametrize("seconds", [
    [1.0] * 60 + [9.0, 9.0, 9.0, 9.0, 1.0] * 5,  # never five in a row
    [9.0] * 40 + [30.0] * 9,  # nobody knows yet what is usual
    [0.01] * 60 + [0.03] * 30,  # together not a second
    [1.0] * 60 + [1.9] * 60,
])  # fmt: skip
def test_what_is_not_slow(seconds):
    assert numbered(map(SlowDetector(2.0, 100).take, seconds)) == []


def test_a_run_that_stays_slow_stays_raised():
    assert len(numbered(map(SlowDetector(2.0, 100).take, [1.0] * 60 + [3.0] * 2000))) == 1


def test_waiting_for_rows_is_looked_at_over_many_steps():
    detector = StarvationDetector(0.3)
    assert detector.take(20, 20.0, 20.0) is None, "readers begin"
    assert detector.take(10, 10.0, 10.0) is None, "too few steps"
    raised = detector.take(10, 10.0, 0.0)
    assert raised is not None and (raised.state, raised.value, raised.limit) == ("raised", 0.5, 0.3)
    assert detector.take(20, 20.0, 5.6) is None, "28 %: not well enough"
    cleared = detector.take(20, 20.0, 2.0)
    assert cleared is not None and (cleared.state, cleared.value) == ("cleared", 0.1)
    assert detector.take(1000, 9.0, 9.0) is None, "of steps that are over in a moment nobody wants to hear"


def test_memory_beyond_the_plan():
    detector = MemoryDetector(1.05)
    assert detector.take(1.04) is None
    raised = detector.take(1.2)
    assert raised is not None and raised.state == "raised" and "120%" in raised.message
    assert detector.take(1.3) is None


def test_a_disk_that_fills_and_is_tidied():
    detector = DiskDetector(0.05, None, None)
    assert detector.take(6 * GIB, 100 * GIB) is None
    raised = detector.take(4 * GIB, 100 * GIB)
    assert raised is not None and (raised.state, raised.limit) == ("raised", 5.0 * GIB)
    assert detector.take(6 * GIB, 100 * GIB) is None, "at the brim it would be raised again and again"
    cleared = detector.take(7 * GIB, 100 * GIB)
    assert cleared is not None and cleared.state == "cleared"


@pytest.mark.parametrize(("detector", "limit", "words"), [
    (DiskDetector(None, 10 * GIB, None), 10, "are free"),
    (DiskDetector(0.01, None, 20 * GIB), 20, "checkpoint, 20.0 GiB, does not fit"),
    (DiskDetector(0.5, None, 20 * GIB), 50, "does not fit"),
    (DiskDetector(0.5, None, None, 30 * GIB), 30, "are free"),
    (DiskDetector(0.2, None, None, 30 * GIB), 20, "are free"),
    (DiskDetector(0.5, None, 20 * GIB, 10 * GIB), 20, "does not fit"),
])  # fmt: skip
def test_what_has_to_be_free(detector, limit, words):
    found = detector.take(5 * GIB, 100 * GIB)
    assert found is not None and found.limit == limit * GIB and words in found.message


def test_a_loss_that_stays_high():
    detector = HighLossDetector(8.0, 2)
    found = numbered(detector.take(loss) for loss in (9, 8, 9, 8.1, 9, 8, 9, 8, 7, 9))
    assert [(number, each.state, each.value) for number, each in found] == [(3, "raised", 8.1), (8, "cleared", 7)]
    assert found[0][1].message == "loss 8.1, for 2 steps above 8"
