"""Distillation: divergences of a student from a teacher's stored tokens, or from the logits of a live teacher."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from xtrain.dsl.schema.losses import OLD, TEACHER_IDS, TEACHER_LOGPROBS
from xtrain.dsl.user_parts.kinds import LOGPROB
from xtrain.runtime.base.collectives import all_reduce
from xtrain.runtime.nn.head_product import HeadFactors, HeadProduct, own_positions, product_of
from xtrain.runtime.nn.loss import (
    IGNORE,
    Head,
    LossTerms,
    Objective,
    cap_logits,
    cool_logits,
    gathered,
    gradient_of,
    scaled,
    statistics_of,
)

METRICS: Final = 2


@frozen(kw_only=True)
class Distillation(Objective):
    """Objective per token: (1 − mix) · temperature² · divergence + mix · cross-entropy.

    form, beta: see `divergence`. Both distributions use logits / temperature, with the factor of Hinton et al. (arXiv
    1503.02531), which keeps the size of gradients at every temperature. columns: stored columns of the teacher; of a
    live one, which computes next to the student, what the form reads.
    """

    form: str
    beta: float
    temperature: float
    mix: float
    metrics: tuple[str, ...]
    columns: tuple[str, ...] = (TEACHER_IDS, TEACHER_LOGPROBS)
    live: bool = False


class Divergence(NamedTuple):
    """Divergence of each token [t], and its derivatives by the student's log-probabilities [t, N]."""

    value_T: Tensor
    slope_TN: Tensor


def divergence(form: str, beta: float, teacher_TN: Tensor, student_TN: Tensor) -> Divergence:
    """Return the divergence of a student's distribution S from a teacher's P, given as log-probabilities.

    forward_kl: Σ P (log P − log S); reverse_kl: Σ S (log S − log P); jsd: β KL(P‖M) + (1 − β) KL(S‖M) with M = β P + (1
    − β) S (Agarwal et al. 2024, arXiv 2306.13649, as in TRL). Derivatives treat log-probabilities as independent.
    """
    if form == "forward_kl":
        teacher_P = teacher_TN.exp()
        return Divergence((teacher_P * (teacher_TN - student_TN)).sum(-1), -teacher_P)
    student_S = student_TN.exp()
    if form == "reverse_kl":
        apart_TN = student_TN - teacher_TN
        return Divergence((student_S * apart_TN).sum(-1), student_S * (apart_TN + 1))
    assert form == "jsd"
    own = teacher_TN.new_tensor(beta)
    mixed_TN = torch.logaddexp(teacher_TN + own.log(), student_TN + (-own).log1p())
    slope_TN = (1 - beta) * student_S * (student_TN - mixed_TN)
    value_T = beta * (teacher_TN.exp() * (teacher_TN - mixed_TN)).sum(-1) + slope_TN.sum(-1)
    return Divergence(value_T, slope_TN)


def distillation_losses(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    head: Head,
    columns: dict[str, Tensor],
    *,
    each: bool = False,
    factors: Sequence[HeadFactors] = (),
) -> LossTerms:
    """Return the sum of `head.term`'s objective, with z-loss, over tokens whose label is not −100.

    columns: int [T, K] ids of the teacher's most probable tokens, in descending order; [T, K1] their log-probabilities
    and that of all other tokens together. The student's other tokens are combined too: the divergence of distributions
    over K1 outcomes, which is never above the divergence over the vocabulary.
    """
    ids_TK, teacher_TK1 = (columns[name] for name in (TEACHER_IDS, TEACHER_LOGPROBS))

    def piece(part: slice, logits_tV: Tensor, labels_t: Tensor, needs: bool) -> LogitsPiece:
        return _piece(logits_tV, labels_t, head, ids_TK[part].long(), teacher_TK1[part].to(logits_tV.dtype), needs)

    return distilled(hidden_TD, weight_VD, labels_T, head, piece, head.chunk, each=each, factors=factors)


class LogitsPiece(NamedTuple):
    """Results of a piece of tokens. loss: sum of the objective. nll_T: cross-entropies, 0 without label. metrics_M:
    sums of the metrics. grad_TV: of the loss by logits."""

    loss: Tensor
    nll_T: Tensor
    metrics_M: Tensor
    grad_TV: Tensor | None


# Computes a piece of the tokens from its slice, logits [t, V], which may be overwritten, labels, and whether gradients
# are needed.
OfPiece = Callable[[slice, Tensor, Tensor, bool], LogitsPiece]


def distilled(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    head: Head,
    piece: OfPiece,
    tokens: int,
    *,
    each: bool,
    factors: Sequence[HeadFactors],
) -> LossTerms:
    """Return the sum over pieces of `tokens` tokens."""
    product = product_of(hidden_TD, weight_VD, factors)
    results = _Distilled.apply(product, labels_T, head, each, piece, tokens, *product.tensors)
    objective, cross_entropy, each_T, metrics_M = results  # pyright: ignore[reportGeneralTypeIssues]
    return LossTerms(objective, cross_entropy, each_T, torch.cat((objective.detach()[None], metrics_M)))


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        product: HeadProduct,
        labels_T: Tensor,
        head: Head,
        each: bool,
        piece: OfPiece,
        tokens: int,
        *tensors: Tensor,
    ):
        hidden_TD = product.hidden_TD
        exact = torch.float64 if hidden_TD.dtype == torch.float64 else torch.float32
        objective, cross_entropy = torch.zeros((2,), dtype=exact, device=hidden_TD.device)
        metrics_M = torch.zeros(METRICS, dtype=exact, device=hidden_TD.device)
        each_T = hidden_TD.new_empty(labels_T.shape, dtype=exact) if each else None
        grads = product.gradients(exact, head.temperature)
        for first in range(0, labels_T.numel(), tokens):
            part = slice(first, first + tokens)
            logits_tV = product.logits(part).to(exact)
            results = piece(part, logits_tV, labels_T[part], any(product.needs))
            del logits_tV
            objective += results.loss
            cross_entropy += results.nll_T.sum()
            metrics_M += results.metrics_M
            if each_T is not None:
                each_T[part] = results.nll_T
            if results.grad_TV is not None:
                grads.add(part, results.grad_TV)
            del results  # no tensor of a piece stays for the next one
        ctx.grads = grads.found()
        ctx.twice, ctx.scaled = head.twice, False
        ctx.mark_non_differentiable(*(each for each in (cross_entropy, each_T, metrics_M) if each is not None))
        return objective, cross_entropy, each_T, metrics_M

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        return None, None, None, None, None, None, *scaled(ctx, grad_outputs[0])


def _piece(
    logits_tV: Tensor, labels_t: Tensor, head: Head, ids_tK: Tensor, teacher_tK1: Tensor, needs: bool
) -> LogitsPiece:
    """Return the results of a piece against stored tokens; overwrites `logits_tV`."""
    term = head.term
    assert isinstance(term, Distillation)
    mix, temperature = term.mix, term.temperature
    valid_t = (labels_t != IGNORE).to(logits_tV.dtype)
    slope_tV = cap_logits(logits_tV, head, slope=needs)
    sums = _student_sums(logits_tV, labels_t, ids_tK, head, temperature)
    lse_t = sums.sum_T.log() + sums.top_T
    nll_t = (lse_t - sums.label_T) * valid_t
    # The rest is for logits / temperature.
    log_sum_t = sums.tempered_T.log()
    kept_tK = (sums.stored_TK - sums.top_T[:, None]) / temperature
    tiny = torch.finfo(log_sum_t.dtype).tiny
    student_tK1 = torch.cat((kept_tK, sums.rest_T.clamp(min=tiny).log()[:, None]), 1) - log_sum_t[:, None]
    value_t, slope_tK1 = divergence(term.form, term.beta, teacher_tK1, student_tK1)
    agrees_t = sums.stored_TK[:, 0] >= sums.top_T
    metrics_M = torch.stack(((value_t * valid_t).sum(), (agrees_t * valid_t).sum()))
    share_t = valid_t * ((1 - mix) * temperature**2)
    loss = (share_t * value_t).sum() + mix * nll_t.sum() + head.z_weight * (lse_t.square() * valid_t).sum()
    if not needs:
        return LogitsPiece(loss, nll_t, metrics_M, None)
    # With s the student's probabilities and h the derivatives by their logarithms, which add up to H: the logit of a
    # stored token has the derivative h − s H, any other one its share of the rest's, s (h_rest / s_rest − H).
    plain_t, by_t = valid_t * (mix + 2 * head.z_weight * lse_t), share_t / temperature
    slope_sum_t, student_tK1 = slope_tK1.sum(-1), student_tK1.exp()
    rest_t = slope_tK1[:, -1] / student_tK1[:, -1].clamp(min=tiny)
    stored_tK = by_t[:, None] * (slope_tK1[:, :-1] - student_tK1[:, :-1] * slope_sum_t[:, None])
    others_t = by_t * (rest_t - slope_sum_t)
    plain_tV = None
    if temperature == 1:
        others_t = others_t + plain_t
        stored_tK = stored_tK + plain_t[:, None] * student_tK1[:, :-1]
    elif mix or head.z_weight:
        plain_tV = (logits_tV - lse_t[:, None]).exp_().mul_(plain_t[:, None])
    grad_tV = logits_tV.sub_(sums.top_T[:, None]).div_(temperature).sub_(log_sum_t[:, None]).exp_()
    if grad_tV.shape[1]:
        at_tK, own_tK = own_positions(ids_tK, head.first, grad_tV.shape[1])
        _set_zero(grad_tV, at_tK, own_tK)
        grad_tV.mul_(others_t[:, None])
        grad_tV.scatter_add_(1, at_tK, stored_tK * own_tK)
        if plain_tV is not None:
            grad_tV.add_(plain_tV)
        at_t, own_t = own_positions(labels_t, head.first, grad_tV.shape[1])
        grad_tV.scatter_add_(1, at_t[:, None], -(mix * valid_t * own_t)[:, None])
    if slope_tV is not None:
        grad_tV.mul_(slope_tV)
    return LogitsPiece(loss, nll_t, metrics_M, grad_tV)


class _StudentSums(NamedTuple):
    """Sums of each token of a piece: its largest logit; Σ exp(logit − top); the logit of the label; the same sum for
    logits / temperature over the vocabulary, and over tokens that are not stored; the logits of stored tokens."""

    top_T: Tensor
    sum_T: Tensor
    label_T: Tensor
    tempered_T: Tensor
    rest_T: Tensor
    stored_TK: Tensor


def _set_zero(numbers_tV: Tensor, at_tK: Tensor, own_tK: Tensor) -> None:
    """Set nonnegative numbers to zero at this rank's tokens.

    The minimum is independent of the order, so torch supports it in deterministic mode.
    """
    least_tK = numbers_tV.new_zeros(at_tK.shape).masked_fill_(~own_tK, torch.inf)
    numbers_tV.scatter_reduce_(1, at_tK, least_tK, "amin")


def _student_sums(logits_tV: Tensor, labels_t: Tensor, ids_tK: Tensor, head: Head, temperature: float) -> _StudentSums:
    """Return the sums over the whole vocabulary."""
    tensor, first, group = head.tensor, head.first, None
    if tensor is not None and tensor.loss:
        group = tensor.group
    elif tensor is not None:
        logits_tV, first = gathered(logits_tV, head), 0
    width = logits_tV.shape[1]
    lowest = torch.finfo(logits_tV.dtype).min
    top_t = logits_tV.amax(-1) if width else logits_tV.new_full(labels_t.shape, lowest)
    top_t = top_t if group is None else all_reduce(top_t, group, "max")
    raised_tV = (logits_tV - top_t[:, None]).exp_()
    sum_t = raised_tV.sum(-1)
    if temperature != 1:
        torch.sub(logits_tV, top_t[:, None], out=raised_tV).div_(temperature).exp_()
    tempered_t = raised_tV.sum(-1)
    if width:
        at_t, own_t = own_positions(labels_t, first, width)
        at_tK, own_tK = own_positions(ids_tK, first, width)
        label_t = logits_tV.gather(1, at_t[:, None])[:, 0] * own_t
        stored_tK = logits_tV.gather(1, at_tK) * own_tK
        # Removed before the sum: a difference of sums would only be rounding.
        _set_zero(raised_tV, at_tK, own_tK)
    else:
        label_t, stored_tK = torch.zeros_like(sum_t), logits_tV.new_zeros(ids_tK.shape)
    sums = torch.cat((torch.stack((sum_t, label_t, tempered_t, raised_tV.sum(-1))), stored_tK.t()))
    del raised_tV
    sums = sums if group is None else all_reduce(sums, group)
    sum_t, label_t, tempered_t, rest_t = sums[:4]
    return _StudentSums(top_t, sum_t, label_t, tempered_t, rest_t, sums[4:].t())


@frozen(eq=False)
class Taught:
    """A teacher's results for a microbatch. hidden_TE: input of its head for each token. weight_VE: weight of its head,
    for this rank's piece of the student's vocabulary. head: with the cap of its logits."""

    hidden_TE: Tensor
    weight_VE: Tensor
    head: Head


def live_losses(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    head: Head,
    taught: Taught,
    columns: Mapping[str, Tensor] = MappingProxyType({}),
    *,
    each: bool = False,
    factors: Sequence[HeadFactors] = (),
) -> LossTerms:
    """Return the losses as `distillation_losses`, of the distributions over the whole vocabulary, or with the column
    OLD by `policy_gradient`.

    The logits of both models exist for as many tokens as their size together permits.
    """

    def piece(part: slice, logits_tV: Tensor, labels_t: Tensor, needs: bool) -> LogitsPiece:
        teacher_tV = F.linear(taught.hidden_TE[part], taught.weight_VE).to(logits_tV.dtype)
        cap_logits(teacher_tV, taught.head, slope=False)
        if OLD in columns:
            return policy_gradient(logits_tV, teacher_tV, labels_t, head, columns[OLD], part, needs)
        return compared(logits_tV, teacher_tV, labels_t, head, needs)

    return distilled(hidden_TD, weight_VD, labels_T, head, piece, head.at_once(2), each=each, factors=factors)


def policy_gradient(
    logits_tV: Tensor,
    teacher_tV: Tensor,
    labels_t: Tensor,
    head: Head,
    sampled_T: Tensor,
    part: slice,
    needs: bool,
) -> LogitsPiece:
    """Return −ρ A of each token of a piece: A the log-probability of the teacher minus the sampler's, without gradient,
    and ρ the probability of the student divided by the sampler's. Overwrites both logits.

    The advantage is the negative reverse KL of a sampled token (thinkingmachines.ai/blog/on-policy-distillation, loss
    `importance_sampling` of the Tinker cookbook, discount 0).
    """
    slope_tV = cap_logits(logits_tV, head, slope=needs)
    for each_tV in (logits_tV, teacher_tV):
        cool_logits(each_tV, head, part)
    known_t, valid_t = labels_t != IGNORE, (labels_t != IGNORE).to(logits_tV.dtype)
    taught_t = statistics_of(teacher_tV, labels_t, head, ()).logprobs(known_t)
    stats = statistics_of(logits_tV, labels_t, head, ())
    if head.compared is not None:
        head.compared.compare(stats.softmax_TV, head.first, head.group, part)
    sampled_t = torch.where(known_t, sampled_T[part].to(taught_t.dtype), 0.0)
    advantage_t = (taught_t - sampled_t) * valid_t
    ratio_t = (stats.logprobs(known_t) - sampled_t).exp() * valid_t
    loss_t, nll_t = -ratio_t * advantage_t, (stats.lse_T - stats.label_T) * valid_t
    loss = loss_t.sum() + head.z_weight * (stats.lse_T.square() * valid_t).sum()
    metrics_M = torch.stack((-advantage_t.sum(), ratio_t.sum()))
    if not needs:
        return LogitsPiece(loss, nll_t, metrics_M, None)
    grad_tV = gradient_of({LOGPROB: loss_t}, stats, valid_t, head)  # the derivative of e^x is e^x
    return LogitsPiece(loss, nll_t, metrics_M, grad_tV if slope_tV is None else grad_tV.mul_(slope_tV))


def compared(logits_tV: Tensor, teacher_tV: Tensor, labels_t: Tensor, head: Head, needs: bool) -> LogitsPiece:
    """Return the objective of each token and its gradient; overwrites both logits."""
    slope_tV, width = cap_logits(logits_tV, head, slope=needs), logits_tV.shape[1]
    tensor = head.tensor
    if tensor is None or tensor.loss:
        results = _compared(logits_tV, teacher_tV, labels_t, head, needs, head.first)
    else:
        whole_tV, teacher_tV = gathered(logits_tV, head), gathered(teacher_tV, head)
        del logits_tV
        results = _compared(whole_tV, teacher_tV, labels_t, head, needs, 0)
        if results.grad_TV is not None:
            results = results._replace(grad_TV=results.grad_TV[:, head.first : head.first + width])
    if slope_tV is not None and results.grad_TV is not None:
        results.grad_TV.mul_(slope_tV)
    return results


def _compared(
    logits_tV: Tensor, teacher_tV: Tensor, labels_t: Tensor, head: Head, needs: bool, first: int
) -> LogitsPiece:
    """Compare whole rows of logits. first: id of the first token of `logits_tV`."""
    term = head.term
    assert isinstance(term, Distillation)
    mix, temperature = term.mix, term.temperature
    valid_t = (labels_t != IGNORE).to(logits_tV.dtype)
    at_t, own_t = own_positions(labels_t, first, logits_tV.shape[1])
    scratch_tV = torch.empty_like(logits_tV)
    sums = _sums(logits_tV, teacher_tV, scratch_tV, at_t, own_t, head, temperature)
    lse_t = sums.sum_t.log() + sums.top_t
    nll_t = (lse_t - sums.label_t) * valid_t
    # The rest is for logits / temperature.
    log_sum_t = sums.tempered_t.log()
    student_tV = logits_tV.sub_(sums.top_t[:, None]).div_(temperature).sub_(log_sum_t[:, None])
    teacher_tV.sub_(sums.teacher_top_t[:, None]).div_(temperature).sub_(sums.taught_t.log()[:, None])
    share_t, plain_t = valid_t * ((1 - mix) * temperature**2), valid_t * (mix + 2 * head.z_weight * lse_t)
    plain_tV = None
    if needs and temperature != 1 and (mix or head.z_weight):
        back_t = temperature * log_sum_t + sums.top_t - lse_t
        plain_tV = (student_tV * temperature).add_(back_t[:, None]).exp_().mul_(plain_t[:, None])
    tempered_t = plain_t if temperature == 1 else torch.zeros_like(plain_t)
    value_t, grad_tV = _DIVERGENCES[term.form](
        term.beta, teacher_tV, student_tV, scratch_tV, head, (share_t / temperature)[:, None], tempered_t[:, None]
    )
    metrics_M = torch.stack(((value_t * valid_t).sum(), (sums.agrees_t.clamp(max=1) * valid_t).sum()))
    loss = (share_t * value_t).sum() + mix * nll_t.sum() + head.z_weight * (lse_t.square() * valid_t).sum()
    if not needs:
        return LogitsPiece(loss, nll_t, metrics_M, None)
    if plain_tV is not None:
        grad_tV.add_(plain_tV)
    if grad_tV.shape[1]:
        grad_tV.scatter_add_(1, at_t[:, None], -(mix * valid_t * own_t)[:, None])
    return LogitsPiece(loss, nll_t, metrics_M, grad_tV)


class _Sums(NamedTuple):
    """Sums of each token [t] over the whole vocabulary.

    The largest logit of both models; of the student the sum of exponentials of logits minus it, the logit of the label,
    and the sum for logits / temperature; the latter of the teacher; 1 if both models have the same most probable token.
    """

    top_t: Tensor
    teacher_top_t: Tensor
    sum_t: Tensor
    label_t: Tensor
    tempered_t: Tensor
    taught_t: Tensor
    agrees_t: Tensor


def _sums(
    logits_tV: Tensor,
    teacher_tV: Tensor,
    scratch_tV: Tensor,
    at_t: Tensor,
    own_t: Tensor,
    head: Head,
    temperature: float,
) -> _Sums:
    """Compute the sums; overwrites `scratch_tV`. at_t, own_t: positions of labels, and whether this rank has them."""
    width, lowest = logits_tV.shape[1], torch.finfo(logits_tV.dtype).min
    tops = [logits.amax(-1) if width else logits.new_full(at_t.shape, lowest) for logits in (logits_tV, teacher_tV)]
    top_t, teacher_top_t = _over_ranks(torch.stack(tops), head, "max")
    sums = [torch.sub(logits_tV, top_t[:, None], out=scratch_tV).exp_().sum(-1)]
    sums += [logits_tV.gather(1, at_t[:, None])[:, 0] * own_t if width else torch.zeros_like(top_t)]
    for each_tV, its_top_t in ((logits_tV, top_t), (teacher_tV, teacher_top_t)):
        sums += [torch.sub(each_tV, its_top_t[:, None], out=scratch_tV).div_(temperature).exp_().sum(-1)]
    if width:
        likeliest_t = teacher_tV.argmax(-1, keepdim=True)
        here_t = teacher_tV.gather(1, likeliest_t)[:, 0] >= teacher_top_t
        sums += [(here_t & (logits_tV.gather(1, likeliest_t)[:, 0] >= top_t)).to(logits_tV.dtype)]
    else:
        sums += [torch.zeros_like(top_t)]
    return _Sums(top_t, teacher_top_t, *_over_ranks(torch.stack(sums), head))


def _over_ranks(sums: Tensor, head: Head, operation: str = "sum") -> Tensor:
    """Reduce over ranks that each have a piece of the vocabulary."""
    tensor = head.tensor
    return all_reduce(sums, tensor.group, operation) if tensor is not None and tensor.loss else sums


# Each takes log-probabilities [t, V] of teacher and student, which it overwrites like `scratch_tV`, and returns the
# divergence of each token [t], and its gradient by logits / temperature times `by`, plus the student's probabilities
# times `plain`. With s the student's probabilities and h the derivatives of the divergence by their logarithms, the
# gradient is h − s Σ h.


def _forward_kl(
    beta: float, teacher_tV: Tensor, student_tV: Tensor, scratch_tV: Tensor, head: Head, by_t1: Tensor, plain_t1: Tensor
) -> tuple[Tensor, Tensor]:
    probable_tV = torch.exp(teacher_tV, out=scratch_tV)
    (value_t,) = _over_ranks(teacher_tV.sub_(student_tV).mul_(probable_tV).sum(-1)[None], head)
    return value_t, student_tV.exp_().mul_(by_t1 + plain_t1).sub_(probable_tV.mul_(by_t1))


def _reverse_kl(
    beta: float, teacher_tV: Tensor, student_tV: Tensor, scratch_tV: Tensor, head: Head, by_t1: Tensor, plain_t1: Tensor
) -> tuple[Tensor, Tensor]:
    apart_tV, student_tV = teacher_tV.neg_().add_(student_tV), student_tV.exp_()
    weighted_tV = torch.mul(student_tV, apart_tV, out=scratch_tV)
    (value_t,) = _over_ranks(weighted_tV.sum(-1)[None], head)
    return value_t, weighted_tV.mul_(by_t1).add_(student_tV.mul_(plain_t1 - by_t1 * value_t[:, None]))


def _jsd(
    beta: float, teacher_tV: Tensor, student_tV: Tensor, scratch_tV: Tensor, head: Head, by_t1: Tensor, plain_t1: Tensor
) -> tuple[Tensor, Tensor]:
    log_beta, log_rest = math.log(beta), math.log1p(-beta)
    mixed_tV = torch.logaddexp(teacher_tV.add_(log_beta), student_tV.add_(log_rest), out=scratch_tV)
    weighted_tV = teacher_tV.exp()  # β P
    taught_t = weighted_tV.mul_(teacher_tV.sub_(mixed_tV).sub_(log_beta)).sum(-1)
    share_tV = torch.exp(student_tV, out=weighted_tV)  # (1 − β) S
    slope_tV = student_tV.sub_(mixed_tV).sub_(log_rest).mul_(share_tV)
    slope_t = slope_tV.sum(-1)
    value_t, slope_t = _over_ranks(torch.stack((taught_t + slope_t, slope_t)), head)
    factor_t1 = (plain_t1 - by_t1 * slope_t[:, None]) / (1 - beta)
    return value_t, slope_tV.mul_(by_t1).add_(share_tV.mul_(factor_t1))


_DIVERGENCES = {"forward_kl": _forward_kl, "reverse_kl": _reverse_kl, "jsd": _jsd}
