"""Cross-entropy of a large vocabulary, summed over valid tokens, with a bounded piece of logits alive at once.

Shapes: T tokens, D dim, V vocabulary. The head's product and its gradients are computed piece by piece in the forward,
so neither the logits nor their gradient ever exist as a whole.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


class LossTerms(NamedTuple):
    """Sums over valid tokens: `objective` carries the gradient; `cross_entropy` is what is logged."""

    objective: Tensor
    cross_entropy: Tensor


def token_losses(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, *, z_weight: float, chunk_bytes: int
) -> LossTerms:
    """Σ (−log p(label) + z_weight · lse²) over tokens whose label is not −100; the loss is taken in at least fp32.

    z-loss: PaLM (arXiv 2204.02311) §5. Logits of at most `chunk_bytes` (as fp32) are alive at once.
    """
    tokens, vocabulary = labels_T.numel(), weight_VD.shape[0]
    per_chunk = max(1, chunk_bytes // (4 * vocabulary))
    if tokens <= per_chunk:
        return _losses(F.linear(hidden_TD, weight_VD), labels_T, z_weight)
    # Asked here: inside a custom forward gradients are off, and the inputs say they need one even under no_grad.
    needs = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    terms = _ChunkedLoss.apply(hidden_TD, weight_VD, labels_T, z_weight, per_chunk, needs)
    objective, cross_entropy = terms  # pyright: ignore[reportGeneralTypeIssues]
    return LossTerms(objective, cross_entropy)


def _losses(logits_TV: Tensor, labels_T: Tensor, z_weight: float) -> LossTerms:
    if logits_TV.dtype not in (torch.float32, torch.float64):
        logits_TV = logits_TV.float()
    cross_entropy = F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE, reduction="sum")
    if not z_weight:
        return LossTerms(cross_entropy, cross_entropy.detach())
    lse_T = torch.logsumexp(logits_TV, dim=-1)
    z_loss = (lse_T.square() * (labels_T != IGNORE)).sum()
    return LossTerms(cross_entropy + z_weight * z_loss, cross_entropy.detach())


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, z_weight: float, per_chunk: int, needs: bool
    ):
        exact = torch.float64 if hidden_TD.dtype == torch.float64 else torch.float32
        objective = torch.zeros((), dtype=exact, device=hidden_TD.device)
        cross_entropy = torch.zeros_like(objective)
        grad_hidden_TD = torch.empty_like(hidden_TD) if needs else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=exact) if needs else None
        for first in range(0, labels_T.numel(), per_chunk):
            part = slice(first, first + per_chunk)
            with torch.enable_grad():
                logits_TV = F.linear(hidden_TD[part], weight_VD).to(exact).detach().requires_grad_(needs)
                terms = _losses(logits_TV, labels_T[part], z_weight)
            objective += terms.objective.detach()
            cross_entropy += terms.cross_entropy
            if grad_hidden_TD is not None and grad_weight_VD is not None:
                (grad_logits_TV,) = torch.autograd.grad(terms.objective, logits_TV)
                grad_logits_TV = grad_logits_TV.to(hidden_TD.dtype)
                torch.mm(grad_logits_TV, weight_VD, out=grad_hidden_TD[part])
                grad_weight_VD += grad_logits_TV.t() @ hidden_TD[part]
        # Kept on ctx, not saved for backward: it is scaled in place there, once, and then gone.
        ctx.grads = (grad_hidden_TD, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype))
        ctx.mark_non_differentiable(cross_entropy)
        return objective, cross_entropy

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        grad_hidden_TD, grad_weight_VD = ctx.grads
        del ctx.grads
        scale = grad_outputs[0]
        return grad_hidden_TD.mul_(scale), grad_weight_VD.mul_(scale), None, None, None, None
