"""`setup.loss` of cross_entropy with options."""

import torch
from torch import Tensor

from xtrain.dsl.schema.losses import WEIGHTS
from xtrain.runtime.base.ops import op
from xtrain.runtime.nn.loss import Term
from xtrain.runtime.nn.transformer import ModelParts


@op("setup.loss.cross_entropy")
def minimise(
    model: ModelParts,
    label_smoothing: float = 0.0,
    weighted: bool = False,
    focal: float = 0.0,
    dynamic: bool = False,
) -> None:
    """Set a cross-entropy with smoothed labels, weights, focal, or dynamic."""
    model.minimise(cross_entropy(label_smoothing, weighted, focal, dynamic))


def cross_entropy(smoothing: float, weighted: bool = False, focal: float = 0.0, dynamic: bool = False) -> Term:
    """Return the loss w · ((1 − s) · d · (1 − p)^γ · −log p(label) + s · the mean of −log p over the vocabulary); s:
    `smoothing`, as in torch; γ: `focal`; d: p without its gradient, if `dynamic`, else 1; w: the token's weight, if
    `weighted`."""

    def loss(logprob_T: Tensor, **given: Tensor) -> Tensor:
        loss_T = (smoothing - 1) * logprob_T
        if focal:
            # Never 0: there a power below 1 has no derivative.
            unsure_T = (-torch.expm1(logprob_T)).clamp(min=torch.finfo(logprob_T.dtype).tiny)
            loss_T = unsure_T**focal * loss_T
        if dynamic:
            loss_T = logprob_T.detach().exp() * loss_T
        if smoothing:
            loss_T = loss_T - smoothing * given["mean_logprob_T"]
        return loss_T * given[WEIGHTS] if weighted else loss_T

    reads = ("mean_logprob_T",) if smoothing else ()
    return Term(loss, reads=reads, columns=(WEIGHTS,) if weighted else ())
