"""The gated delta rule in chunks: what it computes one position after the other, and the gradients of that."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from xtrain.runtime.nn import delta_rule as module
from xtrain.runtime.nn.delta_net import Mixed, _mix
from xtrain.runtime.nn.delta_rule import Inputs, delta_rule, delta_rule_gradients, delta_step

ROWS, POSITIONS, KEYS, VALUES = 3, 150, 8, 6
# Documents that end inside a chunk, at its border, and one after the other.
BORDERS = ((40, 41), (64, 130), (100,))


def inputs(seed: int = 0) -> tuple[Inputs, Tensor]:
    drawn = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(ROWS, POSITIONS, *shape, dtype=torch.float64, generator=drawn)

    keys = torch.nn.functional.normalize(normal(KEYS), dim=-1)
    found = Inputs(normal(KEYS), keys, normal(VALUES), -normal().square() / 9, normal().sigmoid())
    document_RT = torch.zeros(ROWS, POSITIONS, dtype=torch.int32)
    for row, borders in enumerate(BORDERS):
        for border in borders:
            document_RT[row, border:] += 1
    return found, document_RT


def one_by_one(x: Inputs, document_RT: Tensor) -> tuple[Tensor, Tensor]:
    state, found = torch.zeros(ROWS, KEYS, VALUES, dtype=torch.float64), []
    for place in range(x.q_RTK.shape[1]):
        if place:
            state = state * (document_RT[:, place] == document_RT[:, place - 1])[:, None, None]
        state = state * x.g_RT[:, place].exp()[:, None, None]
        key, change = x.k_RTK[:, place], x.v_RTV[:, place] - torch.einsum("rk,rkv->rv", x.k_RTK[:, place], state)
        state = state + torch.einsum("rk,rv->rkv", key, change * x.b_RT[:, place, None])
        found.append(torch.einsum("rk,rkv->rv", x.q_RTK[:, place], state))
    return torch.stack(found, 1), state


def gaps(seed: int = 0) -> dict[str, float]:
    """The largest differences of outputs, states and gradients, relative to the largest number of each."""
    x, document_RT = inputs(seed)
    leaves = Inputs(*(each.clone().requires_grad_() for each in x))
    expected, state = one_by_one(leaves, document_RT)
    out, last = delta_rule(x, document_RT)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((expected * grad).sum(), leaves)
    pairs = {"outputs": (out, expected), "states": (last, state)}
    pairs |= dict(
        zip(Inputs._fields, zip(delta_rule_gradients(x, document_RT, grad), wanted, strict=True), strict=True)
    )
    return {name: float((a - b).abs().max() / b.abs().max()) for name, (a, b) in pairs.items()}


@pytest.mark.parametrize("seed", range(3))
def test_chunks_compute_what_positions_one_after_the_other_do(seed: int):
    assert max(gaps(seed).values()) < 1e-13


def test_a_step_continues_the_state():
    x, document_RT = inputs()
    expected, state = one_by_one(x, document_RT)
    end = POSITIONS - 3
    _, own = delta_rule(Inputs(*(each[:, :end] for each in x)), document_RT[:, :end])
    for place in range(end, POSITIONS):
        out = delta_step(Inputs(*(each[:, place : place + 1] for each in x)), own)
        assert torch.allclose(out[:, 0], expected[:, place], rtol=1e-12, atol=1e-12)
    assert torch.allclose(own, state, rtol=1e-12, atol=1e-12)


def _no_reset(chunks: module._Chunks) -> module._Chunks:
    logs = chunks.before_RNC.new_ones(())
    return chunks._replace(before_RNC=torch.where(chunks.before_RNC == 0, logs, chunks.before_RNC))


def _no_carry(chunks: module._Chunks) -> module._Chunks:
    return chunks._replace(kept_RN=torch.zeros_like(chunks.kept_RN), after_RNC=torch.zeros_like(chunks.after_RNC))


@pytest.mark.parametrize("mutate", [_no_reset, _no_carry])
def test_a_state_that_is_not_reset_or_not_carried_is_seen(monkeypatch: pytest.MonkeyPatch, mutate: Callable):
    right = module._chunked
    monkeypatch.setattr(module, "_chunked", lambda *given: mutate(right(*given)))
    assert gaps()["outputs"] > 1e-3


def test_a_wrong_decay_in_the_backward_is_seen(monkeypatch: pytest.MonkeyPatch):
    right = module._from_end
    monkeypatch.setattr(module, "_from_end", lambda x, dim: right(x, dim) - x)  # sums without the position itself
    found = gaps()
    assert found["g_RT"] > 1e-3 and max(value for name, value in found.items() if name != "g_RT") < 1e-13


def mixed(names: tuple[str, ...]) -> dict[str, Tensor]:
    """The gradients of some inputs of a layer's convolution and delta rule."""
    drawn = torch.Generator().manual_seed(3)
    widths = {"q_BSC": 4, "k_BSC": 4, "v_BSC": 6, "b_BSH": 2, "a_BSH": 2}
    values = {name: torch.randn(2, 20, width, dtype=torch.float64, generator=drawn) for name, width in widths.items()}
    for name, shape in (("q_conv_C1W", (4, 1, 3)), ("k_conv_C1W", (4, 1, 3)), ("v_conv_C1W", (6, 1, 3))):
        values[name] = torch.randn(*shape, dtype=torch.float64, generator=drawn)
    values |= {name: torch.randn(2, dtype=torch.float64, generator=drawn) for name in ("dt_bias_H", "a_log_H")}
    inputs = {name: values[name].requires_grad_(name in names) for name in Mixed._fields}
    document_BS = torch.tensor([[0] * 9 + [1] * 11, [2] * 20], dtype=torch.int32)
    out = _mix(document_BS, 4, 3, *inputs.values())
    return dict(zip(names, torch.autograd.grad(out.square().sum(), [inputs[name] for name in names]), strict=True))


@pytest.mark.parametrize("names", [("q_BSC",), ("v_conv_C1W",), ("a_log_H", "b_BSH"), ("k_BSC", "dt_bias_H")])
def test_frozen_inputs_of_a_layer_change_no_gradients(names: tuple[str, ...]):
    whole = mixed(Mixed._fields)
    for name, grad in mixed(names).items():
        assert torch.equal(grad, whole[name])
