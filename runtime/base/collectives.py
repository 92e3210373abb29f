"""Collectives with gradients: linear maps over the ranks of a group, whose backward is the transposed map.

Ulysses (Jacobs et al. 2023, arXiv 2309.14509) exchanges positions of most heads for all positions of some heads.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as functional

OPS = torch.ops._c10d_functional


def gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Concatenate the pieces of all ranks along `dim`, in rank order; gradients are summed over ranks."""
    return _Gather.apply(x, dim, group)  # pyright: ignore[reportReturnType]


def scatter_sum(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's piece along `dim` of the sum over ranks; the size of `dim` must be divisible by the group's
    size."""
    return _ScatterSum.apply(x, dim, group)  # pyright: ignore[reportReturnType]


def total(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over ranks; the gradient is the same on every rank."""
    return _Total.apply(x, group)  # pyright: ignore[reportReturnType]


def shared(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return `x`, which is the same on every rank and used differently by each; gradients are summed over ranks."""
    return _Shared.apply(x, group)  # pyright: ignore[reportReturnType]


def split(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's piece along `dim`. `x` is the same on every rank, and so is its gradient."""
    return _Split.apply(x, dim, group)  # pyright: ignore[reportReturnType]


def join(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Concatenate the pieces of all ranks along `dim` for the same use on every rank; a rank keeps the gradient of its
    piece."""
    return _Join.apply(x, dim, group)  # pyright: ignore[reportReturnType]


def exchange(x: Tensor, group: ProcessGroup, out_splits: list[int], in_splits: list[int]) -> Tensor:
    """Exchange rows of dim 0 (all-to-all): `in_splits[r]` rows go to rank r, `out_splits[r]` rows come from it."""
    return _Exchange.apply(x, group, out_splits, in_splits)  # pyright: ignore[reportReturnType]


class Exchange:
    """`exchange` in two halves that overlap with computation.

    Code between `begun` and `ended` runs while rows are in transit, and its backward runs while gradients are in
    transit. Each method is called once: `begun` with the rows, `ended` with the result of `begun`.
    """

    def __init__(self, group: ProcessGroup, out_splits: list[int], in_splits: list[int]) -> None:
        self.group, self.out_splits, self.in_splits = group, out_splits, in_splits
        self.gradient: Tensor | None = None
        """Gradient in transit, between the backward of `ended` and that of `begun`."""

    def begun(self, x: Tensor) -> Tensor:
        """Start the exchange; the result must not be read before `ended`."""
        return _Begun.apply(x, self)  # pyright: ignore[reportReturnType]

    def ended(self, x: Tensor) -> Tensor:
        """Wait for the rows and return them."""
        return _Ended.apply(x, self)  # pyright: ignore[reportReturnType]


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Concatenate the pieces of all ranks along `dim`, without gradient."""
    size = group.size()
    whole = functional.wait_tensor(OPS.all_gather_into_tensor(x.contiguous(), size, group.group_name))
    return whole if dim % x.dim() == 0 else torch.cat(whole.chunk(size), dim)


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's piece along `dim` of the sum over ranks, without gradient."""
    size = group.size()
    assert x.shape[dim] % size == 0, f"dim {dim} of {tuple(x.shape)} cannot be cut in {size}"
    stacked = x if dim % x.dim() == 0 else torch.cat(x.chunk(size, dim))
    return functional.wait_tensor(OPS.reduce_scatter_tensor(stacked.contiguous(), "sum", size, group.group_name))


def all_reduce(x: Tensor, group: ProcessGroup, op: str = "sum") -> Tensor:
    """Return the sum (or another `op`, as `max`) over ranks in a new tensor, without gradient."""
    return functional.wait_tensor(OPS.all_reduce(x.contiguous(), op, group.group_name))


def all_to_all(x: Tensor, group: ProcessGroup, out_splits: list[int], in_splits: list[int]) -> Tensor:
    """Exchange rows of dim 0 with every rank, without gradient."""
    return functional.wait_tensor(_all_to_all_begun(x, group, out_splits, in_splits))


def _all_to_all_begun(x: Tensor, group: ProcessGroup, out_splits: list[int], in_splits: list[int]) -> Tensor:
    return OPS.all_to_all_single(x.contiguous(), out_splits, in_splits, group.group_name)


def own_piece(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    size = group.size()
    assert x.shape[dim] % size == 0, f"dim {dim} of {tuple(x.shape)} cannot be cut in {size}"
    return x.chunk(size, dim)[group.rank()].contiguous()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        return reduce_scatter(grad_outputs[0], ctx.dim, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        return all_gather(grad_outputs[0], ctx.dim, ctx.group), None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        return grad_outputs[0], None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        return all_reduce(grad_outputs[0], ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return own_piece(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        return all_gather(grad_outputs[0], ctx.dim, ctx.group), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        return own_piece(grad_outputs[0], ctx.dim, ctx.group), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, out_splits: list[int], in_splits: list[int]) -> Tensor:
        ctx.group, ctx.out_splits, ctx.in_splits = group, out_splits, in_splits
        return all_to_all(x, group, out_splits, in_splits)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        return all_to_all(grad_outputs[0], ctx.group, ctx.in_splits, ctx.out_splits), None, None, None


class _Begun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return _all_to_all_begun(x, exchange.group, exchange.out_splits, exchange.in_splits)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        gradient, ctx.exchange.gradient = ctx.exchange.gradient, None
        assert gradient is not None
        return functional.wait_tensor(gradient), None


class _Ended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return functional.wait_tensor(x).view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        exchange, (gradient,) = ctx.exchange, grad_outputs
        exchange.gradient = _all_to_all_begun(gradient, exchange.group, exchange.in_splits, exchange.out_splits)
        return gradient, None  # has the right shape; its values are not read


def to_heads(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Turn each [B, H, S, A] into [B, H/U, U·S, A], all in one exchange; positions are in rank order.

    With fewer heads than ranks, each head goes to U/H adjacent ranks.
    """
    ranks = group.size()
    spread = [_repeated(x_BHSA, ranks) for x_BHSA in tensors]
    # Rank u takes the u-th block of heads of every tensor: queries meet the keys they are grouped with.
    pieces = torch.cat([x_BHSA.unflatten(1, (ranks, -1)) for x_BHSA in spread], dim=2).movedim(1, 0)
    ones = [1] * ranks
    received_UBHSA = exchange(pieces.contiguous(), group, ones, ones)
    joined_BHSA = received_UBHSA.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return list(joined_BHSA.split([x.shape[1] // ranks for x in spread], dim=1))


def to_positions(x_BHSA: Tensor, group: ProcessGroup) -> Tensor:
    """Turn [B, H/U, U·S, A] into [B, H, S, A]: the inverse of `to_heads`."""
    ranks = group.size()
    pieces_UBHSA = x_BHSA.unflatten(2, (ranks, -1)).movedim(2, 0)
    ones = [1] * ranks
    received_UBHSA = exchange(pieces_UBHSA.contiguous(), group, ones, ones)
    return received_UBHSA.movedim(0, 1).flatten(1, 2)


def _repeated(x_BHSA: Tensor, ranks: int) -> Tensor:
    heads = x_BHSA.shape[1]
    if heads % ranks == 0:
        return x_BHSA
    assert ranks % heads == 0, f"{heads} heads on {ranks} ranks: neither number divides the other"
    return x_BHSA.repeat_interleave(ranks // heads, dim=1)
