"""Products in fp8: torchao's, bit for bit, in the forward and in every gradient; and what scales are of."""

from dataclasses import replace

import pytest
import torch

from xtrain.dsl.schema.precision import RECIPES
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.nn import number_formats as fp8
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.build import check_device
from xtrain.runtime.nn.layers import Linear
from xtrain.runtime.nn.number_formats import Fp8Matrix, SharedScales
from xtrain.runtime.nn.recompute import SAVED, RecomputeFunction

RECIPE_NAMES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def inputs(dtype: torch.dtype, outputs: int = 48, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """x [2, 24, 32], W [outputs, 32], and the gradient of their product: of many magnitudes, with a row of zeros."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (numbers * 10 ** (4 * torch.rand(shape, generator=generator, dtype=torch.float64) - 3)).to(dtype)

    x, weight, gradient = drawn(2, 24, 32), drawn(outputs, 32), drawn(2, 24, outputs)
    x[0, 3] = 0
    gradient[1, 5] = 0
    return x, weight, gradient


def multiplied(recipe: str, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = Fp8Matrix(RECIPES[recipe](), SharedScales(Axes())).product(x, weight)
    out.backward(gradient)
    assert x.grad is not None and weight.grad is not None
    return [out.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_products_and_gradients_are_torchaos(recipe, dtype):
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    x, weight, gradient = inputs(dtype)
    plain = torch.nn.Linear(32, 48, bias=True, dtype=dtype)
    plain.weight.data = weight.clone()
    bias = plain.bias.detach().clone()
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    theirs, given = Float8Linear.from_float(plain, config), x.clone().requires_grad_()
    out = theirs(given)
    out.backward(gradient)
    ours, own = Linear(32, 48, bias=True).to(dtype), x.clone().requires_grad_()
    ours.weight.data, ours.bias.data = weight.clone(), bias
    ours.scaled = Fp8Matrix(RECIPES[recipe](), SharedScales(Axes()))
    made = ours(own)
    made.backward(gradient)
    assert torch.equal(made, out)
    assert torch.equal(own.grad, given.grad)
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
    assert torch.equal(ours.bias.grad, theirs.bias.grad)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_products_are_near_those_of_more_bits(recipe):
    generator = torch.Generator().manual_seed(1)
    x, weight, gradient = (torch.randn(shape, generator=generator) for shape in ((64, 32), (48, 32), (64, 48)))
    found = multiplied(recipe, x, weight, gradient)
    exact = (x @ weight.T, gradient @ weight, gradient.T @ x)
    for ours, wanted in zip(found, exact, strict=True):
        distance = float((ours - wanted).norm() / wanted.norm())
        assert distance < 0.08
    coarse = 1e-3 if recipe != "rowwise_with_gw_hp" else 0
    assert float((found[2] - exact[2]).abs().max()) >= coarse
    assert torch.equal(found[2], exact[2]) == (recipe == "rowwise_with_gw_hp")


def test_largest_numbers_stay_within_the_format():
    """As exactly 448 in e4m3, of which there is no larger one; and a matrix of zeros stays one."""
    x = torch.full((16, 16), 3e38)
    out, *_ = multiplied("tensorwise", x, torch.eye(16), torch.zeros(16, 16))
    assert torch.isfinite(out).all() and torch.allclose(out, x, rtol=1e-6)
    out, grad_x, grad_weight = multiplied("rowwise", torch.zeros(16, 16), torch.zeros(16, 16), torch.zeros(16, 16))
    assert not out.any() and not grad_x.any() and not grad_weight.any()
    x[3, 4] = torch.nan
    assert multiplied("tensorwise", x, torch.eye(16), torch.zeros(16, 16))[0].isnan().all()


def test_only_gradients_that_are_wanted_are_computed_and_kept(monkeypatch):
    called = []
    for name in ("input_gradient", "weight_gradient"):
        real = getattr(Fp8Matrix, name)
        monkeypatch.setattr(Fp8Matrix, name, lambda *args, real=real, name=name: called.append(name) or real(*args))
    x, weight, gradient = inputs(torch.float32)
    matrix = Fp8Matrix(RECIPES["rowwise"](), SharedScales(Axes()))
    out = matrix.product(x.requires_grad_(), weight)
    assert [saved is None for saved in out.grad_fn.saved_tensors] == [True, False]  # pyright: ignore
    out.backward(gradient)
    out = matrix.product(x.detach(), weight.requires_grad_())
    assert [saved is None for saved in out.grad_fn.saved_tensors] == [False, True]  # pyright: ignore
    out.backward(gradient)
    assert called == ["input_gradient", "weight_gradient"]


def test_selective_recomputation_keeps_the_product(monkeypatch):
    made = []
    real = Fp8Matrix.forward
    monkeypatch.setattr(Fp8Matrix, "forward", lambda self, *args: made.append(1) or real(self, *args))
    x, weight, gradient = inputs(torch.float32)
    matrix = Fp8Matrix(RECIPES["tensorwise"](), SharedScales(Axes()))
    x.requires_grad_(), weight.requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(matrix.product(torch.sin(x), weight))

    found = {}
    for save in (None, ("matmul",), ()):
        call = block if save is None else RecomputeFunction(save=frozenset(op for word in save for op in SAVED[word]))
        made.clear()
        out = call(x) if save is None else call(block, x)  # pyright: ignore
        found[save] = (*torch.autograd.grad(out, (x, weight), gradient), len(made))
    assert [each[2] for each in found.values()] == [1, 1, 2]
    for one, other in zip(found[None], found["matmul",], strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_compiled_products_are_the_same(recipe):
    torch.compiler.reset()
    x, weight, gradient = inputs(torch.float32)
    matrix = Fp8Matrix(RECIPES[recipe](), SharedScales(Axes()))
    x.requires_grad_(), weight.requires_grad_()
    compiled = torch.compile(lambda x, weight: torch.sin(matrix.product(torch.sin(x), weight)), fullgraph=True)
    plain = torch.sin(matrix.product(torch.sin(x), weight))
    out = compiled(x, weight)
    assert (out - plain).abs().max() <= 1e-5
    ours = torch.autograd.grad(out, (x, weight), gradient)
    for one, other in zip(ours, torch.autograd.grad(plain, (x, weight), gradient), strict=True):
        assert float((one - other).norm() / other.norm()) <= 1e-3  # a number that is rounded to the other side


@pytest.mark.parametrize(("recipe", "first"), [("rowwise", (8, 9)), ("mxfp8", (10, 0))])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_a_device_without_such_products_is_refused(monkeypatch, capability, recipe, first):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    chosen, own = RECIPES[recipe](), f"{capability[0]}.{capability[1]}"
    check_device(torch.device("cpu"), chosen)
    if capability >= first:
        check_device(torch.device("cuda", 0), chosen)
        return
    says = rf"A100 has no {recipe} products: .* {own}, below {chosen.needs}; use compute bf16"
    with pytest.raises(EnvironmentFault, match=says) as it:
        check_device(torch.device("cuda", 0), chosen)
    assert it.value.code == "X443"


@pytest.mark.parametrize("tokens", [64, 40], ids=["even", "padded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_kernels_are_given_what_they_take(recipe, dtype, tokens, monkeypatch):
    """Shapes, strides and scales, as torch checks them of tensors without values for CUDA."""
    called = []
    real = fp8._kernel
    monkeypatch.setattr(fp8, "_kernel", lambda *args: called.append(args[4:]) or real(*args))
    monkeypatch.setattr(fp8, "device_type", lambda x: "cuda")
    matrix = Fp8Matrix(RECIPES[recipe](), SharedScales(Axes()))

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, weight, gradient = empty(tokens, 128), empty(64, 128), empty(tokens, 64)
    found = matrix.forward(x, weight), matrix.input_gradient(gradient, weight), matrix.weight_gradient(gradient, x)
    assert [each.shape for each in found] == [gradient.shape, x.shape, weight.shape]
    assert {each.dtype for each in found} == {dtype}
    with pytest.raises(RuntimeError, match="divisible by 16"):
        matrix.input_gradient(empty(tokens, 64), empty(64, 120))
    assert [fast for _, fast in called[:3]] == [True, False, False]
    given = torch.bfloat16 if recipe != "tensorwise" else dtype
    assert {format for format, _ in called} == {given}


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 40], ids=["even", "padded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_kernels_multiply_what_is_emulated(recipe, dtype, tokens):
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randn(shape, generator=generator) for shape in ((tokens, 128), (64, 128), (tokens, 64))]
    here = multiplied(recipe, *(each.to(dtype) for each in drawn))
    there = multiplied(recipe, *(each.to("cuda", dtype) for each in drawn))
    # Codes are equal; sums of products are in another order, and kernels that scale by rows give bf16.
    for ours, emulated in zip(there, here, strict=True):
        assert ours.dtype == dtype
        assert float((ours.cpu().float() - emulated.float()).norm() / emulated.float().norm()) < 5e-3
