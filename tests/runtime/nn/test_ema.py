"""Averages in one process: their arithmetic, and the exchange with the weights, which gives back every bit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from xtrain.runtime.nn.averages import Weights, keep_average, share_of, trade_halves


class Toy(nn.Module):
    """A parameter and a buffer that belongs to the state."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 6, dtype=dtype))
        self.register_buffer("bias", torch.randn(5))
        self.parts = (self,)


def average_of(model: Any, decay: float = 0.999, format: str = "fp32", **given: Any) -> Any:
    options = {"every": 1, "eval": True, "publish": True} | given
    plan = SimpleNamespace(nodes=())
    return keep_average(plan, model, decay=decay, format=format, **options)


@pytest.mark.parametrize("decay", [0.5, 0.999, 1 - 1e-9])
def test_shares_of_a_weighted_mean(decay):
    """The k-th weights weigh `decay` times less for every update behind them, and all together one."""
    for updates in (1, 2, 3, 50):
        shares = [0.0] * updates
        for number in range(1, updates + 1):
            share = share_of(number, decay)
            shares = [each * (1 - share) for each in shares]
            shares[number - 1] = share
        assert sum(shares) == pytest.approx(1, abs=1e-12)
        assert shares == pytest.approx([shares[-1] * decay ** (updates - n) for n in range(1, updates + 1)], rel=1e-6)
    assert share_of(1, decay) == 1


def test_weights_that_a_run_begins_with_have_no_share():
    model = Toy()
    ema = average_of(model)
    with torch.no_grad():
        model.weight.fill_(3.0)
        ema.update()
        model.weight.fill_(4.0)
        ema.update()
    assert torch.allclose(ema.averages["weight"], torch.full((7, 6), 3.50025), atol=1e-5)
    ema.restart()
    assert ema.updates == 0 and torch.equal(ema.averages["weight"], model.weight)


def test_an_average_of_bf16_weights_moves_by_less_than_bf16_can_tell():
    model = Toy(torch.bfloat16)
    ema = average_of(model)
    with torch.no_grad():
        for value in (1.0, 1.0, 1.0078125):
            model.weight.fill_(value)
            ema.update()
        model.weight.fill_(1.0)
        for _ in range(100):
            ema.update()
    average = ema.averages["weight"]
    assert average.dtype == torch.float32 and 1.0 < average[0, 0] < 1.001
    assert average[0, 0].bfloat16() == 1.0  # in which it would not have moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_and_averages_trade_places_and_back_bit_for_bit(dtype):
    model = Toy(dtype)
    ema = average_of(model, format="fp64" if dtype == torch.float64 else "fp32")
    for _ in range(3):
        with torch.no_grad():
            model.weight.add_(torch.randn_like(model.weight))
        ema.update()
    weight, bias, average = model.weight.clone(), model.bias.clone(), ema.averages["weight"].clone()
    waited: list[torch.Tensor] = []
    saver: Any = SimpleNamespace(await_copy=lambda: waited.append(model.weight.clone()))
    with Weights(ema=ema, saver=saver).in_place() as which:
        assert which == "averaged" and torch.equal(model.weight, average.to(dtype))
        assert not torch.equal(model.weight, weight)
    assert torch.equal(waited[0], weight)  # before anything had moved
    assert torch.equal(model.weight, weight) and torch.equal(model.bias, bias)
    assert torch.equal(ema.averages["weight"], average)


def test_an_error_meanwhile_leaves_nothing_traded():
    model = Toy()
    ema = average_of(model)
    ema.update()
    with torch.no_grad():
        model.weight.zero_()
    with pytest.raises(ZeroDivisionError), Weights(ema=ema, saver=None).in_place():
        raise ZeroDivisionError
    assert not model.weight.any()


def test_before_the_first_update_the_trained_weights_are_looked_at():
    ema = average_of(Toy(), every=2)
    with Weights(ema=ema, saver=None).in_place() as which:
        assert which == "trained"


def test_halves_are_exact_for_every_kind_of_number():
    """Ties, carries into the exponent, zeros of both signs, subnormal numbers: every lower half there is, and more."""
    lower = torch.arange(2**16, dtype=torch.int32)
    upper = torch.tensor([0x3F80, 0x3F7F, 0x0000, -0x8000, 0x7F00, -0x4081, 0x0001], dtype=torch.int32)
    average = ((upper[:, None] << 16) | lower[None]).contiguous().view(torch.float32)
    weight = torch.randint(-(2**15), 2**15, average.shape, dtype=torch.int16).view(torch.bfloat16)
    before = average.clone(), weight.clone()
    trade_halves(average, weight, back=False)
    away = (weight.double() - before[0].double()).abs()
    nearest = (before[0].bfloat16().double() - before[0].double()).abs()
    assert torch.equal(away, nearest)  # rounded, not cut off
    trade_halves(average, weight, back=True)
    for ours, theirs in zip((average, weight), before, strict=True):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
