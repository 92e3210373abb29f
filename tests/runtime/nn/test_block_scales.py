"""Products in mxfp8: torchao's, bit for bit, in the forward and in every gradient; and what kernels are given."""

import pytest
import torch

from xtrain.dsl.schema.precision import RECIPES
from xtrain.runtime.nn import block_scales
from xtrain.runtime.nn.block_scales import Blocks, BlockScaledMatrix, swizzled

NAMES = ("mxfp8", "mxfp8_with_gw_hp")


def drawn(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Numbers of many magnitudes, with a row of zeros, and blocks of numbers near the ends of exponents."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in shapes:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        x *= 10 ** (4 * torch.rand(shape, generator=generator, dtype=torch.float64) - 3)
        x[-1] = 0
        x[..., 0, :32] *= 1e-37
        x[..., 1, 32:] *= 1e30
        made.append(x.to(dtype))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recipe", NAMES)
def test_products_and_gradients_are_torchaos(recipe, dtype):
    pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats import config
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    x, weight, gradient = drawn(dtype, (2, 32, 64), (96, 64), (2, 32, 96))
    theirs, ours = ([each.clone().requires_grad_() for each in (x, weight)] for _ in range(2))
    e4m3 = (torch.float8_e4m3fn,) * 3
    casts = config.MXFP8Dim0CastKernelChoice.TORCH, config.MXFP8Dim1CastKernelChoice.TORCH
    how = (KernelPreference.EMULATED, *casts, config.ScaleCalculationMode.RCEIL, recipe == NAMES[1])
    wanted = mx_mm.apply(*theirs, *e4m3, 32, *how)
    out = BlockScaledMatrix(RECIPES[recipe]()).product(*ours)
    wanted.backward(gradient)
    out.backward(gradient)
    for own, other in ((out, wanted), *((a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))):
        # Some processors add numbers near the end of bf16 in an order that gives infinity minus infinity.
        torch.testing.assert_close(own, other, rtol=0, atol=0, equal_nan=True)


def test_codes_of_what_is_not_finite_stay_so():
    x = torch.ones(3, 64)
    x[0, 3], x[1, 40] = torch.nan, torch.inf
    blocks = Blocks.of(x, 1)
    assert blocks.exponents.tolist() == [[255, 119], [119, 254], [119, 119]]
    values = blocks.values(torch.float32)
    assert values[0, :32].isnan().all() and torch.equal(values[2], x[2])
    assert not values[1, 32:].isfinite().all() or values[1, 40] > 1e38


def test_tokens_that_fill_no_block_are_padded():
    generator = torch.Generator().manual_seed(1)
    grad, x = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((40, 32), (40, 64)))
    matrix = BlockScaledMatrix(RECIPES["mxfp8"]())
    found, exact = matrix.weight_gradient(grad, x), grad.t() @ x
    assert 0 < float((found - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_kernels_are_given_what_they_take(recipe, dtype, monkeypatch):
    """Shapes, strides and scales, as torch checks them of tensors without values for CUDA."""
    monkeypatch.setattr(block_scales, "device_type", lambda x: "cuda")
    matrix = BlockScaledMatrix(RECIPES[recipe]())

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, weight, gradient = empty(40, 128), empty(64, 128), empty(40, 64)
    found = matrix.forward(x, weight), matrix.input_gradient(gradient, weight), matrix.weight_gradient(gradient, x)
    assert [(each.shape, each.dtype) for each in found] == [(each.shape, dtype) for each in (gradient, x, weight)]


def test_scales_are_in_the_order_of_the_kernel():
    """Byte of row r and scale g: tile (r // 128, g // 4), then row r % 32, then r % 128 // 32, then g % 4."""
    scales = torch.arange(200 * 6).remainder(251).to(torch.uint8).view(200, 6)
    out = swizzled(scales)
    assert out.numel() == 256 * 8
    for r, g in ((0, 0), (33, 1), (127, 3), (128, 4), (199, 5)):
        place = ((r // 128 * 2 + g // 4) * 128 + r % 32 * 4 + r % 128 // 32) * 4 + g % 4
        assert out[place] == scales[r, g]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", NAMES)
def test_kernels_multiply_what_is_emulated(recipe):
    if torch.cuda.get_device_capability() < (10, 0):
        pytest.skip("needs compute capability 10.0")
    generator = torch.Generator().manual_seed(2)
    x, weight, gradient = (torch.randn(shape, generator=generator) for shape in ((40, 128), (64, 128), (40, 64)))
    matrix, found = BlockScaledMatrix(RECIPES[recipe]()), []
    for device in ("cpu", "cuda"):
        a, b, c = (each.to(device, torch.bfloat16) for each in (x, weight, gradient))
        found.append((matrix.forward(a, b), matrix.input_gradient(c, b), matrix.weight_gradient(c, a)))
    for emulated, ours in zip(*found, strict=True):
        assert float((ours.cpu().float() - emulated.float()).norm() / emulated.float().norm()) < 5e-3
