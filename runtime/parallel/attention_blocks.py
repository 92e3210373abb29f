"""Attention of some queries over some keys, as one summand of attention over all keys: outputs with their logsumexp.

Shapes: N segments, H heads of queries, K heads of keys and values (H a multiple of K), Q queries, L keys, A head width.
"""

import math
from typing import Final, Literal

import torch
from attrs import frozen
from torch import Tensor

from xtrain.runtime.parallel.fake import device_type

ATEN = torch.ops.aten


@frozen
class Scores:
    """What becomes of the products of queries and keys, and which of them there are.

    window: a query sees so many positions of its document, the newest, its own included; None: all before it.
    scale: what products are multiplied by; None: 1 / √A. cap: scores s are cap · tanh(s / cap) (Gemma 2, arXiv
    2408.00118); None: as they are.
    """

    window: int | None = None
    scale: float | None = None
    cap: float | None = None

    def sees_all(self, length: int) -> bool:
        """Whether no window hides a position of a document of so many."""
        return self.window is None or self.window >= length

    def factor(self, width: int) -> float:
        """What products of heads so wide are multiplied by."""
        return 1 / math.sqrt(width) if self.scale is None else self.scale


PLAIN: Final = Scores()

# Which keys the query i sees: all, those up to i, or those from i on; the last two of as many keys as queries.
Seen = Literal["all", "causal", "reversed"]


def attend(q_NHQA: Tensor, k_NKLA: Tensor, v_NKLA: Tensor, seen: Seen, scores: Scores = PLAIN) -> tuple[Tensor, Tensor]:
    """(out [N, H, Q, A], logsumexp of the scores [N, H, Q] in at least fp32). The window is left to the caller."""
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
    """What this block adds to the gradients of q, k and v; `out` and `lse` are those over all keys, not the block's.

    With P = exp(scores - lse), this is the backward of FlashAttention (Dao et al. 2022, algorithm 4): it never
    normalises anew, so the sum over blocks is the gradient of the whole.
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
    seed = torch.zeros(2, dtype=torch.uint64, device=q_NHQA.device)  # of dropout, which there is none of
    return ATEN._scaled_dot_product_flash_attention_backward(
        *(grad_NHQA, q_NHQA, k_NHLA, v_NHLA, out_NHQA, lse_NHQ.contiguous()),
        *(None, None, queries, keys, 0.0, causal, seed, seed[0]),
        scale=scale,
    )


def written_out(
    q_NHQA: Tensor, k_NHLA: Tensor, v_NHLA: Tensor, mask: Tensor | None, scores: Scores = PLAIN
) -> tuple[Tensor, Tensor]:
    """`attend` in plain operations, with Q · L scores in memory: for fp32 on CUDA, head widths without a kernel, and
    scores that no kernel computes. mask: where a query sees a key, broadcast to [N, H, Q, L]; None: everywhere."""
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
    """`attend_backward` in plain operations."""
    scores_NHQL = _scores(q_NHQA, k_NHLA, mask, scores)
    weights_NHQL = (scores_NHQL - lse_NHQ[..., None]).exp()
    # The slope of the hyperbolic tangent, in the place of the scores; hidden ones have no weight, whatever it is.
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
    """Take further keys into `out` and `lse`, in place.

    out' = out - σ(d) · (out - block_out) and lse' = lse + softplus(d), with d = block_lse - lse.
    """
    block_share_NHQ = torch.sigmoid(block_lse_NHQ - lse_NHQ)
    out_NHQA.sub_(block_share_NHQ[..., None] * (out_NHQA - block_out_NHQA))
    # The same as adding softplus, which torch rounds to its argument from 20 on: too early for fp64.
    lse_NHQ.copy_(torch.logaddexp(lse_NHQ, block_lse_NHQ))


def merge_sink(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """Take a sink into `out` and `lse`, in place: a score that every query has beside those of its keys, whose value is
    zero (gpt-oss, arXiv 2508.10925). sink: of each head, broadcast to `lse`."""
    out.mul_(torch.sigmoid(lse - sink)[..., None])
    lse.copy_(torch.logaddexp(lse, sink.to(lse.dtype)))


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """What each query adds to the gradient of the sink; `out` and `lse` are those with it."""
    return -(sink - lse).exp() * (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """What sums over blocks are kept in."""
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
    """Whether there is a kernel that spares the scores; else they are written out."""
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
    """The gradient of `_repeated`."""
    heads = x_NHLA.shape[1]
    return x_NHLA if groups == heads else x_NHLA.unflatten(1, (groups, heads // groups)).sum(2)
