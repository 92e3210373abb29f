"""Attention of some queries over some keys, as a summand of attention over all keys: outputs with their logsumexp.

Rows of one document each are computed some queries at a time, as plain products over the keys up to the last query.
"""

import math
from collections.abc import Iterator
from typing import Any, Final, Literal

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.function import once_differentiable

from xtrain.plan.hardware import QUERIES
from xtrain.runtime.base.device import device_type
from xtrain.runtime.nn.recompute import as_one

ATEN = torch.ops.aten


@frozen
class Scores:
    """Transformation and range of attention scores.

    window: number of positions of its document that a query sees, the newest, its own included; None: all before it.
    scale: factor of products; None: 1 / √A. cap: scores s become cap · tanh(s / cap) (Gemma 2, arXiv 2408.00118); None:
    unchanged.
    """

    window: int | None = None
    scale: float | None = None
    cap: float | None = None

    def sees_all(self, length: int) -> bool:
        """Return True if no window hides a position of a document of this length."""
        return self.window is None or self.window >= length

    def factor(self, width: int) -> float:
        """Return the factor of products for heads of this width."""
        return 1 / math.sqrt(width) if self.scale is None else self.scale


PLAIN: Final = Scores()

# Keys that query i sees: all, those up to i, or those from i on; the last two with as many keys as queries.
Seen = Literal["all", "causal", "reversed"]


def attend(q_NHQA: Tensor, k_NKLA: Tensor, v_NKLA: Tensor, seen: Seen, scores: Scores = PLAIN) -> tuple[Tensor, Tensor]:
    """Return (out [N, H, Q, A], logsumexp of the scores [N, H, Q] in at least fp32). The caller handles the window."""
    heads = q_NHQA.shape[1]
    k_NHLA, v_NHLA = _repeated(k_NKLA, heads), _repeated(v_NKLA, heads)
    if not has_kernel(q_NHQA, scores):
        return written_out(q_NHQA, k_NHLA, v_NHLA, _mask(q_NHQA, k_NHLA, seen), scores)
    if seen == "reversed":  # causal, read from the end
        q_NHQA, k_NHLA, v_NHLA = (x.flip(2) for x in (q_NHQA, k_NHLA, v_NHLA))
    causal, scale = seen != "all", scores.scale
    if device_type(q_NHQA) == "cpu":
        kernel = ATEN._scaled_dot_product_flash_attention_for_cpu
        out_NHQA, lse_NHQ = kernel(q_NHQA, k_NHLA, v_NHLA, 0.0, causal, scale=scale)
    else:
        kernel = ATEN._scaled_dot_product_flash_attention
        out_NHQA, lse_NHQ = kernel(q_NHQA, k_NHLA, v_NHLA, 0.0, causal, scale=scale)[:2]
    return (out_NHQA.flip(2), lse_NHQ.flip(2)) if seen == "reversed" else (out_NHQA, lse_NHQ)


def attend_backward(
    grad_NHQA: Tensor,
    q_NHQA: Tensor,
    k_NKLA: Tensor,
    v_NKLA: Tensor,
    out_NHQA: Tensor,
    lse_NHQ: Tensor,
    seen: Seen,
    scores: Scores = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's summands of the gradients of q, k and v; `out` and `lse` are over all keys, not the block's.

    With P = exp(scores - lse), this is the backward of FlashAttention (Dao et al. 2022, algorithm 4): it does not
    normalize again, so the sum over blocks is the whole gradient.
    """
    heads, groups = q_NHQA.shape[1], k_NKLA.shape[1]
    k_NHLA, v_NHLA = _repeated(k_NKLA, heads), _repeated(v_NKLA, heads)
    if not has_kernel(q_NHQA, scores):
        mask_QL = _mask(q_NHQA, k_NHLA, seen)
        grads = written_out_backward(grad_NHQA, q_NHQA, k_NHLA, v_NHLA, out_NHQA, lse_NHQ, mask_QL, scores)
    else:
        given = (grad_NHQA, q_NHQA, k_NHLA, v_NHLA, out_NHQA, lse_NHQ)
        if seen == "reversed":
            given = tuple(x.flip(2) for x in given)
        grads = _kernel_backward(*given, causal=seen != "all", scale=scores.scale)
        if seen == "reversed":
            grads = tuple(x.flip(2) for x in grads)
    grad_q_NHQA, grad_k_NHLA, grad_v_NHLA = grads
    return grad_q_NHQA, _summed(grad_k_NHLA, groups), _summed(grad_v_NHLA, groups)


def _kernel_backward(
    grad_NHQA: Tensor, q_NHQA: Tensor, k_NHLA: Tensor, v_NHLA: Tensor, out_NHQA: Tensor, lse_NHQ: Tensor,
    *, causal: bool, scale: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    if device_type(q_NHQA) == "cpu":
        backward = ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad_NHQA, q_NHQA, k_NHLA, v_NHLA, out_NHQA, lse_NHQ, 0.0, causal, scale=scale)
    queries, keys = q_NHQA.shape[2], k_NHLA.shape[2]
    seed = torch.zeros(2, dtype=torch.uint64, device=q_NHQA.device)  # of dropout, which is not used
    return ATEN._scaled_dot_product_flash_attention_backward(
        *(grad_NHQA, q_NHQA, k_NHLA, v_NHLA, out_NHQA, lse_NHQ.contiguous()),
        *(None, None, queries, keys, 0.0, causal, seed, seed[0]),
        scale=scale,
    )


def written_out(
    q_NHQA: Tensor, k_NHLA: Tensor, v_NHLA: Tensor, mask: Tensor | None, scores: Scores = PLAIN
) -> tuple[Tensor, Tensor]:
    """Compute `attend` in plain operations, with Q · L scores in memory: for fp32 on CUDA, head widths without a
    kernel, and scores that no kernel computes.

    mask: True where a query sees a key, broadcast to [N, H, Q, L]; None: everywhere.
    """
    scores_NHQL = _scores(q_NHQA, k_NHLA, mask, scores)
    lse_NHQ = scores_NHQL.logsumexp(-1)
    weights_NHQL = (scores_NHQL - lse_NHQ[..., None]).exp()
    return (weights_NHQL @ v_NHLA.to(weights_NHQL.dtype)).to(q_NHQA.dtype), lse_NHQ


def written_out_backward(
    grad_NHQA: Tensor,
    q_NHQA: Tensor,
    k_NHLA: Tensor,
    v_NHLA: Tensor,
    out_NHQA: Tensor,
    lse_NHQ: Tensor,
    mask: Tensor | None,
    scores: Scores = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attend_backward` in plain operations."""
    scores_NHQL = _scores(q_NHQA, k_NHLA, mask, scores)
    weights_NHQL = (scores_NHQL - lse_NHQ[..., None]).exp()
    # Slope of tanh, in place of the scores; hidden scores have zero weight, whatever their slope.
    slope_NHQL = scores_NHQL.div_(scores.cap).clamp_(-1, 1).square_().neg_().add_(1) if scores.cap is not None else None
    del scores_NHQL  # as large as the weights
    exact, scale = weights_NHQL.dtype, scores.factor(q_NHQA.shape[-1])
    grad = grad_NHQA.to(exact)
    share_NHQ = (grad * out_NHQA.to(exact)).sum(-1)
    grad_scores_NHQL = weights_NHQL * (grad @ v_NHLA.to(exact).mT - share_NHQ[..., None]) * scale
    if slope_NHQL is not None:
        grad_scores_NHQL.mul_(slope_NHQL)
    grad_q_NHQA = grad_scores_NHQL @ k_NHLA.to(exact)
    grad_k_NHLA = grad_scores_NHQL.mT @ q_NHQA.to(exact)
    grad_v_NHLA = weights_NHQL.mT @ grad
    return grad_q_NHQA.to(q_NHQA.dtype), grad_k_NHLA.to(k_NHLA.dtype), grad_v_NHLA.to(v_NHLA.dtype)


def merge(out_NHQA: Tensor, lse_NHQ: Tensor, block_out_NHQA: Tensor, block_lse_NHQ: Tensor) -> None:
    """Merge further keys into `out` and `lse`, in place.

    out' = out - σ(d) · (out - block_out) and lse' = lse + softplus(d), with d = block_lse - lse.
    """
    block_share_NHQ = torch.sigmoid(block_lse_NHQ - lse_NHQ)
    out_NHQA.sub_(block_share_NHQ[..., None] * (out_NHQA - block_out_NHQA))
    # Equal to adding softplus, which torch rounds to its argument from 20 on: too early for fp64.
    lse_NHQ.copy_(torch.logaddexp(lse_NHQ, block_lse_NHQ))


def merge_sink(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """Merge a sink into `out` and `lse`, in place: a further score of every query, whose value is zero (gpt-oss, arXiv
    2508.10925).

    sink: per head, broadcast to `lse`.
    """
    out.mul_(torch.sigmoid(lse - sink)[..., None])
    lse.copy_(torch.logaddexp(lse, sink.to(lse.dtype)))


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return each query's summand of the sink's gradient; `out` and `lse` include the sink."""
    return -(sink - lse).exp() * (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums over blocks."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scores(q_NHQA: Tensor, k_NHLA: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    exact = exact_type(q_NHQA.dtype)
    scores_NHQL = q_NHQA.to(exact) @ k_NHLA.to(exact).mT * scores.factor(q_NHQA.shape[-1])
    if scores.cap is not None:
        scores_NHQL = scores_NHQL.div_(scores.cap).tanh_().mul_(scores.cap)
    return scores_NHQL if mask is None else scores_NHQL.masked_fill(~mask, -math.inf)


def _mask(q_NHQA: Tensor, k_NHLA: Tensor, seen: Seen) -> Tensor | None:
    if seen == "all":
        return None
    every_QL = torch.ones(q_NHQA.shape[2], k_NHLA.shape[2], dtype=torch.bool, device=q_NHQA.device)
    return every_QL.tril() if seen == "causal" else every_QL.triu()


def has_kernel(q_NHQA: Tensor, scores: Scores) -> bool:
    """Return True if a kernel exists that does not store the scores; otherwise they are written out."""
    if scores.cap is not None:
        return False
    if device_type(q_NHQA) == "cpu":
        return True
    half = q_NHQA.dtype in (torch.float16, torch.bfloat16)
    return device_type(q_NHQA) == "cuda" and half and q_NHQA.shape[-1] % 8 == 0 and q_NHQA.shape[-1] <= 256


def _repeated(x_NKLA: Tensor, heads: int) -> Tensor:
    groups = x_NKLA.shape[1]
    return x_NKLA if groups == heads else x_NKLA.repeat_interleave(heads // groups, dim=1)


def _summed(x_NHLA: Tensor, groups: int) -> Tensor:
    """Return the gradient of `_repeated`."""
    heads = x_NHLA.shape[1]
    return x_NHLA if groups == heads else x_NHLA.unflatten(1, (groups, heads // groups)).sum(2)


def causal_blocks(q_BHSA: Tensor, k_BKSA: Tensor, v_BKSV: Tensor, scale: float | None = None) -> Tensor:
    """Return the attention [B, H, S, V] of rows that are one document each. scale: factor of products; None: 1 / √A."""
    factor = 1 / math.sqrt(q_BHSA.shape[-1]) if scale is None else scale
    return _CausalBlocks.apply(q_BHSA, k_BKSA, v_BKSV, factor)  # pyright: ignore[reportReturnType]


def _blocks(length: int) -> Iterator[slice]:
    for first in range(0, length, QUERIES):
        yield slice(first, min(first + QUERIES, length))


def _by_key_head(x_BHSA: Tensor, block: slice, heads: int) -> Tensor:
    """Reshape [B, H, S, A] to [N, Q·G, A]."""
    x_BQKGA = x_BHSA[:, :, block].transpose(1, 2).unflatten(2, (heads, -1))
    return x_BQKGA.transpose(1, 2).reshape(len(x_BHSA) * heads, -1, x_BHSA.shape[-1])


def _by_head(x_NQA: Tensor, rows: int, length: int) -> Tensor:
    """Reshape [N, Q·G, A] to [B, Q, H, A]."""
    return x_NQA.unflatten(0, (rows, -1)).unflatten(2, (length, -1)).transpose(1, 2).flatten(2, 3)


def _hidden(like: Tensor) -> Tensor:
    """Return the causal mask to add to a block's scores with its own keys, [Q, 1, Q]."""
    return like.new_full((QUERIES, QUERIES), -math.inf).triu_(1)[:, None]


def _weights(q_NQA: Tensor, k_NLA: Tensor, factor: float, hidden_Q1Q: Tensor, length: int) -> Tensor:
    """Return the softmax [N, Q·G, L] of the scores of `length` queries, the last of which sees all keys."""
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
            # Layout of the output matrix's input.
            out_BSHV = v_BKSV.new_empty(rows, length, heads, v_BKSV.shape[-1])

            def compute_block(block: slice) -> None:
                q_NQA, size = _by_key_head(q_BHSA, block, k_BKSA.shape[1]), block.stop - block.start
                weights_NQL = _weights(q_NQA, k_NSA[:, : block.stop], factor, hidden_Q1Q, size)
                out_BSHV[:, block] = _by_head(torch.bmm(weights_NQL, v_NSV[:, : block.stop]), rows, size)

            for block in _blocks(length):
                compute_block(block)
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

        def add_block(block: slice) -> None:
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
            add_block(block)
        return grad_q, grad_k.view_as(k_BKSA), grad_v.view_as(v_BKSV), None
