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
    """The pieces of all ranks along `dim`, in rank order; gradients are summed over ranks."""
    return _Gather.apply(x, dim, group)  # pyright: ignore[reportReturnType]


def scatter_sum(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's piece along `dim` of the sum over ranks; the size of `dim` must be a multiple of the group's."""
    return _ScatterSum.apply(x, dim, group)  # pyright: ignore[reportReturnType]


def total(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over ranks, whose gradient is the same on every rank."""
    return _Total.apply(x, group)  # pyright: ignore[reportReturnType]


def shared(x: Tensor, group: ProcessGroup) -> Tensor:
    """`x`, the same on every rank, of which every rank makes another use: gradients are summed over ranks."""
    return _Shared.apply(x, group)  # pyright: ignore[reportReturnType]


def split(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's piece along `dim` of a tensor that is the same on every rank, and whose gradient shall be too."""
    return _Split.apply(x, dim, group)  # pyright: ignore[reportReturnType]


def join(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The pieces of all ranks along `dim`, to be used by every rank alike: a rank keeps the gradient of its piece."""
    return _Join.apply(x, dim, group)  # pyright: ignore[reportReturnType]


def exchange(x: Tensor, group: ProcessGroup, out_splits: list[int], in_splits: list[int]) -> Tensor:
    """All-to-all along dim 0: `in_splits[r]` rows go to rank r, `out_splits[r]` rows come from it."""
    return _Exchange.apply(x, group, out_splits, in_splits)  # pyright: ignore[reportReturnType]


class Exchange:
    """`exchange` in two halves: what is computed between `begun` and `ended` is computed while rows are on their way,
    and so is its backward while their gradients are. Each is called once, with rows and with what `begun` gives."""

    def __init__(self, group: ProcessGroup, out_splits: list[int], in_splits: list[int]) -> None:
        self.group, self.out_splits, self.in_splits = group, out_splits, in_splits
        self.gradient: Tensor | None = None
        """On its way back."""

    def begun(self, x: Tensor) -> Tensor:
        """Rows of other ranks, which are not there yet."""
        return _Begun.apply(x, self)  # pyright: ignore[reportReturnType]

    def ended(self, x: Tensor) -> Tensor:
        """The same, which have come."""
        return _Ended.apply(x, self)  # pyright: ignore[reportReturnType]


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Without gradient: the pieces of all ranks along `dim`."""
    size = group.size()
    whole = functional.wait_tensor(OPS.all_gather_into_tensor(x.contiguous(), size, group.group_name))
    return whole if dim % x.dim() == 0 else torch.cat(whole.chunk(size), dim)


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Without gradient: this rank's piece along `dim` of the sum over ranks."""
    size = group.size()
    assert x.shape[dim] % size == 0, f"dim {dim} of {tuple(x.shape)} cannot be cut in {size}"
    stacked = x if dim % x.dim() == 0 else torch.cat(x.chunk(size, dim))
    return functional.wait_tensor(OPS.reduce_scatter_tensor(stacked.contiguous(), "sum", size, group.group_name))


def all_reduce(x: Tensor, group: ProcessGroup, op: str = "sum") -> Tensor:
    """Without gradient: the sum (or `max`) over ranks, in a new tensor."""
    return functional.wait_tensor(OPS.all_reduce(x.contiguous(), op, group.group_name))


def all_to_all(x: Tensor, group: ProcessGroup, out_splits: list[int], in_splits: list[int]) -> Tensor:
    """Without gradient: rows of dim 0 to and from every rank."""
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
        return gradient, None  # of the right shape; nobody reads it


def to_heads(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Each [B, H, S, A] → [B, H/U, U·S, A], all in one exchange; positions are in rank order.

    Where there are fewer heads than ranks, each is given to U/H neighbouring ranks.
    """
    ranks = group.size()
    spread = [_repeated(x_BHSA, ranks) for x_BHSA in tensors]
    # Rank u takes the u-th run of heads, of every tensor: queries meet the keys they are grouped with.
    pieces = torch.cat([x_BHSA.unflatten(1, (ranks, -1)) for x_BHSA in spread], dim=2).movedim(1, 0)
    ones = [1] * ranks
    received_UBHSA = exchange(pieces.contiguous(), group, ones, ones)
    joined_BHSA = received_UBHSA.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return list(joined_BHSA.split([x.shape[1] // ranks for x in spread], dim=1))


def to_positions(x_BHSA: Tensor, group: ProcessGroup) -> Tensor:
    """[B, H/U, U·S, A] → [B, H, S, A]: the way back."""
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
