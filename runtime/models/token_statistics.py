"""Log-probabilities of labels, and other statistics of each token's logits, for losses that look across tokens.

Shapes: T tokens, D dim, V vocabulary of this rank. In the forward logits are computed piece by piece, and of each token
only the log-sum-exp is left; the backward gets numbers [T], computes the logits of each piece a second time and makes
their gradients. So neither the logits nor their gradient ever exist as a whole, for the price of the head's product
once more.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from xtrain.dsl.user_parts.kinds import LOGPROB
from xtrain.runtime.models.head_product import HeadFactors, HeadProduct, product_of
from xtrain.runtime.models.loss import (
    IGNORE,
    Head,
    Statistics,
    cap_logits,
    cool_logits,
    gradient_of,
    own_positions,
    statistics_of,
)


def token_statistics(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    head: Head,
    reads: tuple[str, ...] = (),
    factors: Sequence[HeadFactors] = (),
) -> dict[str, Tensor]:
    """By name, in at least fp32, with gradients: the log-probability [T] of each label, and what of STATISTICS is read.

    Where the label is −100 a log-probability is −1, and nothing has a gradient. The gradient of `hidden_TD` is that of
    this rank's piece of the vocabulary.
    """
    product = product_of(hidden_TD, weight_VD, factors)
    found = _TokenStatistics.apply(product, labels_T, head, reads, *product.tensors)
    return dict(zip((LOGPROB, *reads), found, strict=True))  # pyright: ignore[reportArgumentType]


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        product: HeadProduct,
        labels_T: Tensor,
        head: Head,
        reads: tuple[str, ...],
        *tensors: Tensor,
    ):
        hidden_TD = product.hidden_TD
        exact = torch.float64 if hidden_TD.dtype == torch.float64 else torch.float32
        lse_T = torch.empty(labels_T.shape, dtype=exact, device=hidden_TD.device)
        found_T = [torch.empty_like(lse_T) for _ in (LOGPROB, *reads)]
        for first in range(0, labels_T.numel(), head.chunk):
            part = slice(first, first + head.chunk)
            logits_tV = product.logits(part).to(exact)
            cap_logits(logits_tV, head, slope=False)
            cool_logits(logits_tV, head)
            found = statistics_of(logits_tV, labels_T[part], head, reads)
            lse_T[part] = found.lse_T
            found_T[0][part] = found.logprobs(labels_T[part] != IGNORE)
            for name, value_T in zip(reads, found_T[1:], strict=True):
                value_T[part] = found.read(name)
            del logits_tV, found  # nothing of a piece is alive in the next one
        entropy_T = found_T[1 + reads.index("entropy_T")] if "entropy_T" in reads else None
        if any(product.needs):
            ctx.save_for_backward(labels_T, lse_T, entropy_T, *tensors)
            ctx.product = product.with_tensors(tuple(each.new_empty(0) for each in tensors))
        ctx.head, ctx.reads, ctx.grads = head, reads, None
        return tuple(found_T)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        grads = ctx.grads
        if grads is None:
            grads = _gradients(ctx, dict(zip((LOGPROB, *ctx.reads), grad_outputs, strict=True)))
        # In a pipeline that takes gradients of inputs and weights apart it is called for both.
        ctx.grads = grads if ctx.head.twice and ctx.grads is None else None
        return None, None, None, None, *grads


def _gradients(ctx: Any, by: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
    """Of what logits are of, from those of the statistics [T]. The ranks of a vocabulary need not communicate:
    with the log-sum-exp each knows the softmax of its piece."""
    labels_T, lse_T, entropy_T, *tensors = ctx.saved_tensors
    head, exact = ctx.head, lse_T.dtype
    product = ctx.product.with_tensors(tensors)
    grads = product.gradients(exact, head.temperature)
    for first in range(0, labels_T.numel(), head.chunk):
        part = slice(first, first + head.chunk)
        labels_t, lse_t = labels_T[part], lse_T[part]
        valid_t = (labels_t != IGNORE).to(exact)
        logits_tV = product.logits(part).to(exact)
        slope_tV = cap_logits(logits_tV, head, slope=True)
        cool_logits(logits_tV, head)
        position_t, own_t = own_positions(labels_t, head.first, logits_tV.shape[1])
        logprob_tV = logits_tV.sub_(lse_t[:, None])
        softmax_tV = logprob_tV.exp_() if entropy_T is None else logprob_tV.exp()
        found = Statistics(
            lse_T=lse_t,
            label_T=lse_t,  # not needed for gradients
            mean_T=None,
            entropy_T=None if entropy_T is None else entropy_T[part],
            softmax_TV=softmax_tV,
            logprob_TV=None if entropy_T is None else logprob_tV,
            position_T=position_t,
            own_T=own_t,
        )
        del logits_tV, logprob_tV, softmax_tV
        grad_tV = gradient_of({name: grad[part] * valid_t for name, grad in by.items()}, found, valid_t, head)
        if slope_tV is not None:
            grad_tV.mul_(slope_tV)
            slope_tV = None
        grads.add(part, grad_tV)
        del found, grad_tV, slope_tV
    return grads.found()
