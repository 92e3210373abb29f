"""The loss of a large vocabulary, summed over valid tokens, with a bounded piece of logits alive at once.

Shapes: T tokens, D dim, V vocabulary of this rank. The head's product and its gradients are computed piece by piece in
the forward, so neither the logits nor their gradient ever exist as a whole. What is minimised is the cross-entropy, or
a `Term` of a few statistics of each token's logits, whose gradients are known in closed form.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from ...dsl.user_parts.kinds import LOGPROB
from ...planner.mesh.sharding import piece
from ..parallel.axes import TensorAxis
from ..parallel.collectives import all_gather, all_reduce
from .layers import first_row

IGNORE = -100


class LossTerms(NamedTuple):
    """Sums over valid tokens: `objective` carries the gradient; `cross_entropy` is what is logged. Where no gradient is
    asked for, both are of the cross-entropy.

    each_T: the summands of `cross_entropy`, 0 where a token is not valid; None unless they are asked for.
    """

    objective: Tensor
    cross_entropy: Tensor
    each_T: Tensor | None = None


@frozen
class Term:
    """What is minimised of each token instead of its cross-entropy.

    function: is given the log-probability of each label, [t] in at least fp32, and by name what it `reads` besides, of
    STATISTICS; returns the loss of each token [t], which may depend on what is given of that token alone.
    failures: what errors of the function and of its backward pass through.
    """

    function: Callable[..., Tensor]
    reads: tuple[str, ...] = ()
    failures: Callable[[], AbstractContextManager[None]] = nullcontext

    def by(self, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each token [t], and the derivatives of their sum by what is `given`: the label's log-probability
        and behind it what is read, by name."""
        given = {name: value.detach().requires_grad_() for name, value in given.items()}
        logprob_T, *_ = given.values()
        with torch.enable_grad(), self.failures():
            loss_T = self.function(logprob_T, **{name: given[name] for name in self.reads})
            slopes = torch.autograd.grad(loss_T.sum(), tuple(given.values()), allow_unused=True, materialize_grads=True)
        return loss_T.detach(), dict(zip(given, slopes, strict=True))


@frozen(kw_only=True)
class Head:
    """How logits become a loss.

    term: what is minimised; None: the cross-entropy. z_weight: weight of lse². chunk_bytes: bytes of logits (as fp32)
    alive at once.
    vocabulary: its whole size, of which `tensor`, if any, cuts a piece for each rank. cap: logits l become
    cap · tanh(l / cap) (Gemma 2, arXiv 2408.00118); None: they are as they are.
    twice: the backward may run a second time, as in a pipeline that takes gradients of inputs and weights apart.
    """

    vocabulary: int
    z_weight: float
    chunk_bytes: int
    tensor: TensorAxis | None = None
    term: Term | None = None
    twice: bool = False
    cap: float | None = None

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
    """Σ (loss + z_weight · lse²) over tokens whose label is not −100; a loss is taken in at least fp32.

    z-loss: PaLM (arXiv 2204.02311) §5. The gradient of `hidden_TD` is that of this rank's piece of the vocabulary.
    With `each` the terms tell tokens apart; nothing else changes by that.
    """
    # Asked here: inside a custom forward gradients are off, and the inputs say they need one even under no_grad.
    enabled = torch.is_grad_enabled()
    needs = (enabled and hidden_TD.requires_grad, enabled and weight_VD.requires_grad)
    terms = _ChunkedLoss.apply(hidden_TD, weight_VD, labels_T, head, needs, each)
    objective, cross_entropy, each_T = terms  # pyright: ignore[reportGeneralTypeIssues]
    return LossTerms(objective, cross_entropy, each_T)


def whole_logits(hidden_TD: Tensor, weight_VD: Tensor, head: Head) -> Tensor:
    """Logits [T, whole vocabulary], without gradient."""
    logits_TV = F.linear(hidden_TD, weight_VD)
    _cap(logits_TV, head, slope=False)
    return logits_TV if head.tensor is None else _gathered(logits_TV, head)


def _cap(logits_TV: Tensor, head: Head, *, slope: bool) -> Tensor | None:
    """Cap logits, in place. Returns the derivatives of that, if there is a cap and they are asked for."""
    if head.cap is None:
        return None
    logits_TV.div_(head.cap).tanh_()
    slope_TV = logits_TV.square().neg_().add_(1) if slope else None
    logits_TV.mul_(head.cap)
    return slope_TV


def _gathered(logits_TV: Tensor, head: Head) -> Tensor:
    """Pieces side by side. Only the last ones can be narrower, so what fills them up lies behind the vocabulary."""
    assert head.tensor is not None
    filled_TV = F.pad(logits_TV, (0, head.widest - logits_TV.shape[1]))
    return all_gather(filled_TV, 1, head.tensor.group)[:, : head.vocabulary]


class _Statistics(NamedTuple):
    """Of every token: logarithm of the sum of exponentials, logit of the label, mean logit of the vocabulary and
    entropy where they are asked for; softmax of this rank's piece, and its logarithm with the entropy."""

    lse_T: Tensor
    label_T: Tensor
    mean_T: Tensor | None
    entropy_T: Tensor | None
    softmax_TV: Tensor
    logprob_TV: Tensor | None
    position_T: Tensor
    own_T: Tensor


def _statistics(logits_TV: Tensor, labels_T: Tensor, head: Head, reads: tuple[str, ...]) -> _Statistics:
    """`logits_TV` is overwritten."""
    tensor, width = head.tensor, logits_TV.shape[1]
    position_T = labels_T - head.first
    own_T = (position_T >= 0) & (position_T < width)
    position_T = torch.where(own_T, position_T, 0)
    mean_T = entropy_T = logprob_TV = None
    if tensor is not None and tensor.loss:
        lowest = torch.finfo(logits_TV.dtype).min
        top_T = logits_TV.amax(-1) if width else logits_TV.new_full(labels_T.shape, lowest)
        top_T = all_reduce(top_T, tensor.group, "max")
        sums = [(logits_TV - top_T[:, None]).exp_().sum(-1)]
        sums += [logits_TV.gather(1, position_T[:, None])[:, 0] * own_T if width else torch.zeros_like(sums[0])]
        if "mean_logprob_T" in reads:
            sums += [logits_TV.sum(-1)]
        if "entropy_T" in reads:
            below_TV = logits_TV - top_T[:, None]
            sums += [below_TV.exp().mul_(below_TV).sum(-1)]
            del below_TV
        sum_T, label_T, *more = all_reduce(torch.stack(sums), tensor.group)
        lse_T = sum_T.log() + top_T
        if "entropy_T" in reads:
            entropy_T = sum_T.log() - more.pop() / sum_T
        if "mean_logprob_T" in reads:
            mean_T = more.pop() / head.vocabulary
    else:
        every_TV, labels_at = logits_TV, position_T
        if tensor is not None:
            every_TV, labels_at = _gathered(logits_TV, head), labels_T.clamp(min=0)
        lse_T = torch.logsumexp(every_TV, dim=-1)
        label_T = every_TV.gather(1, labels_at[:, None])[:, 0]
        if "mean_logprob_T" in reads:
            mean_T = every_TV.mean(-1)
        if "entropy_T" in reads:
            below_TV = every_TV - lse_T[:, None]
            entropy_T = -below_TV.exp().mul_(below_TV).sum(-1)
            del below_TV
        del every_TV
    softmax_TV = logits_TV.sub_(lse_T[:, None])
    if "entropy_T" in reads:
        logprob_TV, softmax_TV = softmax_TV, softmax_TV.exp()
    else:
        softmax_TV.exp_()
    return _Statistics(lse_T, label_T, mean_T, entropy_T, softmax_TV, logprob_TV, position_T, own_T)


class _Minimised(NamedTuple):
    """The loss of each token and its derivatives by what it was computed from, by name; 0 where it is not valid."""

    loss_T: Tensor
    by: dict[str, Tensor]


def _minimised(term: Term, found: _Statistics, valid_T: Tensor) -> _Minimised:
    """Of tokens that are not valid the function is shown any log-probability: what it gives for them is left out."""
    known = {
        "mean_logprob_T": None if found.mean_T is None else found.mean_T - found.lse_T,
        "entropy_T": found.entropy_T,
        "lse_T": found.lse_T,
    }
    given = {LOGPROB: (found.label_T - found.lse_T).clamp_(max=0).masked_fill_(~valid_T, -1.0)}
    for name in term.reads:
        value_T = known[name]
        assert value_T is not None
        given[name] = value_T
    loss_T, by = term.by(given)
    by = {name: torch.where(valid_T, slope_T, 0.0) for name, slope_T in by.items()}
    return _Minimised(torch.where(valid_T, loss_T, 0.0), by)


def _gradient(found: _Statistics, valid_t: Tensor, head: Head) -> Tensor:
    """That of cross-entropy and z-loss by this rank's logits [t, V], in the place of the softmax."""
    grad_tV = found.softmax_TV.mul_((valid_t * (1 + 2 * head.z_weight * found.lse_T))[:, None])
    if grad_tV.shape[1]:
        grad_tV.scatter_add_(1, found.position_T[:, None], -(valid_t * found.own_T)[:, None])
    return grad_tV


def _gradient_of(by: dict[str, Tensor], found: _Statistics, valid_t: Tensor, head: Head) -> Tensor:
    """The same of a term, from its derivatives. Over logits z with softmax p: ∂ log p(label) = 1[label] − p, ∂ lse = p,
    ∂ (mean of log p) = 1/V − p, ∂ entropy = −p · (log p + entropy)."""
    factor_t = 2 * head.z_weight * found.lse_T * valid_t - by[LOGPROB]
    if "lse_T" in by:
        factor_t += by["lse_T"]
    if "mean_logprob_T" in by:
        factor_t -= by["mean_logprob_T"]
    if "entropy_T" in by:
        assert found.logprob_TV is not None and found.entropy_T is not None
        factor_t -= by["entropy_T"] * found.entropy_T
        grad_tV = found.logprob_TV.mul_(-by["entropy_T"][:, None]).add_(factor_t[:, None]).mul_(found.softmax_TV)
    else:
        grad_tV = found.softmax_TV.mul_(factor_t[:, None])
    if "mean_logprob_T" in by:
        grad_tV.add_((by["mean_logprob_T"] / head.vocabulary)[:, None])
    if grad_tV.shape[1]:
        grad_tV.scatter_add_(1, found.position_T[:, None], (by[LOGPROB] * found.own_T)[:, None])
    return grad_tV


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        head: Head,
        needs: tuple[bool, bool],
        each: bool,
    ):
        exact = torch.float64 if hidden_TD.dtype == torch.float64 else torch.float32
        objective = torch.zeros((), dtype=exact, device=hidden_TD.device)
        cross_entropy = torch.zeros_like(objective)
        each_T = hidden_TD.new_empty(labels_T.shape, dtype=exact) if each else None
        grad_hidden_TD = torch.empty_like(hidden_TD) if needs[0] else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=exact) if needs[1] else None
        term = head.term if any(needs) else None
        reads = () if term is None else term.reads
        for first in range(0, labels_T.numel(), head.chunk):
            part = slice(first, first + head.chunk)
            labels_t = labels_T[part]
            valid_t = (labels_t != IGNORE).to(exact)
            logits_tV = F.linear(hidden_TD[part], weight_VD).to(exact)
            slope_tV = _cap(logits_tV, head, slope=any(needs))
            found = _statistics(logits_tV, labels_t, head, reads)
            loss_t = (found.lse_T - found.label_T) * valid_t
            loss = loss_t.sum()
            if each_T is not None:
                each_T[part] = loss_t
            cross_entropy += loss
            minimised = None if term is None else _minimised(term, found, labels_t != IGNORE)
            loss = loss if minimised is None else minimised.loss_T.sum()
            objective += loss + head.z_weight * (found.lse_T.square() * valid_t).sum()
            if any(needs):
                if minimised is None:
                    grad_tV = _gradient(found, valid_t, head)
                else:
                    grad_tV = _gradient_of(minimised.by, found, valid_t, head)
                if slope_tV is not None:
                    grad_tV.mul_(slope_tV)
                    slope_tV = None
                grad_tV = grad_tV.to(hidden_TD.dtype)
                if grad_hidden_TD is not None:
                    torch.mm(grad_tV, weight_VD, out=grad_hidden_TD[part])
                if grad_weight_VD is None:
                    continue
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
            for grad in ctx.grads:
                if grad is not None:
                    grad.mul_(grad_outputs[0])
            ctx.scaled = True
        if not ctx.twice:
            del ctx.grads
        return grad_hidden_TD, grad_weight_VD, None, None, None, None
