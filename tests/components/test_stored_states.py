"""How optimizers store weights and moments: in bf16, and rounded at random."""

import pytest
import torch
from torch import Tensor, nn

from xtrain.components.optimizers.adamw_torch import LocalAdamW
from xtrain.components.optimizers.lion_torch import LionOptimizer
from xtrain.components.optimizers.sgd_torch import LocalSGD
from xtrain.runtime.base.state import Progress
from xtrain.runtime.nn.optimizer import LocalOptimizer, Storage
from xtrain.runtime.nn.updates import StochasticRounding, random_bits, rounded

MAKES = {
    "adamw": lambda groups, storage: LocalAdamW(groups, 0.1, (0.9, 0.95), 1e-8, storage),
    "lion": lambda groups, storage: LionOptimizer(groups, 0.1, (0.9, 0.99), storage),
    "sgd": lambda groups, storage: LocalSGD(groups, 0.1, 0.9, True, storage),
}


def gradients(steps: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(*shape, generator=generator) for _ in range(steps)]


@pytest.mark.parametrize("name", MAKES)
def test_moments_in_bf16_are_rounded_after_an_update_in_fp32(name: str, monkeypatch):
    monkeypatch.setattr("xtrain.plan.groups.ELEMENTS_AT_ONCE", 8)  # two rows at a time, and one that is left
    start = gradients(1, 5, 4)[0]
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    stored = MAKES[name]([{"params": [ours], "weight_decay": 0.1}], Storage("bf16"))
    plain: LocalOptimizer = MAKES[name]([{"params": [theirs], "weight_decay": 0.1}], Storage())
    for gradient in gradients(10, 5, 4):
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        for moment in plain.moments:
            if theirs in plain.state and moment in plain.state[theirs]:
                plain.state[theirs][moment] = plain.state[theirs][moment].bfloat16().float()
        stored.step()
        plain.step()
    assert torch.equal(ours, theirs)
    assert {stored.state[ours][moment].dtype for moment in stored.moments} == {torch.bfloat16}


def test_random_bits_are_those_of_splitmix64():
    """The first numbers of the stream that begins at 1234567 (its authors' own test vector)."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    found = random_bits(torch.arange(1, 4), 1234567)
    assert found.tolist() == [number >> 48 for number in expected]


def test_rounding_at_random_is_right_on_average():
    """4 standard deviations of a mean of 2**16 draws; bf16 itself, infinities and NaN stay as they are."""
    count, bits = 2**16, random_bits(torch.arange(2**16), 3)
    for value in (1.001, -3.1416, 1e-30, 1 + 2**-8):
        low, high = sorted({float(each) for each in rounded(torch.full((count,), value), bits)})
        share = (float(torch.tensor(value)) - low) / (high - low)
        mean = float(rounded(torch.full((count,), value), bits).double().mean())
        spread = (high - low) * (share * (1 - share) / count) ** 0.5
        assert abs(mean - float(torch.tensor(value))) < 4 * spread + (high - low) * 2**-17
    kept = torch.tensor([1.5, -0.0, float("inf"), float("-inf"), float("nan")])
    assert torch.equal(rounded(kept, torch.full((5,), 0xFFFF, dtype=torch.int32))[:4], kept.bfloat16()[:4])
    assert rounded(kept, torch.full((5,), 0xFFFF, dtype=torch.int32))[4].isnan()


@pytest.mark.parametrize("name", MAKES)
def test_small_updates_count_where_weights_are_rounded_at_random(name: str, monkeypatch):
    """Three hundred updates of 1/50 of the distance of two numbers, all in one direction: rounded to the nearest they
    are lost. What is drawn does not depend on how many rows are updated at once."""
    moved = {}
    for rows in (3, 2**24):
        monkeypatch.setattr("xtrain.plan.groups.ELEMENTS_AT_ONCE", rows)
        weight, progress = nn.Parameter(torch.ones(8, 64, dtype=torch.bfloat16)), Progress()
        storage = Storage("", StochasticRounding([("w", weight)], 1, progress))
        lost = nn.Parameter(torch.ones(8, 64, dtype=torch.bfloat16))
        optimizers = [MAKES[name]([{"params": [w]}], s) for w, s in ((weight, storage), (lost, Storage()))]
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 2**-7 / 50 * (0.1 if name == "sgd" else 1)
        for step in range(300 if rows > 3 else 5):
            progress.step = step
            for each, optimizer in zip((weight, lost), optimizers, strict=True):
                each.grad = torch.full_like(each, -1.0)
                optimizer.step()
            if step == 4:
                moved[rows] = weight.detach().clone()
    assert torch.equal(*moved.values()) and len(set(moved[3].flatten().tolist())) > 1
    assert float(lost.detach().mean()) == 1
    assert float(weight.detach().double().mean() - 1) == pytest.approx(300 * 2**-7 / 50, rel=0.1)
