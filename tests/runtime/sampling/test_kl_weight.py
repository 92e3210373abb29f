"""The weight of a divergence from a reference against the controller of TRL and verl."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from xtrain.components.losses.policy_torch import clipped, of_tokens
from xtrain.runtime.base.state import Progress
from xtrain.runtime.nn.batch import Step
from xtrain.runtime.sampling.rollout import adapt, weigh


class AdaptiveKLController:
    """As published: value, target, horizon; the clipped proportional error times `n_steps` / horizon."""

    def __init__(self, init_kl_coef: float, target: float, horizon: int):
        self.value, self.target, self.horizon = init_kl_coef, target, horizon

    def update(self, current: float, n_steps: int) -> None:
        error = min(max(current / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


@pytest.mark.parametrize("saved", [None, 3])
def test_it_is_adapted_as_published_and_part_of_checkpoints(saved):
    batch, horizon, target = 64, 1000, 0.5
    theirs, progress = AdaptiveKLController(0.2, target, horizon), Progress()
    term = of_tokens(clipped(0.2, 0.2), kl="k3", kl_weight=0.2, normalise="token")
    model: Any = SimpleNamespace(parts=[SimpleNamespace(head=SimpleNamespace(term=term))])
    before, after = weigh(model, progress, 0.2), adapt(progress, target, batch / horizon)
    for number, divergence in enumerate((0.0, 0.45, 0.55, 9.0, -1.0, 0.5, 0.6)):
        step = Step(index=number)
        before(step)
        assert term.kl_weight is not None
        assert term.kl_weight.value == step.metrics["policy/kl_weight"] == pytest.approx(theirs.value, rel=1e-14)
        step.metrics["policy/reference_kl"] = divergence
        after(step)
        theirs.update(divergence, batch)
        if number == saved:
            state = json.loads(json.dumps(progress.counters()))
            progress.kl_weight = None
            progress.take(state)
    assert len({theirs.value, 0.2}) == 2
