"""Loss over a large vocabulary, summed over valid tokens, with a bounded piece of the logits in memory at once.

The head computes the gradients of a term's statistics in its forward, as logits are not kept for the backward.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from xtrain.dsl.user_parts.kinds import LOGPROB
from xtrain.plan.mesh import piece, tokens_in
from xtrain.runtime.base.collectives import all_gather, all_reduce
from xtrain.runtime.base.state import KlWeight
from xtrain.runtime.nn.axes import TensorAxis
from xtrain.runtime.nn.head_product import (
    ComparedTokens,
    HeadFactors,
    HeadProduct,
    leave_out,
    own_positions,
    product_of,
)
from xtrain.runtime.nn.layers import first_row

IGNORE = -100


class LossTerms(NamedTuple):
    """Sums over valid tokens: `objective` has the gradient; `cross_entropy` is logged.

    each_T: the summands of `cross_entropy`, 0 for invalid tokens; None unless requested. recorded: [1 + metrics], the
    objective and a term's metrics, as this rank counts them; None if only the cross-entropy is minimized.
    """

    objective: Tensor
    cross_entropy: Tensor
    each_T: Tensor | None = None
    recorded: Tensor | None = None


class TermValues(NamedTuple):
    """Loss of each token [t], its derivatives by the term's inputs, by name, and the term's metrics [metrics, t]."""

    loss_T: Tensor
    by: dict[str, Tensor]
    metrics_MT: Tensor


class Objective:
    """Minimized instead of the cross-entropy: per token (`Term`, `Distillation`), or per unit."""

    __slots__ = ()
    metrics: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


@frozen
class Term(Objective):
    """Objective per token instead of its cross-entropy.

    function: gets the log-probability of each label, [t] in at least fp32, and by name the STATISTICS in `reads` and
    the numbers of its `columns`; returns the loss of each token [t], which may depend only on that token's values, and
    if it has `metrics`, a dict of these, each [t]. failures: context for errors of the function and its backward.
    kl_weight: weight that the function reads.
    """

    function: Callable[..., Any]
    reads: tuple[str, ...] = ()
    failures: Callable[[], AbstractContextManager[None]] = nullcontext
    columns: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    kl_weight: KlWeight | None = None

    def by(self, given: dict[str, Tensor], columns: Mapping[str, Tensor] | None = None) -> TermValues:
        """Return the values with derivatives. given: the label's log-probability, then the statistics read, by name;
        `columns` have no derivative."""
        given = {name: value.detach().requires_grad_() for name, value in given.items()}
        logprob_T, *_ = given.values()
        with torch.enable_grad(), self.failures():
            result = self.function(logprob_T, **{name: given[name] for name in self.reads}, **(columns or {}))
            loss_T, metrics = result if self.metrics else (result, {})
            slopes = torch.autograd.grad(loss_T.sum(), tuple(given.values()), allow_unused=True, materialize_grads=True)
        metrics_MT = logprob_T.new_empty(len(self.metrics), len(logprob_T))
        for number, name in enumerate(self.metrics):
            metrics_MT[number] = metrics[name].detach()
        return TermValues(loss_T.detach(), dict(zip(given, slopes, strict=True)), metrics_MT)


@frozen(kw_only=True)
class Head:
    """Settings from logits to loss.

    term: the objective; None: the cross-entropy. z_weight: weight of lse². chunk_bytes: bytes of logits (as fp32) in
    memory at once. vocabulary: its whole size, of which `tensor`, if any, cuts a piece for each rank. cap: logits l
    become cap · tanh(l / cap) (Gemma 2, arXiv 2408.00118); None: unchanged. twice: the backward may run twice, as in a
    pipeline that computes gradients of inputs and weights separately. temperature: divisor of the logits, after the
    cap. compiled: the losses and gradients of a piece are compiled, see `compiled_piece`. kept_TK: tokens that each
    distribution is of, ids from 1, 0: none; None: all. compared: what to compare distributions with.
    """

    vocabulary: int
    z_weight: float
    chunk_bytes: int
    tensor: TensorAxis | None = None
    term: Objective | None = None
    twice: bool = False
    cap: float | None = None
    temperature: float = 1.0
    compiled: bool = False
    kept_TK: Tensor | None = None
    compared: ComparedTokens | None = None

    @property
    def first(self) -> int:
        """The first token id of this rank's piece."""
        return first_row(self.vocabulary, self.tensor)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks with pieces of the vocabulary, if any."""
        return None if self.tensor is None else self.tensor.group

    @property
    def widest(self) -> int:
        """The largest piece of a rank."""
        return self.vocabulary if self.tensor is None else piece(self.vocabulary, self.tensor.size, 0)

    @property
    def chunk(self) -> int:
        """Number of tokens whose logits are in memory at once."""
        return self.at_once(1)

    def at_once(self, models: int) -> int:
        """Return the number of tokens whose logits of `models` models may be in memory at once."""
        alive = self.widest if self.tensor is None or self.tensor.loss else self.vocabulary
        return tokens_in(self.chunk_bytes, alive * models, whole=self.compiled)


def token_losses(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    head: Head,
    *,
    each: bool = False,
    columns: Mapping[str, Tensor] | None = None,
    factors: Sequence[HeadFactors] = (),
) -> LossTerms:
    """Return Σ (loss + z_weight · lse²) over tokens whose label is not −100; losses are in at least fp32.

    columns: numbers [T] for the term, by name; ignored without label. z-loss: PaLM (arXiv 2204.02311) §5. The gradient
    of `hidden_TD` is over this rank's piece of the vocabulary. `each` adds the losses of single tokens; nothing else
    changes. factors: adapters' summands of the logits.
    """
    product = product_of(hidden_TD, weight_VD, factors)
    terms = _ChunkedLoss.apply(product, labels_T, head, each, columns or {}, *product.tensors)
    objective, cross_entropy, each_T, metrics_M = terms  # pyright: ignore[reportGeneralTypeIssues]
    records = head.term is not None or head.z_weight > 0
    recorded = torch.cat((objective.detach()[None], metrics_M)) if records else None
    return LossTerms(objective, cross_entropy, each_T, recorded)


def whole_logits(hidden_TD: Tensor, weight_VD: Tensor, head: Head, factors: Sequence[HeadFactors] = ()) -> Tensor:
    """Return logits [T, whole vocabulary], without gradient."""
    logits_TV = product_of(hidden_TD, weight_VD, factors).logits(slice(0, len(hidden_TD)))
    cap_logits(logits_TV, head, slope=False)
    return logits_TV if head.tensor is None else gathered(logits_TV, head)


def cap_logits(logits_TV: Tensor, head: Head, *, slope: bool) -> Tensor | None:
    """Cap logits, in place. Returns the derivatives of the cap if there is one and `slope`."""
    if head.cap is None:
        return None
    logits_TV.div_(head.cap).tanh_()
    slope_TV = logits_TV.square().neg_().add_(1) if slope else None
    logits_TV.mul_(head.cap)
    return slope_TV


def cool_logits(logits_TV: Tensor, head: Head, part: slice) -> None:
    """Divide logits by the temperature and leave tokens out, in place; `HeadGradients` divides their gradients. part:
    of the tokens."""
    if head.temperature != 1:
        logits_TV.div_(head.temperature)
    if head.kept_TK is not None:
        leave_out(logits_TV, head.kept_TK[part], head.first)


def gathered(logits_TV: Tensor, head: Head) -> Tensor:
    """Gather the pieces of the vocabulary. Only the last ones can be narrower, so their padding is after the
    vocabulary."""
    assert head.tensor is not None
    filled_TV = F.pad(logits_TV, (0, head.widest - logits_TV.shape[1]))
    return all_gather(filled_TV, 1, head.tensor.group)[:, : head.vocabulary]


class Statistics(NamedTuple):
    """Statistics of every token: log-sum-exp, logit of the label, mean logit and entropy if needed; softmax of this
    rank's piece, and with the entropy its logarithm."""

    lse_T: Tensor
    label_T: Tensor
    mean_T: Tensor | None
    entropy_T: Tensor | None
    softmax_TV: Tensor
    logprob_TV: Tensor | None
    position_T: Tensor
    own_T: Tensor

    def logprobs(self, valid_T: Tensor) -> Tensor:
        """Return log-probabilities of the labels; −1 without label."""
        return (self.label_T - self.lse_T).clamp_(max=0).masked_fill_(~valid_T, -1.0)

    def read(self, name: str) -> Tensor:
        """Return one of STATISTICS."""
        known = {
            "mean_logprob_T": None if self.mean_T is None else self.mean_T - self.lse_T,
            "entropy_T": self.entropy_T,
            "lse_T": self.lse_T,
        }
        value_T = known[name]
        assert value_T is not None
        return value_T


def statistics_of(logits_TV: Tensor, labels_T: Tensor, head: Head, reads: tuple[str, ...]) -> Statistics:
    """Compute the statistics; overwrites `logits_TV`."""
    tensor, width = head.tensor, logits_TV.shape[1]
    position_T, own_T = own_positions(labels_T, head.first, width)
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
            every_TV, labels_at = gathered(logits_TV, head), labels_T.clamp(min=0)
        label_T = every_TV.gather(1, labels_at[:, None])[:, 0]
        if "mean_logprob_T" in reads:
            mean_T = every_TV.mean(-1)
        if tensor is None and "entropy_T" not in reads:  # `logsumexp` would need as many bytes again
            top_T = logits_TV.amax(-1)
            softmax_TV = logits_TV.sub_(top_T[:, None]).exp_()
            sum_T = softmax_TV.sum(-1)
            lse_T = sum_T.log() + top_T
            softmax_TV.div_(sum_T[:, None])
            return Statistics(lse_T, label_T, mean_T, None, softmax_TV, None, position_T, own_T)
        lse_T = torch.logsumexp(every_TV, dim=-1)
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
    return Statistics(lse_T, label_T, mean_T, entropy_T, softmax_TV, logprob_TV, position_T, own_T)


def compiled_piece(z_weight: float, temperature: float, exact: torch.dtype, *, slopes: bool) -> Callable[..., Any]:
    """Return the function of a piece of logits [t, V] and its labels [t]: cross-entropy and z-loss of each token, the
    objective and, with `slopes`, its gradient in the logits' format.

    Compiled it is two kernels, which read a bf16 logit three times and write its gradient: 8 bytes a logit, where
    separate operations move about 60. For logits of the whole vocabulary on one rank, without a cap.
    """
    key = (z_weight, temperature, exact, slopes)
    if key not in _PIECES:
        _PIECES[key] = torch.compile(_piece(*key))
    return _PIECES[key]


_PIECES: dict[tuple[float, float, torch.dtype, bool], Callable[..., Any]] = {}


def _piece(z_weight: float, temperature: float, exact: torch.dtype, slopes: bool) -> Callable[..., Any]:
    def piece_of(logits_tV: Tensor, labels_t: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        valid_t = labels_t != IGNORE
        exact_tV = logits_tV.to(exact)
        if temperature != 1:
            exact_tV = exact_tV / temperature
        lse_t = torch.logsumexp(exact_tV, dim=-1)
        label_t = exact_tV.gather(1, torch.where(valid_t, labels_t, 0)[:, None])[:, 0]
        loss_t = (lse_t - label_t) * valid_t
        objective = loss_t.sum() + z_weight * (lse_t.square() * valid_t).sum()
        if not slopes:
            return loss_t, objective, None
        own_tV = torch.arange(logits_tV.shape[1], device=labels_t.device) == labels_t[:, None]  # none for IGNORE
        factor_t = valid_t * (1 + 2 * z_weight * lse_t)
        grad_tV = (exact_tV - lse_t[:, None]).exp() * factor_t[:, None] - own_tV.to(exact)
        return loss_t, objective, (grad_tV / temperature).to(logits_tV.dtype)

    return piece_of


def _minimised(term: Term, stats: Statistics, valid_T: Tensor, columns: dict[str, Tensor]) -> TermValues:
    """Return the term's values, all 0 for invalid tokens. For these the function gets arbitrary log-probabilities and
    columns of 0; its results are ignored."""
    given = {LOGPROB: stats.logprobs(valid_T)} | {name: stats.read(name) for name in term.reads}
    exact = given[LOGPROB].dtype
    loss_T, by, metrics_MT = term.by(given, {name: _where(valid_T, columns[name].to(exact)) for name in term.columns})
    by = {name: _where(valid_T, slope_T) for name, slope_T in by.items()}
    return TermValues(_where(valid_T, loss_T), by, _where(valid_T, metrics_MT))


def _where(valid_T: Tensor, values: Tensor) -> Tensor:
    return torch.where(valid_T, values, 0.0)


def _gradient(stats: Statistics, valid_t: Tensor, head: Head) -> Tensor:
    """Return the gradient of cross-entropy and z-loss by this rank's logits [t, V], in place of the softmax."""
    grad_tV = stats.softmax_TV.mul_((valid_t * (1 + 2 * head.z_weight * stats.lse_T))[:, None])
    if grad_tV.shape[1]:
        grad_tV.scatter_add_(1, stats.position_T[:, None], -(valid_t * stats.own_T)[:, None])
    return grad_tV


def gradient_of(by: dict[str, Tensor], stats: Statistics, valid_t: Tensor, head: Head) -> Tensor:
    """Return the gradient of a term by the logits, from its derivatives.

    Over logits z with softmax p: ∂ log p(label) = 1[label] − p, ∂ lse = p, ∂ (mean of log p) = 1/V − p, ∂ entropy = −p
    · (log p + entropy).
    """
    factor_t = 2 * head.z_weight * stats.lse_T * valid_t - by[LOGPROB]
    if "lse_T" in by:
        factor_t += by["lse_T"]
    if "mean_logprob_T" in by:
        factor_t -= by["mean_logprob_T"]
    if "entropy_T" in by:
        assert stats.logprob_TV is not None and stats.entropy_T is not None
        factor_t -= by["entropy_T"] * stats.entropy_T
        grad_tV = stats.logprob_TV.mul_(-by["entropy_T"][:, None]).add_(factor_t[:, None]).mul_(stats.softmax_TV)
    else:
        grad_tV = stats.softmax_TV.mul_(factor_t[:, None])
    if "mean_logprob_T" in by:
        grad_tV.add_((by["mean_logprob_T"] / head.vocabulary)[:, None])
    if grad_tV.shape[1]:
        grad_tV.scatter_add_(1, stats.position_T[:, None], (by[LOGPROB] * stats.own_T)[:, None])
    return grad_tV


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        product: HeadProduct,
        labels_T: Tensor,
        head: Head,
        each: bool,
        columns: dict[str, Tensor],
        *tensors: Tensor,
    ):
        hidden_TD, needs = product.hidden_TD, product.needs
        exact = torch.float64 if hidden_TD.dtype == torch.float64 else torch.float32
        objective = torch.zeros((), dtype=exact, device=hidden_TD.device)
        cross_entropy = torch.zeros_like(objective)
        each_T = hidden_TD.new_empty(labels_T.shape, dtype=exact) if each else None
        term = head.term
        # Fused where each rank has all logits of a token, and nothing else is read from them.
        fused = head.compiled and term is None and head.tensor is None and head.cap is None and head.kept_TK is None
        grads = product.gradients(exact, 1.0 if fused else head.temperature)
        assert term is None or isinstance(term, Term)
        metrics_M = torch.zeros(0 if term is None else len(term.metrics), dtype=exact, device=hidden_TD.device)
        reads = () if term is None else term.reads
        for first in range(0, labels_T.numel(), head.chunk):
            part = slice(first, first + head.chunk)
            labels_t = labels_T[part]
            if fused:
                of_piece = compiled_piece(head.z_weight, head.temperature, exact, slopes=any(needs))
                loss_t, loss, grad_tV = of_piece(product.logits(part), labels_t)
                if each_T is not None:
                    each_T[part] = loss_t
                cross_entropy += loss_t.sum()
                objective += loss
                if grad_tV is not None:
                    grad_tV = grads.add(part, grad_tV)
                continue
            valid_t = (labels_t != IGNORE).to(exact)
            logits_tV = product.logits(part).to(exact)
            slope_tV = cap_logits(logits_tV, head, slope=any(needs))
            cool_logits(logits_tV, head, part)
            stats = statistics_of(logits_tV, labels_t, head, reads)
            if head.compared is not None:
                head.compared.compare(stats.softmax_TV, head.first, head.group, part)
            loss_t = (stats.lse_T - stats.label_T) * valid_t
            loss = loss_t.sum()
            if each_T is not None:
                each_T[part] = loss_t
            cross_entropy += loss
            minimised = None
            if term is not None:
                term_columns = {name: columns[name][part] for name in term.columns}
                minimised = _minimised(term, stats, labels_t != IGNORE, term_columns)
                loss = minimised.loss_T.sum()
                metrics_M += minimised.metrics_MT.sum(1)
            objective += loss + head.z_weight * (stats.lse_T.square() * valid_t).sum()
            if any(needs):
                if minimised is None:
                    grad_tV = _gradient(stats, valid_t, head)
                else:
                    grad_tV = gradient_of(minimised.by, stats, valid_t, head)
                if slope_tV is not None:
                    grad_tV.mul_(slope_tV)
                    slope_tV = None
                grad_tV = grads.add(part, grad_tV)
        # Kept on ctx, not saved for backward: it is scaled there in place, once.
        ctx.grads = grads.found()
        ctx.twice, ctx.scaled = head.twice, False
        ctx.mark_non_differentiable(*(each for each in (cross_entropy, each_T, metrics_M) if each is not None))
        return objective, cross_entropy, each_T, metrics_M

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        return None, None, None, None, None, *scaled(ctx, grad_outputs[0])


def scaled(ctx: Any, by: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients that a forward left on `ctx`, times the loss's gradient: scaled in place once, as a backward
    may run twice."""
    grads = ctx.grads
    if not ctx.scaled:
        for grad in grads:
            if grad is not None:
                grad.mul_(by)
        ctx.scaled = True
    if not ctx.twice:
        del ctx.grads
    return grads


def with_zero_gradient(out: Tensor, given: Tensor) -> Tensor:
    """Return a copy of `out` whose backward gives `given` a zero gradient, whatever `out` was computed from."""
    return _WithZeroGradient.apply(out, given)  # pyright: ignore[reportReturnType]


class _WithZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, given: Tensor) -> Tensor:
        ctx.shape, ctx.dtype, ctx.device = given.shape, given.dtype, given.device
        return out.clone()  # schedules accept no view

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        return grad_outputs[0], torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device)
