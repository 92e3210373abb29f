"""Rounded matrices and inputs: torchao's fake-quantized linear, bit for bit, with every gradient."""

from typing import Any

import pytest
import torch

from xtrain.dsl.schema.precision import Qat
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.layers import Linear
from xtrain.runtime.nn.number_formats import SharedScales
from xtrain.runtime.nn.rounding import FloatMatrix, RoundedMatrix, in_floats

ROWS = [(bits, group, activations) for bits in (4, 8) for group in (32, "row") for activations in ("none", "int8")]


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x [2, 24, 64], W [48, 64], and the gradient of their product: of many magnitudes, with rows of zeros."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (numbers * 10 ** (4 * torch.rand(shape, generator=generator, dtype=torch.float64) - 3)).to(dtype)

    x, weight, gradient = drawn(2, 24, 64), drawn(48, 64), drawn(2, 24, 48)
    x[0, 3] = weight[5] = gradient[1, 5] = 0
    return x, weight, gradient


def linear(weight: torch.Tensor, qat: Qat) -> Linear:
    made = Linear(64, 48).to(weight.dtype)
    made.weight.data = weight.clone()
    made.scaled = (FloatMatrix if qat.floats else RoundedMatrix)(qat, SharedScales(Axes()))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("bits", "group", "activations"), ROWS)
def test_products_and_gradients_are_torchaos(bits, group, activations, dtype):
    pytest.importorskip("torchao")
    from torchao.quantization.qat import IntxFakeQuantizeConfig
    from torchao.quantization.qat.linear import FakeQuantizedLinear

    x, weight, gradient = inputs(dtype)
    plain = torch.nn.Linear(64, 48, bias=False, dtype=dtype)
    plain.weight.data = weight.clone()
    granularity: dict[str, Any] = {"granularity": "per_channel"} if group == "row" else {"group_size": group}
    of_weights = IntxFakeQuantizeConfig(getattr(torch, f"int{bits}"), **granularity, is_symmetric=True)
    of_inputs = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    theirs = FakeQuantizedLinear.from_linear(plain, of_inputs if activations == "int8" else None, of_weights)
    ours = linear(weight, Qat(weights="int4" if bits == 4 else "int8", group=group, activations=activations))
    given, own = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, made = theirs(given), ours(own)
    out.backward(gradient)
    made.backward(gradient)
    assert torch.equal(made, out)
    assert own.grad is not None and given.grad is not None and torch.equal(own.grad, given.grad)
    assert ours.weight.grad is not None and theirs.weight.grad is not None
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
    assert not torch.equal(out, torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_floats_and_gradients_are_torchaos(form, dtype):
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    def theirs(x: torch.Tensor) -> torch.Tensor:
        if form == "mxfp4":
            return MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL).dequantize(dtype)
        scale = per_tensor_amax_to_scale(x.abs().max())
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(dtype)

    x, weight, gradient = inputs(dtype)
    x[1, 7] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], dtype=dtype).repeat(8)  # between two numbers
    ours, given = linear(weight, Qat(weights=form, activations=form)), x.clone().requires_grad_()
    out, rounded_x, rounded_weight = ours(given), theirs(x.view(48, 64)), theirs(weight)
    out.backward(gradient)
    assert torch.equal(out, (rounded_x @ rounded_weight.t()).view_as(out))
    assert given.grad is not None and ours.weight.grad is not None
    assert torch.equal(given.grad, gradient @ rounded_weight)
    assert torch.equal(ours.weight.grad, gradient.view(48, 48).t() @ rounded_x)
    weights_alone = linear(weight, Qat(weights=form))(x)
    assert torch.equal(weights_alone, (x.view(48, 64) @ rounded_weight.t()).view_as(out))


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_floats_of_zeros_are_zeros_and_rounding_twice_changes_nothing(form):
    assert torch.equal(in_floats(torch.zeros(4, 32), form, ()), torch.zeros(4, 32))
    once = in_floats(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), form, ())
    assert torch.equal(in_floats(once, "mxfp4", ()), once) == (form == "mxfp4") and len(once.unique()) < 8 * 64


def test_a_matrix_on_its_grid_stays_as_it_is():
    """Rounded once, it is rounded to the same numbers again; and so is an integer · scale by itself."""
    _, weight, _ = inputs(torch.float32)
    matrix = RoundedMatrix(Qat(weights="int8", group=16), SharedScales(Axes()))
    once = matrix._weight(weight)
    integers = torch.randint(-127, 128, (48, 4, 16), generator=torch.Generator().manual_seed(1)).float()
    integers[..., 0] = -127.5  # the largest magnitude of a group
    on_grid = (integers * 0.125).view(48, 64)
    kept = on_grid.view(48, 4, 16)[..., 1:]
    assert torch.equal(matrix._weight(on_grid).view(48, 4, 16)[..., 1:], kept)
    assert float((once - weight).abs().max()) > 0 and torch.isfinite(once).all()


@pytest.mark.parametrize("activations", ["none", "int8"])
def test_frozen_parts_get_no_gradient(activations):
    x, weight, gradient = inputs(torch.float32)
    matrix = RoundedMatrix(Qat(weights="int4", group=32, activations=activations), SharedScales(Axes()))
    matrix.product(x, weight.requires_grad_()).backward(gradient)
    own = weight.grad
    matrix.product(x.requires_grad_(), weight.detach()).backward(gradient)
    assert own is not None and x.grad is not None
    both = weight.detach().clone().requires_grad_()
    matrix.product(x.detach(), both).backward(gradient)
    assert torch.equal(both.grad, own)  # pyright: ignore
