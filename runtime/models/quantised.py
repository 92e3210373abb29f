"""Matrices that are stored in blocks of codes, as a `Base` of the plan says, and computed anew for every product.

Shapes: E experts, R rows and C columns of a matrix, N blocks, B numbers of a block, U bytes of a block with its scale.
"""

import importlib
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any, Final

import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from xtrain.dsl.schema.bases import CHUNK, GROUP, Base
from xtrain.runtime.models.recompute import as_one

GRID: Final = 65_535  # steps between -1 and 1
# x [.., K] and a matrix [K, M] → [.., M], or the same of rows of experts and a stack of matrices.
Product = Callable[[Tensor, Tensor], Tensor]


@frozen(eq=False)
class QuantisedMatrix:
    """How a module stores a matrix [R, C], or a stack of them [E, R, C].

    shape: of all of it. piece: of what a rank computes with, before FSDP cuts it; first: the indices at which that
    begins. scales: name of the module's buffer with the fp32 numbers beside the bytes, whole on every rank; empty where
    there are none.
    """

    base: Base
    shape: tuple[int, ...]
    piece: tuple[int, ...]
    first: tuple[int, ...]
    scales: str

    def beside(self, module: nn.Module) -> Tensor | None:
        """The fp32 numbers that the module has beside the bytes."""
        return module.get_buffer(self.scales) if self.scales else None

    @property
    def codes(self) -> Any:
        """The module with `encode`, `decode` and `table` of its base."""
        return importlib.import_module(self.base.torch_module())

    def expert(self, number: int) -> "QuantisedMatrix":
        """That of one matrix of the stack, counted among those of this rank."""
        return evolve(self, shape=self.shape[1:], piece=self.piece[1:], first=self.first[1:])

    # Packing ----------------------------------------------------------------------------------------------------------

    def pack(self, whole: Tensor) -> tuple[Tensor, Tensor | None]:
        """All of a matrix, or of a stack, in a number format → its bytes, and the fp32 numbers beside them."""
        if whole.ndim == 3:
            packed = [self.expert(number).pack(matrix) for number, matrix in enumerate(whole)]
            scales = [each for _, each in packed if each is not None]
            return torch.stack([each for each, _ in packed]), torch.stack(scales) if scales else None
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
        """The piece [R, C] or [E, R, C] of its bytes. beside: the fp32 numbers of the whole matrix, or stack."""
        # Versions of torch before 2.13 may gather bytes in the format of the computation, which has all of them.
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
        """Compute a matrix whose blocks are in rows, some rows at a time."""
        base, (rows, columns) = self.base, self.piece
        if not rows:
            return
        units, out = packed.view(rows, -1, base.block_bytes), out_RC.view(rows, -1, base.block)
        module, code_bytes = self.codes, base.block * base.bits // 8
        table, each = on_device(module.table, packed), max(1, CHUNK // columns)
        for begin in range(0, rows, each):
            unit = units[begin : begin + each]
            if beside is None:
                scale = unit[..., code_bytes:].contiguous().view(torch.float32)
            else:
                scale = self._scales(unit[..., code_bytes], beside, begin)[..., None]
            out[begin : begin + each] = module.decode(unit[..., :code_bytes], table).mul_(scale)

    def _scales(self, codes_RN: Tensor, beside: Tensor, begin: int) -> Tensor:
        """fp32 [R, N] of blocks, from the 8-bit codes of their scales; begin: the first row, of those of the piece."""
        device, in_row = codes_RN.device, self.shape[1] // self.base.block
        row_R = torch.arange(len(codes_RN), device=device) + (self.first[0] + begin)
        block_N = torch.arange(codes_RN.shape[1], device=device) + self.first[1] // self.base.block
        group_RN = (row_R[:, None] * in_row + block_N).div_(GROUP, rounding_mode="floor")
        levels = on_device(dynamic_levels, codes_RN)
        return levels[codes_RN.to(torch.int32)].mul_(beside[1:][group_RN]).add_(beside[0])

    def product(self, x: Tensor, packed: Tensor, beside: Tensor | None, product: Product, *, turned: bool) -> Tensor:
        """`product` of x and the matrix [K, M], which is computed for it and again in the backward. turned: it is
        stored as [M, K]."""
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
    """Codes of scales as bytes [N], and [1 + N / GROUP] in fp32: their mean, and the largest distance from it in every
    group.

    A code is the level that is nearest to distance / largest, which is rounded to a grid of `GRID` steps before: so
    does bitsandbytes 0.50 on a CPU. Its kernel for CUDA has no grid, and chooses the other of two levels that are about
    as near for one scale in a thousand.
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
    """The 256 levels of the signed dynamic map, fp32, in order (Dettmers 2016, arXiv 1511.04561, section 3.1): decades
    from 1e-7 to 1, the larger ones cut finer, with 0 and 1."""
    levels = [torch.tensor((0.0, 1.0))]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float32)
        middles = ((edges[:-1] + edges[1:]) / 2).mul(10 ** (power - 6))
        levels += [middles, -middles]
    return torch.cat(levels).sort().values


_TABLES: Final[dict[tuple[Callable[[], Tensor], torch.device], Tensor]] = {}


def on_device(make: Callable[[], Tensor], beside: Tensor) -> Tensor:
    """A table on the device of a tensor, made once; in a trace without values, as all tensors there."""
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
