"""Moments in 8 bits: codes and scales of torchao, over the blocks of a row."""

from hashlib import sha256

import pytest
import torch
from torch import Tensor, nn

from xtrain.components.optimizers.adamw8bit_torch import (
    AdamW8bitOptimizer,
    dequantised,
    numbers_of_codes,
    quantised,
)


def digest(tensor: Tensor) -> str:
    return sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def sample() -> Tensor:
    """Nine decades in rows of 512; a row of zeros, and a block of them."""
    i = torch.arange(24 * 512)
    numbers = ((i * 7919) % 10007 - 5003).float() / 10.0 ** ((i // 512) % 9)
    x_RC = numbers.view(24, 512)
    x_RC[3], x_RC[4, :256] = 0, 0
    return x_RC


@pytest.mark.parametrize(
    ("signed", "numbers", "codes", "scales"),
    [(True, "e732639a65f497b4", "f36255a8ba399ab5", "7db009ca2fd18e71"),
        (False, "305f002cc11278fb", "e0e467f733f8084a", "7db009ca2fd18e71")],
)  # fmt: skip
def test_codes_and_scales_are_those_of_torchao(signed: bool, numbers: str, codes: str, scales: str):
    """Digests of what torchao 0.18 makes of the same numbers, and of its maps, which bitsandbytes has as well."""
    map_, x_RC = numbers_of_codes(signed), sample() if signed else sample().abs()
    assert digest(map_) == numbers and len(map_) == 256
    found = quantised(x_RC, 256, map_)
    assert (digest(found[0]), digest(found[1])) == (codes, scales)
    assert found[1].shape == (24, 2) and found[0].dtype == torch.uint8
    again = dequantised(*found, map_)
    assert not again[3].any()
    largest = x_RC.abs().unflatten(-1, (2, 256)).amax(-1).repeat_interleave(256, -1)
    assert ((again - x_RC).abs() <= largest * 0.0071 + 1e-20).all()  # half of the widest distance in the map


def make(parameter: nn.Parameter, block: int, names: list[str]) -> AdamW8bitOptimizer:
    groups = [{"params": [parameter], "weight_decay": 0.1}]
    return AdamW8bitOptimizer(groups, 0.01, (0.9, 0.95), 1e-8, {id(parameter): "w"}, block, names)


def gradient(step: int) -> Tensor:
    i = torch.arange(16 * 512) * 7919 + step * 104729
    return (((i % 10007) - 5003).float() / 5003 * 10.0 ** -(step % 4)).view(16, 512)


# Digests of the codes of both moments behind ten steps of torchao 0.18, and weights in its first rows.
CODES = ("8d93f082def52139", "08e473385e3fa01f")
WEIGHTS = (
    -0.021170076, 0.013810501, 0.019771663, 0.012118036, -0.014993808, -0.018490516, -0.02127344, 0.019208789
)  # fmt: skip


def test_steps_are_those_of_torchao_to_the_last_bit(monkeypatch):
    """Its function of one parameter, not compiled: compilers round some sums once where it rounds them twice."""
    monkeypatch.setattr("xtrain.plan.groups.ELEMENTS_AT_ONCE", 1024)
    ours = nn.Parameter(gradient(11))
    optimizer, start = make(ours, 256, ["w"]), ours.detach().clone()
    for step in range(10):
        ours.grad = gradient(step)
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        optimizer.step()
    state = optimizer.state[ours]
    assert (digest(state["exp_avg"]), digest(state["exp_avg_sq"])) == CODES
    assert ours[:8, 5].tolist() == pytest.approx(WEIGHTS, rel=1e-6)

    torchao = pytest.importorskip("torchao.optim.subclass_8bit")
    from torchao.optim.adam import single_param_adam

    theirs, count = start, torch.tensor(0.0)
    average, square = (torchao.OptimState8bit.zeros(theirs.shape, signed, 256) for signed in (True, False))
    for step in range(10):
        count += 1
        lr = torch.tensor(0.01 / (step + 1))
        single_param_adam(theirs, gradient(step), count, average, square, None, lr, 0.9, 0.95, 0.1, 1e-8, True, False)
    assert torch.equal(ours.detach(), theirs)
    assert torch.equal(state["exp_avg"], average.codes) and torch.equal(state["exp_avg_sq"], square.codes)
    assert torch.equal(state["exp_avg_scale"].flatten(), average.scale)
    assert (digest(average.codes), digest(square.codes)) == CODES
    assert theirs[:8, 5].tolist() == pytest.approx(WEIGHTS, rel=1e-6)


def test_without_codes_it_is_adamw_and_with_them_near_it():
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(8, 512, generator=generator, dtype=torch.float64)
    plain, coded, expected = (nn.Parameter(start.clone()) for _ in range(3))
    theirs = torch.optim.AdamW([expected], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    optimizers = (make(plain, 128, []), make(coded, 128, ["w"]))
    for _ in range(10):
        gradient = torch.randn(8, 512, generator=generator, dtype=torch.float64)
        for each in (plain, coded, expected):
            each.grad = gradient.clone()
        for optimizer in (*optimizers, theirs):
            optimizer.step()
    torch.testing.assert_close(plain, expected, rtol=1e-12, atol=1e-13)
    assert optimizers[0].state[plain]["exp_avg"].dtype == torch.float64
    moved, gap = (expected - start).norm(), (coded - expected).norm()
    assert 1e-4 < gap / moved < 0.03
