"""Matrices in other number formats: fp8 products with scales, and frozen weights stored in blocks of codes."""

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any, Final, NamedTuple

import torch
from attrs import Factory, evolve, frozen
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from xtrain.dsl.schema.precision import CHUNK, GROUP, MULTIPLE, Base, Recipe
from xtrain.runtime.base.collectives import all_reduce
from xtrain.runtime.base.device import device_type
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.recompute import as_one

E4M3: Final = torch.float8_e4m3fn
E5M2: Final = torch.float8_e5m2
# Lower bound of a largest value.
SMALLEST: Final = 1e-12

Groups = tuple[ProcessGroup, ...]


class Scaled(NamedTuple):
    """A matrix in fp8: codes / scale. scale: fp32 [], [.., 1] or [1, ..]."""

    codes: Tensor
    scale: Tensor

    @property
    def turned(self) -> "Scaled":
        return Scaled(self.codes.t(), self.scale.t() if self.scale.ndim else self.scale)


class ScaledMatrix:
    """Products of a `Linear` whose matrix is not multiplied as stored. masks_inputs: the gradient of x needs x;
    masks_weights: the gradient of the matrix needs the matrix."""

    masks_inputs = masks_weights = False

    def product(self, x: Tensor, weight_NK: Tensor) -> Tensor:
        """Return x · Wᵀ."""
        return _ScaledProduct.apply(x, weight_NK, self)  # pyright: ignore[reportReturnType]

    def forward(self, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        """Return y [T, N]."""
        raise NotImplementedError

    def input_gradient(self, grad_TN: Tensor, weight_NK: Tensor, x_TK: Tensor) -> Tensor:
        """Return the gradient of x [T, K]."""
        raise NotImplementedError

    def weight_gradient(self, grad_TN: Tensor, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        """Return the gradient of the weight [N, K]."""
        raise NotImplementedError


@frozen(eq=False)
class SharedScales:
    """Ranks that share the scales of a matrix and of its inputs and outputs. cut: how tensor parallelism cuts the
    matrix. own_tokens: each of these ranks has other tokens."""

    axes: Axes
    cut: str | None = None
    own_tokens: bool = False

    @property
    def _tensor(self) -> Groups:
        return () if self.axes.tensor is None else (self.axes.tensor.group,)

    @property
    def matrix(self) -> Groups:
        """The groups whose ranks have the other parts of the matrix."""
        return self._tensor if self.cut else ()

    @property
    def tokens(self) -> Groups:
        """The groups whose ranks have the other tokens of a microbatch."""
        context = tuple(group for group in (self.axes.ring, self.axes.ulysses) if group is not None)
        return (*context, *(self._tensor if self.own_tokens else ()))

    @property
    def inputs(self) -> Groups:
        """The groups whose ranks have the other inputs of a token."""
        return self._tensor if self.cut == "row" else ()

    @property
    def outputs(self) -> Groups:
        """The groups whose ranks have the other outputs of a token."""
        return self._tensor if self.cut == "column" else ()


@frozen(eq=False)
class Fp8Matrix(ScaledMatrix):
    """fp8 products of a `Linear`."""

    recipe: Recipe
    shared: SharedScales

    def forward(self, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        recipe, shared = self.recipe, self.shared
        if recipe.scales == "row":
            x, weight = self._scaled((x_TK, E4M3, 1, shared.inputs), (weight_NK, E4M3, 1, shared.inputs))
        else:
            x_groups = (*shared.inputs, *shared.tokens)
            x, weight = self._scaled((x_TK, E4M3, None, x_groups), (weight_NK, E4M3, None, shared.matrix))
        return _multiplied(x, weight.turned, x_TK.dtype, fast=True)

    def input_gradient(self, grad_TN: Tensor, weight_NK: Tensor, x_TK: Tensor | None = None) -> Tensor:
        recipe = self.recipe
        whole = (weight_NK, E4M3, None, self.shared.matrix)
        part = (weight_NK, E4M3, 0, self.shared.outputs)
        weight = whole if recipe.scales == "tensor" or recipe.whole_weight else part
        gradient, matrix = self._scaled(self._gradient(grad_TN), weight)
        return _multiplied(gradient, matrix, grad_TN.dtype)

    def weight_gradient(self, grad_TN: Tensor, x_TK: Tensor, weight_NK: Tensor | None = None) -> Tensor:
        recipe, shared = self.recipe, self.shared
        if not recipe.weight_gradient:
            return grad_TN.t() @ x_TK
        if recipe.scales == "row":
            gradient, x = self._scaled((grad_TN, E4M3, 0, shared.tokens), (x_TK, E4M3, 0, shared.tokens))
        else:
            x_groups = (*shared.inputs, *shared.tokens)
            gradient, x = self._scaled(self._gradient(grad_TN), (x_TK, E4M3, None, x_groups))
        return _multiplied(gradient.turned, x, grad_TN.dtype)

    def _gradient(self, grad_TN: Tensor) -> "_Wanted":
        if self.recipe.scales == "row":
            return grad_TN, E4M3, 1, self.shared.outputs
        groups = (*self.shared.outputs, *self.shared.tokens)
        return grad_TN, E5M2 if self.recipe.wide_gradients else E4M3, None, groups

    def _scaled(self, *wanted: "_Wanted") -> "tuple[Scaled, Scaled]":
        one, other = (largest_of(x, dim) for x, _, dim, _ in wanted)
        groups = [matrix[3] for matrix in wanted]
        if groups[0] == groups[1]:  # one message for both
            both = over_ranks(torch.cat((one.flatten(), other.flatten())), groups[0]) if groups[0] else None
            if both is not None:
                one, other = both[: one.numel()].view_as(one), both[one.numel() :].view_as(other)
        else:
            one, other = over_ranks(one, groups[0]), over_ranks(other, groups[1])
        powers = self.recipe.powers_of_two
        first, second = (
            _in_codes(x, largest, format, powers)
            for (x, format, _, _), largest in zip(wanted, (one, other), strict=True)
        )
        return first, second


_Wanted = tuple[Tensor, torch.dtype, int | None, Groups]
"""A matrix to scale: its number format, the dim along which it shares scales (None: one scale), and the ranks that
share them."""


def largest_of(x: Tensor, dim: int | None) -> Tensor:
    """Return the largest absolute value of all, or along a dim, which is kept."""
    if dim is None:
        return torch.linalg.vector_norm(x, torch.inf)
    return torch.linalg.vector_norm(x, torch.inf, dim, keepdim=True)


def over_ranks(largest: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
    for group in groups:
        largest = all_reduce(largest, group, "max")
    return largest


def _scale(largest: Tensor, format: torch.dtype, powers: bool) -> Tensor:
    scale = (torch.finfo(format).max / largest.to(torch.float64).clamp(min=SMALLEST)).to(torch.float32)
    return torch.exp2(torch.floor(torch.log2(scale))) if powers else scale


def _in_codes(x: Tensor, largest: Tensor, format: torch.dtype, powers: bool) -> Scaled:
    scale = _scale(largest, format, powers)
    return Scaled(_codes(x, scale, format), scale)


def _codes(x: Tensor, scale: Tensor, format: torch.dtype) -> Tensor:
    most = torch.finfo(format).max
    # torch before 2.12 turns values beyond the format into NaN.
    return (x.to(torch.float32) * scale).clamp_(-most, most).to(format)


def _multiplied(a: Scaled, b: Scaled, format: torch.dtype, *, fast: bool = False) -> Tensor:
    """Return a [M, I] · b [I, M']. fast: permit rounded partial sums where a kernel is faster with them."""
    if device_type(a.codes) == "cuda":
        return _on_cuda(a, b, format, fast=fast)
    exact = torch.promote_types(format, torch.float32)
    left = a.codes.to(exact).div_(a.scale)
    return (left @ b.codes.to(exact).div_(b.scale)).to(format)


def _on_cuda(a: Scaled, b: Scaled, format: torch.dtype, *, fast: bool) -> Tensor:
    left, right = a.codes, b.codes
    if missing := -left.shape[1] % MULTIPLE:  # tokens, where the product sums over them
        left = torch.nn.functional.pad(left.view(torch.uint8), (0, missing)).view(left.dtype)
        right = torch.nn.functional.pad(right.view(torch.uint8), (0, 0, 0, missing)).view(right.dtype)
    left, right = left.contiguous(), right.t().contiguous().t()  # as kernels take them: by rows, and by columns
    by_row = bool(a.scale.ndim or b.scale.ndim)
    one, other = a.scale.reciprocal(), b.scale.reciprocal()
    if not by_row:
        return _kernel(left, right, one, other, format, fast)
    out = torch.bfloat16 if format == torch.float32 else format  # the only output format of kernels that scale by rows
    one, other = one.expand(len(left), 1).contiguous(), other.expand(1, right.shape[1]).contiguous()
    if fast:
        return _kernel(left, right, one, other, out, fast).to(format)
    # The kernel that scales by rows is slow with exact sums: use the other one, and apply the scales afterwards.
    unit = one.new_ones(())
    return _kernel(left, right, unit, unit, out, fast).mul_(one).mul_(other).to(format)


def _kernel(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, format: torch.dtype, fast: bool
) -> Tensor:
    """Return left · right times both scales."""
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=format, use_fast_accum=fast
    )


class _ScaledProduct(torch.autograd.Function):
    """Product that saves its unscaled inputs and converts or rounds them again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, matrix: ScaledMatrix) -> Tensor:
        gradient, matrix_gradient, _ = ctx.needs_input_grad
        keeps_x = matrix_gradient or (gradient and matrix.masks_inputs)
        keeps_weight = gradient or (matrix_gradient and matrix.masks_weights)
        ctx.save_for_backward(x if keeps_x else None, weight_NK if keeps_weight else None)
        ctx.matrix = matrix

        def make() -> tuple[Tensor]:
            return (matrix.forward(x.flatten(0, -2), weight_NK).view(*x.shape[:-1], len(weight_NK)),)

        (out,) = make() if torch.compiler.is_compiling() else as_one("matmul", make)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, weight_NK), (grad,) = ctx.saved_tensors, grad_outputs
        matrix: ScaledMatrix = ctx.matrix
        grad_TN, grad_x, grad_weight = grad.flatten(0, -2), None, None
        x_TK: Any = None if x is None else x.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            grad_x = matrix.input_gradient(grad_TN, weight_NK, x_TK).view(*grad.shape[:-1], weight_NK.shape[1])
        if ctx.needs_input_grad[1]:
            grad_weight = matrix.weight_gradient(grad_TN, x_TK, weight_NK)
        return grad_x, grad_weight, None


GRID: Final = 65_535  # steps between -1 and 1
# x [.., K] and a matrix [K, M] → [.., M], or rows of experts and a stack of matrices.
Product = Callable[[Tensor, Tensor], Tensor]


@frozen(eq=False)
class QuantisedMatrix:
    """Storage of a quantized matrix [R, C], or a stack [E, R, C].

    shape: of the whole. piece: of the part that a rank computes with, before FSDP shards it; first: its first indices.
    scales: name of the module's buffer with the fp32 numbers of the scales, whole on every rank; empty without one.
    again: compiled products are checkpointed, so that the matrix is dequantized again in the backward; otherwise the
    compiler keeps the dequantized one.
    codes: the module with `encode`, `decode` and `table` of its base; imported here, as compiled code cannot import.
    """

    base: Base
    shape: tuple[int, ...]
    piece: tuple[int, ...]
    first: tuple[int, ...]
    scales: str
    again: bool = False
    codes: Any = Factory(lambda self: importlib.import_module(self.base.torch_module()), takes_self=True)

    def beside(self, module: nn.Module) -> Tensor | None:
        """Return the module's fp32 numbers of the scales."""
        return module.get_buffer(self.scales) if self.scales else None

    def prepare(self, device: torch.device) -> None:
        """Make the tables on a device, which recomputed compiled code may not."""
        for make in (self.codes.table, *((dynamic_levels,) if self.base.double else ())):
            on_device(make, torch.empty(0, device=device))

    def expert(self, number: int) -> "QuantisedMatrix":
        """Return the storage of one matrix of the stack, numbered among this rank's."""
        return evolve(self, shape=self.shape[1:], piece=self.piece[1:], first=self.first[1:])

    # Packing ----------------------------------------------------------------------------------------------------------

    def pack(self, whole: Tensor) -> tuple[Tensor, Tensor | None]:
        """Quantize a whole matrix, or stack; returns its bytes, and the fp32 numbers of its scales."""
        if whole.ndim == 3:
            packed = [self.expert(number).pack(matrix) for number, matrix in enumerate(whole)]
            scales = [scale for _, scale in packed if scale is not None]
            return torch.stack([codes for codes, _ in packed]), torch.stack(scales) if scales else None
        flat, size = whole.to(torch.float32).flatten(), self.base.block
        full = len(flat) // size * size
        codes_NU, scales_N = self.codes.encode(flat[:full].view(-1, size))
        if full < len(flat):
            rest = torch.nn.functional.pad(flat[full:], (0, size - len(flat) + full))
            more = self.codes.encode(rest[None], rest=True)
            codes_NU, scales_N = torch.cat((codes_NU, more[0])), torch.cat((scales_N, more[1]))
        beside = None
        if self.base.double:
            bytes_N, beside = pack_scales(scales_N)
            scale_NU = bytes_N[:, None]
        else:
            scale_NU = scales_N[:, None].contiguous().view(torch.uint8)
        return torch.cat((codes_NU, scale_NU), dim=-1).view(self.base.stored_shape(self.shape)), beside

    # Computing --------------------------------------------------------------------------------------------------------

    def values(self, packed: Tensor, beside: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Dequantize the piece [R, C] or [E, R, C]. beside: the fp32 numbers of the whole matrix, or stack."""
        # torch before 2.13 may gather bytes in the format of the computation, which represents all of them.
        packed = packed.to(torch.uint8)
        if len(self.piece) == 3:
            out_ERC = packed.new_empty(self.piece, dtype=dtype)
            for number in range(len(packed)):
                own = None if beside is None else beside[self.first[0] + number]
                self.expert(number)._fill(out_ERC[number], packed[number], own)
            return out_ERC
        if self.base.in_rows(self.shape):
            out_RC = packed.new_empty(self.piece, dtype=dtype)
            self._fill(out_RC, packed, beside)
            return out_RC
        filled = packed.new_empty((len(packed), self.base.block), dtype=dtype)
        blocks = evolve(self, shape=tuple(filled.shape), piece=tuple(filled.shape))
        blocks._fill(filled, packed, beside)
        return filled.flatten()[: prod(self.shape)].view(self.shape)

    def _fill(self, out_RC: Tensor, packed: Tensor, beside: Tensor | None) -> None:
        """Dequantize a matrix whose blocks are in rows, some rows at a time."""
        base, (rows, columns) = self.base, self.piece
        if not rows:
            return
        units, out = packed.view(rows, -1, base.block_bytes), out_RC.view(rows, -1, base.block)
        module, code_bytes = self.codes, base.block * base.bits // 8
        table, row_count = on_device(module.table, packed), max(1, CHUNK // columns)
        for begin in range(0, rows, row_count):
            unit = units[begin : begin + row_count]
            if beside is None:
                scale = unit[..., code_bytes:].contiguous().view(torch.float32)
            else:
                scale = self._scales(unit[..., code_bytes], beside, begin)[..., None]
            out[begin : begin + row_count] = module.decode(unit[..., :code_bytes], table).mul_(scale)

    def _scales(self, codes_RN: Tensor, beside: Tensor, begin: int) -> Tensor:
        """Return the scales of blocks, fp32 [R, N], from their 8-bit codes; begin: the first row in the piece.

        The largest distances are repeated instead of indexed: equal indexes of two matrices would be kept for the
        backward of compiled code.
        """
        (rows, blocks), in_row = codes_RN.shape, self.shape[1] // self.base.block
        group, skipped = divmod((self.first[0] + begin) * in_row, GROUP)
        largest = beside[1 + group :][: -(-(skipped + rows * in_row) // GROUP)].repeat_interleave(GROUP)
        largest_RN = largest[skipped:][: rows * in_row].view(rows, in_row)
        levels = on_device(dynamic_levels, codes_RN)
        own_RN = largest_RN.narrow(1, self.first[1] // self.base.block, blocks)
        return levels[codes_RN.to(torch.int32)].mul_(own_RN).add_(beside[0])

    def product(self, x: Tensor, packed: Tensor, beside: Tensor | None, product: Product, *, turned: bool) -> Tensor:
        """Return `product` of x and the matrix [K, M], which is dequantized here and again in the backward. turned: it
        is stored as [M, K]."""
        if self.again and torch.compiler.is_compiling():
            return checkpoint(_Product.apply, x, packed, beside, self, product, turned, use_reentrant=False)  # pyright: ignore[reportReturnType]
        return _Product.apply(x, packed, beside, self, product, turned)  # pyright: ignore[reportReturnType]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        packed: Tensor,
        beside: Tensor | None,
        matrix: QuantisedMatrix,
        product: Product,
        turned: bool,
    ) -> Tensor:
        ctx.save_for_backward(packed, beside)
        ctx.matrix, ctx.product, ctx.turned = matrix, product, turned

        def make() -> tuple[Tensor]:
            stored = matrix.values(packed, beside, x.dtype)
            return (product(x, stored.transpose(-1, -2) if turned else stored),)

        (out,) = make() if torch.compiler.is_compiling() else as_one("matmul", make)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        packed, beside = ctx.saved_tensors
        (grad,) = grad_outputs
        stored = ctx.matrix.values(packed, beside, grad.dtype)
        grad_x = ctx.product(grad, stored if ctx.turned else stored.transpose(-1, -2))
        return grad_x, None, None, None, None, None


# Scales in 8 bits -----------------------------------------------------------------------------------------------------


def pack_scales(scales_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of scales as bytes [N], and [1 + N / GROUP] in fp32: their mean, and the largest distance from
    it in every group.

    A code is the level nearest to distance / largest, which is first rounded to a grid of `GRID` steps, as in
    bitsandbytes 0.50 on a CPU. Its CUDA kernel has no grid, and chooses the other of two nearly equally near levels for
    one scale in a thousand.
    """
    mean = scales_N.mean()
    distance_N = scales_N - mean
    missing = -len(distance_N) % GROUP
    distance_MG = torch.nn.functional.pad(distance_N, (0, missing)).view(-1, GROUP)
    largest_M = distance_MG.abs().amax(-1)
    share_MG = distance_MG / torch.where(largest_M == 0, 1.0, largest_M)[:, None]
    step_MG = ((share_MG.clamp_(-1, 1) + 1) * 0.5 * GRID + 0.5).to(torch.int32)
    grid_MG, levels = -1 + 2 * step_MG / GRID, dynamic_levels().to(scales_N.device)
    above_MG = torch.bucketize(grid_MG, levels).clamp_(min=1)
    nearer_MG = (levels[above_MG] - grid_MG).abs() < (grid_MG - levels[above_MG - 1]).abs()
    codes_MG = (above_MG - 1 + nearer_MG.to(torch.int64)) * (largest_M != 0)[:, None]
    return codes_MG.flatten()[: len(scales_N)].to(torch.uint8), torch.cat((mean[None], largest_M))


def dynamic_levels() -> Tensor:
    """Return the 256 levels of the signed dynamic map, fp32, sorted (Dettmers 2016, arXiv 1511.04561, section 3.1):
    decades from 1e-7 to 1, the larger ones divided more finely, with 0 and 1."""
    levels = [torch.tensor((0.0, 1.0))]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float32)
        middles = ((edges[:-1] + edges[1:]) / 2).mul(10 ** (power - 6))
        levels += [middles, -middles]
    return torch.cat(levels).sort().values


_TABLES: Final[dict[tuple[Callable[[], Tensor], torch.device], Tensor]] = {}


def on_device(make: Callable[[], Tensor], beside: Tensor) -> Tensor:
    """Return a table on the device of a tensor, built once; a fake or meta tensor in a trace."""
    key = (make, beside.device)
    if isinstance(beside, FakeTensor) or beside.device.type == "meta":
        size, dtype = _form(make)
        return torch.empty(size, dtype=dtype, device=beside.device)
    if key not in _TABLES:
        _TABLES[key] = make().to(beside.device)
    return _TABLES[key]


@cache
def _form(make: Callable[[], Tensor]) -> tuple[torch.Size, torch.dtype]:
    table = make()
    return table.shape, table.dtype
