"""Causal attention of rows that are one document each, some queries at a time: plain products over the keys up to the
last of these queries, and torch's softmax. Plans choose it for short rows on a CPU (`planner/attention_kernels.py`).

The backward computes scores a second time, from which the softmax follows; nothing but queries, keys and values is kept
for it.

Shapes: B rows, H query heads, K key/value heads, G of the first for each of the second, S positions, A head width of
queries and keys, V of values, Q queries of a block, L keys up to its last, N = B·K.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...planner.attention_kernels import QUERIES
from .recompute import as_one

ATEN = torch.ops.aten


def causal_blocks(q_BHSA: Tensor, k_BKSA: Tensor, v_BKSV: Tensor, scale: float | None = None) -> Tensor:
    """Attention [B, H, S, V] of rows that are one document each. scale: what products are multiplied by; None:
    1 / √A."""
    factor = 1 / math.sqrt(q_BHSA.shape[-1]) if scale is None else scale
    return _CausalBlocks.apply(q_BHSA, k_BKSA, v_BKSV, factor)  # pyright: ignore[reportReturnType]


def _blocks(length: int) -> Iterator[slice]:
    for first in range(0, length, QUERIES):
        yield slice(first, min(first + QUERIES, length))


def _by_key_head(x_BHSA: Tensor, block: slice, heads: int) -> Tensor:
    """[B, H, S, A] → [N, G·Q, A]: the heads that share keys one behind the other."""
    return x_BHSA[:, :, block].reshape(len(x_BHSA) * heads, -1, x_BHSA.shape[-1])


def _weights(q_NQA: Tensor, k_NLA: Tensor, length: int) -> Tensor:
    """The softmax [N, G·Q, L] of the scores of a block of `length` queries, the last of which sees all keys."""
    scores_NQL = torch.bmm(q_NQA, k_NLA.mT)
    hidden_QQ = scores_NQL.new_full((length, length), -math.inf).triu_(1)
    scores_NQL.unflatten(1, (-1, length))[..., -length:].add_(hidden_QQ)
    return torch.softmax(scores_NQL, -1)


class _CausalBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHSA: Tensor, k_BKSA: Tensor, v_BKSV: Tensor, factor: float) -> Tensor:
        rows, heads, length, _ = q_BHSA.shape

        def forward() -> tuple[Tensor]:
            k_NSA, v_NSV = k_BKSA.flatten(0, 1), v_BKSV.flatten(0, 1)
            # Laid out as the output matrix takes it.
            out_BHSV = v_BKSV.new_empty(rows, length, heads, v_BKSV.shape[-1]).transpose(1, 2)

            def compute(block: slice) -> None:
                q_NQA = _by_key_head(q_BHSA, block, k_BKSA.shape[1]).mul(factor)
                weights_NQL = _weights(q_NQA, k_NSA[:, : block.stop], block.stop - block.start)
                found = torch.bmm(weights_NQL, v_NSV[:, : block.stop])
                out_BHSV[:, :, block] = found.view(rows, heads, -1, found.shape[-1])

            for block in _blocks(length):
                compute(block)
            return (out_BHSV,)

        (out_BHSV,) = as_one("attention", forward)
        ctx.save_for_backward(q_BHSA, k_BKSA, v_BKSV)
        ctx.factor = factor
        return out_BHSV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q_BHSA, k_BKSA, v_BKSV = ctx.saved_tensors
        (rows, heads, length, _), groups = q_BHSA.shape, k_BKSA.shape[1]
        k_NSA, v_NSV = k_BKSA.flatten(0, 1), v_BKSV.flatten(0, 1)
        grad_q, grad_k, grad_v = torch.empty_like(q_BHSA), torch.zeros_like(k_NSA), torch.zeros_like(v_NSV)

        def add(block: slice) -> None:
            seen = slice(block.stop)
            q_NQA = _by_key_head(q_BHSA, block, groups).mul(ctx.factor)
            grad_NQV = _by_key_head(grad_outputs[0], block, groups)
            weights_NQL = _weights(q_NQA, k_NSA[:, seen], block.stop - block.start)
            grad_v[:, seen].baddbmm_(weights_NQL.mT, grad_NQV)
            grad_weights_NQL = torch.bmm(grad_NQV, v_NSV[:, seen].mT)
            # weights · (gradient − Σ weights · gradient), in one pass
            grad_scores_NQL = ATEN._softmax_backward_data(grad_weights_NQL, weights_NQL, -1, weights_NQL.dtype)
            grad_k[:, seen].baddbmm_(grad_scores_NQL.mT, q_NQA)
            found = torch.bmm(grad_scores_NQL, k_NSA[:, seen]).mul_(ctx.factor)
            grad_q[:, :, block] = found.view(rows, heads, -1, found.shape[-1])

        for block in _blocks(length):
            add(block)
        return grad_q, grad_k.view_as(k_BKSA), grad_v.view_as(v_BKSV), None
