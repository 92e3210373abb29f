"""Causal attention of rows that are one document each, some queries at a time: plain products over the keys up to the
last of these queries, and torch's softmax. Plans choose it for short rows on a CPU (`planner/attention_kernels.py`).

The backward computes scores a second time, from which the softmax follows; nothing but queries, keys and values is kept
for it.

Shapes: B rows, H query heads, K key/value heads, G of the first for each of the second, S positions, A head width of
queries and keys, V of values, Q queries of a block, L keys up to its last, N = B·K. The heads that share keys stand
behind each other for each query: rows that lie in memory as the matrices before have written them are not copied then.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtrain.planner.attention_kernels import QUERIES
from xtrain.runtime.models.recompute import as_one

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
    """[B, H, S, A] → [N, Q·G, A]."""
    x_BQKGA = x_BHSA[:, :, block].transpose(1, 2).unflatten(2, (heads, -1))
    return x_BQKGA.transpose(1, 2).reshape(len(x_BHSA) * heads, -1, x_BHSA.shape[-1])


def _by_head(x_NQA: Tensor, rows: int, length: int) -> Tensor:
    """[N, Q·G, A] → [B, Q, H, A]."""
    return x_NQA.unflatten(0, (rows, -1)).unflatten(2, (length, -1)).transpose(1, 2).flatten(2, 3)


def _hidden(like: Tensor) -> Tensor:
    """What is added to the scores of a block with its own keys, [Q, 1, Q]."""
    return like.new_full((QUERIES, QUERIES), -math.inf).triu_(1)[:, None]


def _weights(q_NQA: Tensor, k_NLA: Tensor, factor: float, hidden_Q1Q: Tensor, length: int) -> Tensor:
    """The softmax [N, Q·G, L] of the scores of a block of `length` queries, the last of which sees all keys."""
    scores_NQL = q_NQA.new_empty(len(q_NQA), q_NQA.shape[1], k_NLA.shape[1])
    scores_NQL.baddbmm_(q_NQA, k_NLA.mT, beta=0, alpha=factor)
    scores_NQL.unflatten(1, (length, -1))[..., -length:].add_(hidden_Q1Q[:length, :, :length])
    return torch.softmax(scores_NQL, -1)


class _CausalBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHSA: Tensor, k_BKSA: Tensor, v_BKSV: Tensor, factor: float) -> Tensor:
        rows, heads, length, _ = q_BHSA.shape

        def forward() -> tuple[Tensor]:
            k_NSA, v_NSV, hidden_Q1Q = k_BKSA.flatten(0, 1), v_BKSV.flatten(0, 1), _hidden(q_BHSA)
            # Laid out as the output matrix takes it.
            out_BSHV = v_BKSV.new_empty(rows, length, heads, v_BKSV.shape[-1])

            def compute(block: slice) -> None:
                q_NQA, size = _by_key_head(q_BHSA, block, k_BKSA.shape[1]), block.stop - block.start
                weights_NQL = _weights(q_NQA, k_NSA[:, : block.stop], factor, hidden_Q1Q, size)
                out_BSHV[:, block] = _by_head(torch.bmm(weights_NQL, v_NSV[:, : block.stop]), rows, size)

            for block in _blocks(length):
                compute(block)
            return (out_BSHV.transpose(1, 2),)

        (out_BHSV,) = as_one("attention", forward)
        ctx.save_for_backward(q_BHSA, k_BKSA, v_BKSV)
        ctx.factor = factor
        return out_BHSV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q_BHSA, k_BKSA, v_BKSV = ctx.saved_tensors
        (rows, _, length, _), groups, factor = q_BHSA.shape, k_BKSA.shape[1], ctx.factor
        k_NSA, v_NSV, hidden_Q1Q = k_BKSA.flatten(0, 1), v_BKSV.flatten(0, 1), _hidden(q_BHSA)
        grad_q, grad_k, grad_v = torch.empty_like(q_BHSA), torch.zeros_like(k_NSA), torch.zeros_like(v_NSV)

        def add(block: slice) -> None:
            seen, size = slice(block.stop), block.stop - block.start
            q_NQA = _by_key_head(q_BHSA, block, groups)
            grad_NQV = _by_key_head(grad_outputs[0], block, groups)
            weights_NQL = _weights(q_NQA, k_NSA[:, seen], factor, hidden_Q1Q, size)
            grad_v[:, seen].baddbmm_(weights_NQL.mT, grad_NQV)
            grad_weights_NQL = torch.bmm(grad_NQV, v_NSV[:, seen].mT)
            # weights · (gradient − Σ weights · gradient), in one pass
            grad_scores_NQL = ATEN._softmax_backward_data(grad_weights_NQL, weights_NQL, -1, weights_NQL.dtype)
            grad_k[:, seen].baddbmm_(grad_scores_NQL.mT, q_NQA, alpha=factor)
            found_NQA = torch.baddbmm(q_NQA, grad_scores_NQL, k_NSA[:, seen], beta=0, alpha=factor)
            grad_q[:, :, block].transpose(1, 2).copy_(_by_head(found_NQA, rows, size))

        for block in _blocks(length):
            add(block)
        return grad_q, grad_k.view_as(k_BKSA), grad_v.view_as(v_BKSV), None
