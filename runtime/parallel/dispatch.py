"""Bringing tokens to their experts and back. Everything here is a permutation, so its gradient is one too: nothing is
added up in an order that could change from run to run.

Shapes: T tokens, K experts of a token, N = T·K assignments, D dim, E experts, L experts of this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.runtime.parallel.collectives import Exchange, all_to_all, exchange
from xtrain.runtime.parallel.fake import numbers

ExpertsCall = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@frozen(eq=False)
class ByExpert:
    """The assignments of tokens in order of expert, then of token.

    order_N: the assignment at each place. inverse_N: the place of each assignment. counts_E: assignments of an expert.
    """

    order_N: Tensor
    inverse_N: Tensor
    counts_E: Tensor

    @classmethod
    def of(cls, expert_N: Tensor, experts: int) -> "ByExpert":
        sorted_N, order_N = expert_N.sort(stable=True)
        numbers_E = torch.arange(experts, device=expert_N.device)
        # Without asking the device: bincount would wait for it.
        ends_E = torch.searchsorted(sorted_N, numbers_E, right=True)
        return cls(order_N, _inverse(order_N), ends_E.diff(prepend=ends_E.new_zeros(1)))


def to_experts(
    x_TD: Tensor,
    chosen_TK: Tensor,
    experts: ExpertsCall,
    count: int,
    group: ProcessGroup | None,
    keys_TK: Tensor | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """What the chosen experts make of every token, [T, K, D].

    experts: (rows in order of expert [M, D], rows of each expert [L], keys of rows [M]) → rows. count: E, of which each
    rank of `group` holds an equal run. keys_TK: numbers that go with the rows, if there are any. meanwhile: called
    while rows are on their way to other ranks.
    """
    tokens, per_token = chosen_TK.shape
    way = ByExpert.of(chosen_TK.flatten(), count)
    rows_ND = _Spread.apply(x_TD, way.order_N, way.inverse_N, per_token)
    assert isinstance(rows_ND, Tensor)
    if group is not None:
        experts = _spread_over(group, experts, meanwhile)
    rows_ND = experts(rows_ND, way.counts_E, None if keys_TK is None else keys_TK.flatten()[way.order_N])
    return permute(rows_ND, way.inverse_N, way.order_N).unflatten(0, (tokens, per_token))


def _spread_over(group: ProcessGroup, experts: ExpertsCall, meanwhile: Callable[[], None] | None) -> ExpertsCall:
    """The experts of all ranks: rows are sent to where their experts are, computed there, and sent back.

    A rank may get no row at all, and takes part all the same.
    """

    def call(rows_ND: Tensor, counts_E: Tensor, keys_N: Tensor | None) -> Tensor:
        size = group.size()
        own = len(counts_E) // size
        theirs_E = all_to_all(counts_E, group, [own] * size, [own] * size)
        counts = torch.stack((counts_E, theirs_E)).view(2, size, own).sum(2)
        sent, received = numbers(counts, [even(len(rows_ND), size)] * 2)
        if meanwhile is None:
            rows_MD = exchange(rows_ND, group, received, sent)
        else:
            halves = Exchange(group, received, sent)
            rows_MD = halves.begun(rows_ND)
            meanwhile()
            rows_MD = halves.ended(rows_MD)
        # They come in order of sender, then of expert.
        expert_M = torch.arange(own, device=rows_ND.device).repeat(size)
        way = ByExpert.of(expert_M.repeat_interleave(theirs_E, output_size=sum(received)), own)
        keys_M = None if keys_N is None else all_to_all(keys_N, group, received, sent)[way.order_N]
        rows_MD = experts(permute(rows_MD, way.order_N, way.inverse_N), way.counts_E, keys_M)
        return exchange(permute(rows_MD, way.inverse_N, way.order_N), group, sent, received)

    return call


def even(rows: int, parts: int) -> list[int]:
    """`rows` dealt out evenly, which is what a router is trained to do."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def permute(x_ND: Tensor, index_N: Tensor, inverse_N: Tensor) -> Tensor:
    """Row `index_N[i]` of x at place i; the gradient goes back by `inverse_N`."""
    return _Permute.apply(x_ND, index_N, inverse_N)  # pyright: ignore[reportReturnType]


def _inverse(order_N: Tensor) -> Tensor:
    places_N = torch.arange(len(order_N), device=order_N.device)
    return torch.empty_like(order_N).scatter_(0, order_N, places_N)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, index_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        return x_ND[index_N]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (inverse_N,) = ctx.saved_tensors
        return grad_outputs[0][inverse_N], None, None


class _Spread(torch.autograd.Function):
    """Every token once for each of its K assignments, in order of expert."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_N: Tensor, inverse_N: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(inverse_N)
        ctx.per_token = per_token
        return x_TD[order_N // per_token]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (inverse_N,) = ctx.saved_tensors
        return grad_outputs[0][inverse_N].unflatten(0, (-1, ctx.per_token)).sum(1), None, None, None
