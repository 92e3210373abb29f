"""Clipping of gradients by their norms so far, and of their elements."""

import math
import random
from types import SimpleNamespace

import pytest
import torch

from xtrain.runtime.base.state import NormStatistics, Progress
from xtrain.runtime.loop import step as training_step
from xtrain.runtime.nn.batch import Step
from xtrain.runtime.nn.gradients import squares_of


def as_published(norms: list[float], deviations: float, decay: float, first: int) -> list[float]:
    """What ZClip scales norms down to, as its authors write it: a buffer first, then moving averages."""
    found, mean, variance = [], 0.0, 0.0
    for number, norm in enumerate(norms, start=1):
        if number <= first:
            found.append(norm)
            if number == first:
                mean = sum(found) / first
                variance = sum((each - mean) ** 2 for each in found) / first
            continue
        z = (norm - mean) / (variance**0.5 + 1e-6)
        scaled = mean + deviations * variance**0.5 / (z / deviations) if z > deviations else norm
        mean = decay * mean + (1 - decay) * scaled
        variance = decay * variance + (1 - decay) * (scaled - mean) ** 2
        found.append(scaled)
    return found


def test_spikes_are_scaled_down_as_published():
    draw = random.Random(7)
    norms = [abs(draw.gauss(1.0, 0.2)) + (8.0 if number % 17 == 16 else 0.0) for number in range(120)]
    statistics = NormStatistics()
    ours = [min(norm, statistics.limit(norm, 2.5, 0.97, 25)) for norm in norms]
    assert ours == pytest.approx(as_published(norms, 2.5, 0.97, 25), rel=1e-12)
    spikes = [number for number, norm in enumerate(norms) if ours[number] < norm]
    assert {33, 50, 67, 84, 101, 118} <= set(spikes) and 16 not in spikes and len(spikes) < 15
    assert max(ours[25:]) < 3.0


# Four norms of mean 2 and deviation 1, then 9: 7 deviations above, so that 2.5 / (7 / 2.5) of one are left.
@pytest.mark.parametrize(("max_norm", "deviations", "left"), [
    (None, None, 9.0),
    (5.0, None, 5.0),
    (20.0, None, 9.0),
    (None, 2.5, 2 + 2.5 / 2.8),
    (20.0, 2.5, 2 + 2.5 / 2.8),
    (2.5, 2.5, 2.5),
    (2.5, 10.0, 2.5),
])  # fmt: skip
def test_of_a_fixed_and_a_moving_limit_the_smaller_one_holds(monkeypatch, max_norm, deviations, left):
    class Norm:
        def __init__(self, *of: object) -> None:
            self.value = 0.0

        def measure(self, sums: torch.Tensor) -> list[float]:
            return sums.tolist()

        def scale(self, limit: float) -> None:
            self.value = min(self.value, limit)

    norm = Norm()
    monkeypatch.setattr(training_step, "GradientNorm", lambda *of: norm)
    model = SimpleNamespace(predicts=True, measured=(), measures_units=False)
    call = training_step.clip(model, SimpleNamespace(is_tp_first=True), Progress(), max_norm, deviations, 0.97, 4)
    for norm.value in (1.0, 1.0, 3.0, 3.0, 9.0):
        step = Step(index=0, loss_sums=torch.tensor([1.0]), valid_tokens=1, units=1)
        before = norm.value
        call(step)
    assert norm.value == pytest.approx(left) and step.grad_norm == before == 9.0
    assert step.clipped == pytest.approx(left / 9.0, rel=1e-6)


def test_statistics_go_on_where_a_checkpoint_was_taken():
    before = Progress(step=30)
    for number in range(30):
        before.norms.limit(1.0 + number % 3, 2.5, 0.97, 25)
    after = Progress()
    after.take(before.counters())
    assert after.norms == before.norms and after.norms is not before.norms
    assert after.norms.limit(9.0, 2.5, 0.97, 25) == before.norms.limit(9.0, 2.5, 0.97, 25) < math.inf
    after.take({"step": 1, "tokens": 2})  # of a run without them
    assert after.norms == NormStatistics() and "gradient_norms" not in after.counters()


def test_the_norm_of_a_large_gradient_is_exact():
    """On a CPU torch loses squares of a long tensor in fp32, such as a piece of all gradients in one."""
    generator = torch.Generator().manual_seed(0)
    large, small = torch.randn(1 << 20, generator=generator), torch.randn(3, 5, generator=generator)
    exact = torch.stack([each.double().square().sum() for each in (large, small)])
    found = squares_of([large, small], exact)
    assert found.dtype == torch.float64 and (found / exact - 1).abs().max() < 1e-6
    assert abs(float(torch.linalg.vector_norm(large)) ** 2 / float(exact[0]) - 1) > 1e-6, "torch by itself"
