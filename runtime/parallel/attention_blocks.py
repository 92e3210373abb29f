"""Attention of some queries over some keys, as one summand of attention over all keys: outputs with their logsumexp.

Shapes: N segments, H heads of queries, K heads of keys and values (H a multiple of K), Q queries, L keys, A head width.
"""

import math

import torch
from torch import Tensor

from .fake import device_type

ATEN = torch.ops.aten


def attend(q_NHQA: Tensor, k_NKLA: Tensor, v_NKLA: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(out [N, H, Q, A], logsumexp of the scores [N, H, Q] in at least fp32). Causal blocks have Q = L."""
    heads = q_NHQA.shape[1]
    k_NHLA, v_NHLA = _repeated(k_NKLA, heads), _repeated(v_NKLA, heads)
    if device_type(q_NHQA) == "cpu":
        return ATEN._scaled_dot_product_flash_attention_for_cpu(q_NHQA, k_NHLA, v_NHLA, 0.0, causal)
    if _has_flash(q_NHQA):
        return ATEN._scaled_dot_product_flash_attention(q_NHQA, k_NHLA, v_NHLA, 0.0, causal)[:2]
    return written_out(q_NHQA, k_NHLA, v_NHLA, causal)


def attend_backward(
    grad_NHQA: Tensor, q_NHQA: Tensor, k_NKLA: Tensor, v_NKLA: Tensor, out_NHQA: Tensor, lse_NHQ: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What this block adds to the gradients of q, k and v; `out` and `lse` are those over all keys, not the block's.

    With P = exp(scores - lse), this is the backward of FlashAttention (Dao et al. 2022, algorithm 4): it never
    normalises anew, so the sum over blocks is the gradient of the whole.
    """
    heads, groups = q_NHQA.shape[1], k_NKLA.shape[1]
    k_NHLA, v_NHLA = _repeated(k_NKLA, heads), _repeated(v_NKLA, heads)
    if device_type(q_NHQA) == "cpu":
        backward = ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        grads = backward(grad_NHQA, q_NHQA, k_NHLA, v_NHLA, out_NHQA, lse_NHQ, 0.0, causal)
    elif _has_flash(q_NHQA):
        queries, keys = q_NHQA.shape[2], k_NHLA.shape[2]
        seed = torch.zeros(2, dtype=torch.uint64, device=q_NHQA.device)  # of dropout, which there is none of
        grads = ATEN._scaled_dot_product_flash_attention_backward(
            *(grad_NHQA, q_NHQA, k_NHLA, v_NHLA, out_NHQA, lse_NHQ.contiguous()),
            *(None, None, queries, keys, 0.0, causal, seed, seed[0]),
        )
    else:
        grads = written_out_backward(grad_NHQA, q_NHQA, k_NHLA, v_NHLA, out_NHQA, lse_NHQ, causal)
    grad_q_NHQA, grad_k_NHLA, grad_v_NHLA = grads
    return grad_q_NHQA, _summed(grad_k_NHLA, groups), _summed(grad_v_NHLA, groups)


def written_out(q_NHQA: Tensor, k_NHLA: Tensor, v_NHLA: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """`attend` in plain operations, with Q · L scores in memory: for fp32 on CUDA, or head widths without a kernel."""
    scores_NHQL = _scores(q_NHQA, k_NHLA, causal)
    lse_NHQ = scores_NHQL.logsumexp(-1)
    weights_NHQL = (scores_NHQL - lse_NHQ[..., None]).exp()
    return (weights_NHQL @ v_NHLA.to(weights_NHQL.dtype)).to(q_NHQA.dtype), lse_NHQ


def written_out_backward(
    grad_NHQA: Tensor, q_NHQA: Tensor, k_NHLA: Tensor, v_NHLA: Tensor, out_NHQA: Tensor, lse_NHQ: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` in plain operations."""
    weights_NHQL = (_scores(q_NHQA, k_NHLA, causal) - lse_NHQ[..., None]).exp()
    exact, scale = weights_NHQL.dtype, 1 / math.sqrt(q_NHQA.shape[-1])
    grad = grad_NHQA.to(exact)
    share_NHQ = (grad * out_NHQA.to(exact)).sum(-1)
    grad_scores_NHQL = weights_NHQL * (grad @ v_NHLA.to(exact).mT - share_NHQ[..., None]) * scale
    grad_q_NHQA = grad_scores_NHQL @ k_NHLA.to(exact)
    grad_k_NHLA = grad_scores_NHQL.mT @ q_NHQA.to(exact)
    grad_v_NHLA = weights_NHQL.mT @ grad
    return grad_q_NHQA.to(q_NHQA.dtype), grad_k_NHLA.to(k_NHLA.dtype), grad_v_NHLA.to(v_NHLA.dtype)


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """What sums over blocks are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scores(q_NHQA: Tensor, k_NHLA: Tensor, causal: bool) -> Tensor:
    exact = exact_type(q_NHQA.dtype)
    scores_NHQL = q_NHQA.to(exact) @ k_NHLA.to(exact).mT / math.sqrt(q_NHQA.shape[-1])
    if causal:
        future_QL = torch.ones(scores_NHQL.shape[-2:], dtype=torch.bool, device=scores_NHQL.device).triu(1)
        scores_NHQL = scores_NHQL.masked_fill(future_QL, -math.inf)
    return scores_NHQL


def _has_flash(q_NHQA: Tensor) -> bool:
    half = q_NHQA.dtype in (torch.float16, torch.bfloat16)
    return device_type(q_NHQA) == "cuda" and half and q_NHQA.shape[-1] % 8 == 0 and q_NHQA.shape[-1] <= 256


def _repeated(x_NKLA: Tensor, heads: int) -> Tensor:
    groups = x_NKLA.shape[1]
    return x_NKLA if groups == heads else x_NKLA.repeat_interleave(heads // groups, dim=1)


def _summed(x_NHLA: Tensor, groups: int) -> Tensor:
    """The gradient of `_repeated`."""
    heads = x_NHLA.shape[1]
    return x_NHLA if groups == heads else x_NHLA.unflatten(1, (groups, heads // groups)).sum(2)
