"""Rounded matrices and inputs of products, for quantization-aware training.

Integers: a weight becomes integer · scale, where a group of a row shares the scale: its largest magnitude / 7.5 (int4)
or 127.5 (int8). An input becomes (integer - zero) · scale, with the scale and the zero point of its token's range.
Gradients pass through the rounding, and are zero where it saturates. Formulas and order of operations follow torchao
(`IntxFakeQuantizer`; Jacob et al. 2018, arXiv 1712.05877).

4-bit floats (E2M1): weights and inputs become float · scale of a group of a row, and gradients pass through. mxfp4: the
scale of 32 numbers is the least power of two that keeps the largest of them within 6 (OCP Microscaling Formats 1.0,
"RCEIL"). nvfp4: the scale of 16 numbers is an E4M3 number times a scale of the whole matrix, its largest magnitude /
(448 · 6). Formulas and order of operations follow torchao (`MXTensor`, `NVFP4Tensor`).
"""

from typing import Final, NamedTuple

import torch
from attrs import frozen
from torch import Tensor

from xtrain.dsl.schema.precision import FLOATS, ROW, Qat
from xtrain.runtime.nn.block_scales import block_powers
from xtrain.runtime.nn.number_formats import E4M3, Groups, ScaledMatrix, SharedScales, largest_of, over_ranks

INPUTS: Final = (-128, 127)
# Largest E2M1 number.
MOST: Final = 6.0


class IntegerGrid(NamedTuple):
    """Scales of groups of numbers, the integers of 0, and the ends of the integers."""

    scale: Tensor
    zero: Tensor | None
    low: int
    high: int

    def integers(self, x: Tensor) -> Tensor:
        """Return the integers of x [.., groups, numbers], before saturation, as floating point numbers."""
        rounded = (x * self.scale.reciprocal()).round_()
        return rounded if self.zero is None else rounded.add_(self.zero)

    def values(self, x: Tensor) -> Tensor:
        """Return integer · scale, in the number format of x."""
        rounded = self.integers(x).clamp_(self.low, self.high).to(x.dtype)
        if self.zero is not None:
            rounded.sub_(self.zero)
        return rounded.mul_(self.scale) if rounded.dtype == self.scale.dtype else (rounded * self.scale).to(x.dtype)

    def gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of x; grad: the gradient of its values."""
        integers = self.integers(x)
        saturated = (integers < self.low) | (integers > self.high)
        del integers
        scaled = (grad * self.scale).to(grad.dtype).to(self.scale.dtype)
        return scaled.masked_fill_(saturated, 0).mul_(self.scale.reciprocal()).to(grad.dtype)


def weight_grid(weight_NGM: Tensor, bits: int, groups: Groups = ()) -> IntegerGrid:
    """Return the grid of a matrix [N, G, M] with G groups in a row. groups: ranks that hold the rest of the rows."""
    high = 2 ** (bits - 1) - 1
    scale = (over_ranks(largest_of(weight_NGM, -1), groups) / (high + 0.5)).clamp_(
        min=torch.finfo(weight_NGM.dtype).smallest_normal
    )
    return IntegerGrid(scale.to(_exact(weight_NGM)), None, -high - 1, high)


def packed(integers_NK: Tensor, bits: int) -> Tensor:
    """Return signed integers of `bits` bits, a divisor of 32, in int32 [N, ⌈K · bits / 32⌉], the first in the lowest
    bits: offset by 2^(bits - 1), and 0 beyond K (`pack_to_int32` of compressed-tensors)."""
    each = 32 // bits
    codes = torch.nn.functional.pad(integers_NK.long() + (1 << (bits - 1)), (0, -integers_NK.shape[1] % each))
    shifted = codes.unflatten(1, (-1, each)) << (bits * torch.arange(each))
    return shifted.sum(-1).to(torch.int32)


def input_grid(x_TK: Tensor, groups: Groups = ()) -> IntegerGrid:
    """Return the grid of inputs [T, K]. groups: ranks that hold the rest of a token."""
    ends = torch.stack((x_TK.amin(-1, keepdim=True).neg_(), x_TK.amax(-1, keepdim=True))).clamp_(min=0)
    below, above = over_ranks(ends, groups)
    low, high = INPUTS
    scale = ((above + below) / (high - low)).clamp_(min=torch.finfo(x_TK.dtype).smallest_normal)
    zero = (low - (-below / scale).round_()).clamp_(low, high)
    return IntegerGrid(scale.to(_exact(x_TK)), zero, low, high)


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@frozen(eq=False)
class RoundedMatrix(ScaledMatrix):
    """Products of a `Linear` with a matrix that is rounded to integers."""

    qat: Qat
    shared: SharedScales

    masks_weights = True

    @property
    def masks_inputs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.qat.activations != "none"

    def forward(self, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        """Return y [T, N]."""
        weight = self._weight(weight_NK)
        return self._input(x_TK) @ weight.t()

    def input_gradient(self, grad_TN: Tensor, weight_NK: Tensor, x_TK: Tensor) -> Tensor:
        """Return the gradient of x [T, K]."""
        grad_TK = grad_TN @ self._weight(weight_NK)
        if self.qat.activations == "none":
            return grad_TK
        return input_grid(x_TK, self.shared.inputs).gradient(grad_TK, x_TK)

    def weight_gradient(self, grad_TN: Tensor, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        """Return the gradient of the weight [N, K]."""
        grad_NGM = self._in_groups(grad_TN.t() @ self._input(x_TK))
        grid, weight_NGM = self._grid(weight_NK)
        return grid.gradient(grad_NGM, weight_NGM).view_as(weight_NK)

    def _input(self, x_TK: Tensor) -> Tensor:
        return x_TK if self.qat.activations == "none" else input_grid(x_TK, self.shared.inputs).values(x_TK)

    def _weight(self, weight_NK: Tensor) -> Tensor:
        grid, weight_NGM = self._grid(weight_NK)
        return grid.values(weight_NGM).view_as(weight_NK)

    def _grid(self, weight_NK: Tensor) -> tuple[IntegerGrid, Tensor]:
        weight_NGM = self._in_groups(weight_NK)
        return weight_grid(weight_NGM, self.qat.bits, self.shared.inputs if self.qat.group == ROW else ()), weight_NGM

    def _in_groups(self, matrix_NK: Tensor) -> Tensor:
        return matrix_NK.unflatten(-1, (-1, matrix_NK.shape[-1] if self.qat.group == ROW else int(self.qat.group)))


@frozen(eq=False)
class FloatMatrix(RoundedMatrix):
    """Products of a `Linear` with a matrix, and inputs if chosen, that are rounded to 4-bit floats."""

    masks_weights = masks_inputs = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def input_gradient(self, grad_TN: Tensor, weight_NK: Tensor, x_TK: Tensor) -> Tensor:
        return grad_TN @ self._weight(weight_NK)

    def weight_gradient(self, grad_TN: Tensor, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        return grad_TN.t() @ self._input(x_TK)

    def _weight(self, weight_NK: Tensor) -> Tensor:
        return in_floats(weight_NK, self.qat.weights, self.shared.matrix)

    def _input(self, x_TK: Tensor) -> Tensor:
        if self.qat.activations == "none":
            return x_TK
        return in_floats(x_TK, self.qat.activations, (*self.shared.inputs, *self.shared.tokens))


def in_floats(x_RK: Tensor, form: str, groups: Groups) -> Tensor:
    """Return E2M1 float · scale of each number, in the number format of x. form: mxfp4 or nvfp4. groups: ranks that
    hold the other parts of the matrix."""
    x_RGM = x_RK.unflatten(-1, (-1, FLOATS[form]))
    if form == "mxfp4":
        factor, scale = block_powers(x_RGM, -1, MOST)
    else:
        factor, scale = _in_e4m3(x_RGM, over_ranks(largest_of(x_RK, None), groups))
    scaled = (x_RGM.to(scale.dtype) * factor).clamp_(-MOST, MOST)
    # Half of the largest power of two up to the magnitude: E2M1 has two numbers between powers, and halves below 1.
    step = scaled.abs().clamp_(min=1).log2_().floor_().exp2_().mul_(0.5)
    return scaled.div_(step).round_().mul_(step).mul_(scale).to(x_RK.dtype).flatten(-2)


def _in_e4m3(x_RGM: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors and the scales of the groups of a matrix. largest: its largest magnitude []."""
    e4m3, exact = torch.finfo(E4M3), _exact(x_RGM)
    whole = largest.to(exact) / (e4m3.max * MOST)
    whole = torch.where(whole == 0, 1, whole)
    groups = (largest_of(x_RGM, -1).to(exact) / MOST / whole).clamp_(e4m3.tiny, e4m3.max).to(E4M3).to(exact)
    return whole.reciprocal() / groups, whole * groups
