"""Cross-entropy of a large vocabulary, summed over valid tokens, with a bounded piece of logits alive at once.

Shapes: T tokens, D dim, V vocabulary of this rank. The head's product and its gradients are computed piece by piece in
the forward, so neither the logits nor their gradient ever exist as a whole.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from ...planner.mesh.sharding import piece
from ..parallel.axes import TensorAxis
from ..parallel.collectives import all_gather, all_reduce
from .layers import first_row

IGNORE = -100


class LossTerms(NamedTuple):
    """Sums over valid tokens: `objective` carries the gradient; `cross_entropy` is what is logged.

    each_T: the summands of `cross_entropy`, 0 where a token is not valid; None unless they are asked for.
    """

    objective: Tensor
    cross_entropy: Tensor
    each_T: Tensor | None = None


@frozen(kw_only=True)
class Head:
    """How logits become a loss.

    z_weight: weight of lse². chunk_bytes: bytes of logits (as fp32) alive at once.
    vocabulary: its whole size, of which `tensor`, if any, cuts a piece for each rank.
    twice: the backward may run a second time, as in a pipeline that takes gradients of inputs and weights apart.
    """

    vocabulary: int
    z_weight: float
    chunk_bytes: int
    tensor: TensorAxis | None = None
    twice: bool = False

    @property
    def first(self) -> int:
        """The first token id of this rank's piece."""
        return first_row(self.vocabulary, self.tensor)

    @property
    def widest(self) -> int:
        """The largest piece of a rank."""
        return self.vocabulary if self.tensor is None else piece(self.vocabulary, self.tensor.size, 0)

    @property
    def chunk(self) -> int:
        """Tokens whose logits are alive at once."""
        alive = self.widest if self.tensor is None or self.tensor.loss else self.vocabulary
        return max(1, self.chunk_bytes // (4 * alive))


def token_losses(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, head: Head, *, each: bool = False
) -> LossTerms:
    """Σ (−log p(label) + z_weight · lse²) over tokens whose label is not −100; the loss is taken in at least fp32.

    z-loss: PaLM (arXiv 2204.02311) §5. The gradient of `hidden_TD` is that of this rank's piece of the vocabulary.
    With `each` the terms tell tokens apart; nothing else changes by that.
    """
    # Asked here: inside a custom forward gradients are off, and the inputs say they need one even under no_grad.
    needs = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    terms = _ChunkedLoss.apply(hidden_TD, weight_VD, labels_T, head, needs, each)
    objective, cross_entropy, each_T = terms  # pyright: ignore[reportGeneralTypeIssues]
    return LossTerms(objective, cross_entropy, each_T)


def whole_logits(hidden_TD: Tensor, weight_VD: Tensor, head: Head) -> Tensor:
    """Logits [T, whole vocabulary], without gradient."""
    logits_TV = F.linear(hidden_TD, weight_VD)
    return logits_TV if head.tensor is None else _gathered(logits_TV, head)


def _gathered(logits_TV: Tensor, head: Head) -> Tensor:
    """Pieces side by side. Only the last ones can be narrower, so what fills them up lies behind the vocabulary."""
    assert head.tensor is not None
    filled_TV = F.pad(logits_TV, (0, head.widest - logits_TV.shape[1]))
    return all_gather(filled_TV, 1, head.tensor.group)[:, : head.vocabulary]


class _Statistics(NamedTuple):
    """Of every token: logarithm of the sum of exponentials, logit of the label, softmax of this rank's piece."""

    lse_T: Tensor
    label_T: Tensor
    softmax_TV: Tensor
    position_T: Tensor
    own_T: Tensor


def _statistics(logits_TV: Tensor, labels_T: Tensor, head: Head) -> _Statistics:
    """`logits_TV` is overwritten."""
    tensor, width = head.tensor, logits_TV.shape[1]
    position_T = labels_T - head.first
    own_T = (position_T >= 0) & (position_T < width)
    position_T = torch.where(own_T, position_T, 0)
    if tensor is not None and not tensor.loss:
        every_TV = _gathered(logits_TV, head)
        lse_T = torch.logsumexp(every_TV, dim=-1)
        label_T = every_TV.gather(1, labels_T.clamp(min=0)[:, None])[:, 0]
    elif tensor is not None:
        lowest = torch.finfo(logits_TV.dtype).min
        top_T = logits_TV.amax(-1) if width else logits_TV.new_full(labels_T.shape, lowest)
        top_T = all_reduce(top_T, tensor.group, "max")
        sum_T = (logits_TV - top_T[:, None]).exp_().sum(-1)
        label_T = logits_TV.gather(1, position_T[:, None])[:, 0] * own_T if width else torch.zeros_like(sum_T)
        sum_T, label_T = all_reduce(torch.stack((sum_T, label_T)), tensor.group)
        lse_T = sum_T.log() + top_T
    else:
        lse_T = torch.logsumexp(logits_TV, dim=-1)
        label_T = logits_TV.gather(1, position_T[:, None])[:, 0]
    return _Statistics(lse_T, label_T, logits_TV.sub_(lse_T[:, None]).exp_(), position_T, own_T)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, head: Head, needs: bool, each: bool):
        exact = torch.float64 if hidden_TD.dtype == torch.float64 else torch.float32
        objective = torch.zeros((), dtype=exact, device=hidden_TD.device)
        cross_entropy = torch.zeros_like(objective)
        each_T = hidden_TD.new_empty(labels_T.shape, dtype=exact) if each else None
        grad_hidden_TD = torch.empty_like(hidden_TD) if needs else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=exact) if needs else None
        for first in range(0, labels_T.numel(), head.chunk):
            part = slice(first, first + head.chunk)
            labels_t = labels_T[part]
            valid_t = (labels_t != IGNORE).to(exact)
            found = _statistics(F.linear(hidden_TD[part], weight_VD).to(exact), labels_t, head)
            loss_t = (found.lse_T - found.label_T) * valid_t
            loss = loss_t.sum()
            if each_T is not None:
                each_T[part] = loss_t
            cross_entropy += loss
            objective += loss + head.z_weight * (found.lse_T.square() * valid_t).sum()
            if grad_hidden_TD is not None and grad_weight_VD is not None:
                grad_tV = found.softmax_TV.mul_((valid_t * (1 + 2 * head.z_weight * found.lse_T))[:, None])
                if grad_tV.shape[1]:
                    grad_tV.scatter_add_(1, found.position_T[:, None], -(valid_t * found.own_T)[:, None])
                grad_tV = grad_tV.to(hidden_TD.dtype)
                torch.mm(grad_tV, weight_VD, out=grad_hidden_TD[part])
                if grad_tV.dtype == exact:
                    grad_weight_VD.addmm_(grad_tV.t(), hidden_TD[part])  # no second [V, D] for the product
                else:
                    grad_weight_VD += grad_tV.t() @ hidden_TD[part]
        # Kept on ctx, not saved for backward: it is scaled in place there, once.
        ctx.grads = (grad_hidden_TD, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype))
        ctx.twice, ctx.scaled = head.twice, False
        ctx.mark_non_differentiable(*(term for term in (cross_entropy, each_T) if term is not None))
        return objective, cross_entropy, each_T

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        grad_hidden_TD, grad_weight_VD = ctx.grads
        if not ctx.scaled:
            grad_hidden_TD.mul_(grad_outputs[0])
            grad_weight_VD.mul_(grad_outputs[0])
            ctx.scaled = True
        if not ctx.twice:
            del ctx.grads
        return grad_hidden_TD, grad_weight_VD, None, None, None, None
