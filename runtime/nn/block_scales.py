"""Products in mxfp8: e4m3 numbers, 32 of which share a power of two along the dim that a product sums over.

OCP Microscaling Formats 1.0. A scale is the least power of two that keeps the largest of its numbers within e4m3
("RCEIL" in torchao and in cuBLAS' documentation of block scaling). Shapes: a [M, I] · b [I, N].
"""

from typing import Final, NamedTuple

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import pad

from xtrain.dsl.schema.precision import BLOCK, Recipe
from xtrain.runtime.base.device import device_type
from xtrain.runtime.nn.number_formats import E4M3, ScaledMatrix, largest_of

MOST: Final = torch.finfo(E4M3).max
BIAS: Final = 127
# Codes of scales for blocks with an infinite number and with NaN.
INFINITE, NAN = 254, 255


@frozen(eq=False)
class BlockScaledMatrix(ScaledMatrix):
    """Products of a `Linear` with scales of blocks. Ranks have whole blocks and share no scales."""

    recipe: Recipe

    def forward(self, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        return multiplied(x_TK, weight_NK.t())

    def input_gradient(self, grad_TN: Tensor, weight_NK: Tensor, x_TK: Tensor | None = None) -> Tensor:
        return multiplied(grad_TN, weight_NK)

    def weight_gradient(self, grad_TN: Tensor, x_TK: Tensor, weight_NK: Tensor | None = None) -> Tensor:
        if not self.recipe.weight_gradient:
            return grad_TN.t() @ x_TK
        if missing := -len(x_TK) % BLOCK:
            grad_TN, x_TK = pad(grad_TN, (0, 0, 0, missing)), pad(x_TK, (0, 0, 0, missing))
        return multiplied(grad_TN.t(), x_TK)


class Blocks(NamedTuple):
    """A matrix in mxfp8: e4m3 codes and biased exponents, uint8, one for each block along `dim`."""

    codes: Tensor
    exponents: Tensor
    dim: int

    @classmethod
    def of(cls, x: Tensor, dim: int) -> "Blocks":
        """Encode a matrix; its extent along `dim` is divisible by `BLOCK`."""
        parts, inner = x.unflatten(dim, (-1, BLOCK)), dim + 1
        power, factor = _powers(parts, inner, MOST)
        codes = (parts.to(factor.dtype) * factor).clamp_(-MOST, MOST).to(E4M3)
        return cls(codes.flatten(dim, inner), power.to(torch.uint8).squeeze(inner), dim)

    def values(self, format: torch.dtype) -> Tensor:
        """Return the numbers that the codes stand for."""
        exponents = self.exponents.unsqueeze(self.dim + 1)
        scale = _scale_of(exponents.to(torch.float32)).to(format)
        return self.codes.to(format).unflatten(self.dim, (-1, BLOCK)).mul_(scale).flatten(self.dim, self.dim + 1)


def _powers(parts: Tensor, dim: int, most: float) -> tuple[Tensor, Tensor]:
    """Return the biased exponents of the scales that keep the largest number along `dim` within `most`, and the factors
    by which numbers are multiplied for it."""
    scale = largest_of(parts, dim).to(torch.promote_types(parts.dtype, torch.float32)) / most
    power = torch.ceil(torch.log2(scale)).clamp_(-BIAS, BIAS).add_(BIAS)
    power = torch.where(scale.isinf(), INFINITE, power)
    factor = torch.where(power == 0, 1.0, torch.where(power == INFINITE, 2.0**-BIAS, torch.exp2(BIAS - power)))
    return torch.where(scale.isnan(), NAN, power), factor


def _scale_of(power: Tensor) -> Tensor:
    return torch.exp2(power - BIAS).masked_fill_(power == NAN, torch.nan)


def block_powers(parts: Tensor, dim: int, most: float) -> tuple[Tensor, Tensor]:
    """Return the factors that bring the numbers along `dim` within `most`, powers of two, and the scales of the
    results."""
    power, factor = _powers(parts, dim, most)
    return factor, _scale_of(power)


def multiplied(a_MI: Tensor, b_IN: Tensor) -> Tensor:
    """Return a · b, both with scales of blocks along I."""
    if device_type(a_MI) == "cuda":
        return _on_cuda(Blocks.of(a_MI, 1), Blocks.of(b_IN, 0), a_MI.dtype)
    return Blocks.of(a_MI, 1).values(a_MI.dtype) @ Blocks.of(b_IN, 0).values(a_MI.dtype)


def _on_cuda(a: Blocks, b: Blocks, format: torch.dtype) -> Tensor:
    """Return a · b by torch's kernel, for compute capability 10."""
    left, right = a.codes.contiguous(), b.codes.t().contiguous().t()  # as the kernel takes them
    scales = [swizzled(each).view(torch.float8_e8m0fnu) for each in (a.exponents, b.exponents.t())]
    out = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        left, right, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16
    )
    return out.to(format)


def swizzled(exponents_RG: Tensor) -> Tensor:
    """Return the scales of R rows in the order of cuBLAS: tiles of 128 rows and 4 scales, in which rows 0, 32, 64, 96
    are next to each other; padded by zeros to whole tiles."""
    rows, groups = exponents_RG.shape
    whole = pad(exponents_RG, (0, -groups % 4, 0, -rows % 128))
    tiles = whole.unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, 4))  # [tile, 4, 32, tile, 4]
    return tiles.permute(0, 3, 2, 1, 4).flatten()
