"""Products of matrices in fp8, as a `Recipe` of the plan says, with scales of the numbers that are multiplied.

A scale is the largest number of its format over the largest that shares the scale, as in torchao 0.18 (`float8`), whose
results these are bit for bit; but where other ranks have some of the numbers that share a scale, they take part in it,
so that every layout computes what one process does. On CUDA torch's scaled products multiply the codes. Elsewhere they
are written out as numbers and multiplied in fp32, or in fp64 where that is the format of all else.

Shapes: T tokens, K inputs and N outputs of a matrix.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from xtrain.dsl.schema.fp8 import MULTIPLE, Recipe
from xtrain.runtime.models.recompute import as_one
from xtrain.runtime.parallel.axes import Axes
from xtrain.runtime.parallel.collectives import all_reduce
from xtrain.runtime.parallel.fake import device_type

E4M3: Final = torch.float8_e4m3fn
E5M2: Final = torch.float8_e5m2
# Below it a largest number counts as this one.
SMALLEST: Final = 1e-12

Groups = tuple[ProcessGroup, ...]


class Scaled(NamedTuple):
    """codes / scale: a matrix in fp8. scale: fp32 [], [.., 1] or [1, ..]."""

    codes: Tensor
    scale: Tensor

    @property
    def turned(self) -> "Scaled":
        return Scaled(self.codes.t(), self.scale.t() if self.scale.ndim else self.scale)


@frozen(eq=False)
class Fp8Matrix:
    """How a `Linear` multiplies. cut: as tensor parallelism cuts its matrix. own_tokens: each of its ranks has other
    tokens."""

    recipe: Recipe
    axes: Axes
    cut: str | None = None
    own_tokens: bool = False

    def product(self, x: Tensor, weight_NK: Tensor) -> Tensor:
        """x · Wᵀ."""
        return _ScaledProduct.apply(x, weight_NK, self)  # pyright: ignore[reportReturnType]

    @property
    def _tensor(self) -> Groups:
        return () if self.axes.tensor is None else (self.axes.tensor.group,)

    @property
    def tokens(self) -> Groups:
        """The groups whose ranks have the other tokens of a microbatch."""
        context = tuple(group for group in (self.axes.ring, self.axes.ulysses) if group is not None)
        return (*context, *(self._tensor if self.own_tokens else ()))

    @property
    def inputs(self) -> Groups:
        """Those whose ranks have the other inputs of a token."""
        return self._tensor if self.cut == "row" else ()

    @property
    def outputs(self) -> Groups:
        """Those whose ranks have the other outputs of a token."""
        return self._tensor if self.cut == "column" else ()

    def forward(self, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        """y [T, N]."""
        recipe = self.recipe
        if recipe.scales == "row":
            x, weight = self._scaled((x_TK, E4M3, 1, self.inputs), (weight_NK, E4M3, 1, self.inputs))
        else:
            weight_groups = self._tensor if self.cut else ()
            x, weight = self._scaled(
                (x_TK, E4M3, None, (*self.inputs, *self.tokens)), (weight_NK, E4M3, None, weight_groups)
            )
        return _multiplied(x, weight.turned, x_TK.dtype, fast=True)

    def input_gradient(self, grad_TN: Tensor, weight_NK: Tensor) -> Tensor:
        """[T, K]."""
        recipe = self.recipe
        whole = (weight_NK, E4M3, None, self._tensor if self.cut else ())
        weight = whole if recipe.scales == "tensor" or recipe.whole_weight else (weight_NK, E4M3, 0, self.outputs)
        gradient, matrix = self._scaled(self._gradient(grad_TN), weight)
        return _multiplied(gradient, matrix, grad_TN.dtype)

    def weight_gradient(self, grad_TN: Tensor, x_TK: Tensor) -> Tensor:
        """[N, K]."""
        recipe = self.recipe
        if not recipe.weight_gradient:
            return grad_TN.t() @ x_TK
        if recipe.scales == "row":
            gradient, x = self._scaled((grad_TN, E4M3, 0, self.tokens), (x_TK, E4M3, 0, self.tokens))
        else:
            x_groups = (*self.inputs, *self.tokens)
            gradient, x = self._scaled(self._gradient(grad_TN), (x_TK, E4M3, None, x_groups))
        return _multiplied(gradient.turned, x, grad_TN.dtype)

    def _gradient(self, grad_TN: Tensor) -> "_Wanted":
        if self.recipe.scales == "row":
            return grad_TN, E4M3, 1, self.outputs
        return grad_TN, E5M2 if self.recipe.wide_gradients else E4M3, None, (*self.outputs, *self.tokens)

    def _scaled(self, *wanted: "_Wanted") -> "tuple[Scaled, Scaled]":
        one, other = (_largest(x, dim) for x, _, dim, _ in wanted)
        groups = [each[3] for each in wanted]
        if groups[0] == groups[1]:  # one message for both
            both = _over(torch.cat((one.flatten(), other.flatten())), groups[0]) if groups[0] else None
            if both is not None:
                one, other = both[: one.numel()].view_as(one), both[one.numel() :].view_as(other)
        else:
            one, other = _over(one, groups[0]), _over(other, groups[1])
        powers = self.recipe.powers_of_two
        first, second = (
            Scaled(_codes(x, scale := _scale(largest, format, powers), format), scale)
            for (x, format, _, _), largest in zip(wanted, (one, other), strict=True)
        )
        return first, second


_Wanted = tuple[Tensor, torch.dtype, int | None, Groups]
"""A matrix that is to be scaled: in which format, along which dim it shares scales, none meaning one scale, and with
which ranks."""


def _largest(x: Tensor, dim: int | None) -> Tensor:
    """The largest absolute value of all, or along a dim, which stays."""
    if dim is None:
        return torch.linalg.vector_norm(x, torch.inf)
    return torch.linalg.vector_norm(x, torch.inf, dim, keepdim=True)


def _over(largest: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
    for group in groups:
        largest = all_reduce(largest, group, "max")
    return largest


def _scale(largest: Tensor, format: torch.dtype, powers: bool) -> Tensor:
    scale = (torch.finfo(format).max / largest.to(torch.float64).clamp(min=SMALLEST)).to(torch.float32)
    return torch.exp2(torch.floor(torch.log2(scale))) if powers else scale


def _codes(x: Tensor, scale: Tensor, format: torch.dtype) -> Tensor:
    most = torch.finfo(format).max
    # Versions of torch before 2.12 make NaN of what is beyond the format.
    return (x.to(torch.float32) * scale).clamp_(-most, most).to(format)


def _multiplied(a: Scaled, b: Scaled, format: torch.dtype, *, fast: bool = False) -> Tensor:
    """a [M, I] · b [I, M']. fast: sums may be rounded on the way where a kernel is faster that does."""
    if device_type(a.codes) == "cuda":
        return _on_cuda(a, b, format, fast=fast)
    exact = torch.promote_types(format, torch.float32)
    left = a.codes.to(exact).div_(a.scale)
    return (left @ b.codes.to(exact).div_(b.scale)).to(format)


def _on_cuda(a: Scaled, b: Scaled, format: torch.dtype, *, fast: bool) -> Tensor:
    left, right = a.codes, b.codes
    if missing := -left.shape[1] % MULTIPLE:  # tokens, where these are multiplied away
        left = torch.nn.functional.pad(left.view(torch.uint8), (0, missing)).view(left.dtype)
        right = torch.nn.functional.pad(right.view(torch.uint8), (0, 0, 0, missing)).view(right.dtype)
    left, right = left.contiguous(), right.t().contiguous().t()  # as kernels take them: by rows, and by columns
    by_row = bool(a.scale.ndim or b.scale.ndim)
    one, other = a.scale.reciprocal(), b.scale.reciprocal()
    if not by_row:
        return _kernel(left, right, one, other, format, fast)
    out = torch.bfloat16 if format == torch.float32 else format  # all that kernels give that scale by rows
    one, other = one.expand(len(left), 1).contiguous(), other.expand(1, right.shape[1]).contiguous()
    if fast:
        return _kernel(left, right, one, other, out, fast).to(format)
    # The kernel that scales by rows is slow where its sums are exact: the other one, and the scales behind it.
    unit = one.new_ones(())
    return _kernel(left, right, unit, unit, out, fast).mul_(one).mul_(other).to(format)


def _kernel(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, format: torch.dtype, fast: bool
) -> Tensor:
    """left · right, times both scales."""
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=format, use_fast_accum=fast
    )


class _ScaledProduct(torch.autograd.Function):
    """Keeps what is multiplied as it is, and makes codes of it again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, matrix: Fp8Matrix) -> Tensor:
        gradient, matrix_gradient, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if matrix_gradient else None, weight_NK if gradient else None)
        ctx.matrix = matrix

        def make() -> tuple[Tensor]:
            return (matrix.forward(x.flatten(0, -2), weight_NK).view(*x.shape[:-1], len(weight_NK)),)

        (out,) = make() if torch.compiler.is_compiling() else as_one("matmul", make)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, weight_NK), (grad,) = ctx.saved_tensors, grad_outputs
        matrix: Fp8Matrix = ctx.matrix
        grad_TN, grad_x, grad_weight = grad.flatten(0, -2), None, None
        if ctx.needs_input_grad[0]:
            grad_x = matrix.input_gradient(grad_TN, weight_NK).view(*grad.shape[:-1], weight_NK.shape[1])
        if ctx.needs_input_grad[1]:
            grad_weight = matrix.weight_gradient(grad_TN, x.flatten(0, -2))
        return grad_x, grad_weight, None
