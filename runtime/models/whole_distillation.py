"""A divergence of whole distributions: of a student and a teacher whose logits are both there, a piece of tokens at a
time.

Shapes: t tokens of a piece, V vocabulary of this rank, E dim of the teacher.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from xtrain.runtime.models.distillation import Distillation, LogitsPiece, distilled
from xtrain.runtime.models.head_product import HeadFactors
from xtrain.runtime.models.loss import IGNORE, Head, LossTerms, cap_logits, gathered, own_positions
from xtrain.runtime.parallel.collectives import all_reduce


@frozen(eq=False)
class Taught:
    """What a teacher has computed of a microbatch. hidden_TE: what its head reads of each token. weight_VE: of its
    head, the piece of the vocabulary that this rank has of the student's. head: how its logits are capped."""

    hidden_TE: Tensor
    weight_VE: Tensor
    head: Head


def live_losses(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    head: Head,
    taught: Taught,
    *,
    each: bool = False,
    factors: Sequence[HeadFactors] = (),
) -> LossTerms:
    """As `distillation_losses`, of the distributions over all of the vocabulary. Logits of both models are alive for as
    many tokens as their size together allows."""

    def piece(part: slice, logits_tV: Tensor, labels_t: Tensor, needs: bool) -> LogitsPiece:
        teacher_tV = F.linear(taught.hidden_TE[part], taught.weight_VE).to(logits_tV.dtype)
        cap_logits(teacher_tV, taught.head, slope=False)
        return compared(logits_tV, teacher_tV, labels_t, head, needs)

    return distilled(hidden_TD, weight_VD, labels_T, head, piece, head.at_once(2), each=each, factors=factors)


def compared(logits_tV: Tensor, teacher_tV: Tensor, labels_t: Tensor, head: Head, needs: bool) -> LogitsPiece:
    """What is minimised of each token, and its gradient. Both logits are overwritten."""
    slope_tV, width = cap_logits(logits_tV, head, slope=needs), logits_tV.shape[1]
    tensor = head.tensor
    if tensor is None or tensor.loss:
        found = _compared(logits_tV, teacher_tV, labels_t, head, needs, head.first)
    else:
        whole_tV, teacher_tV = gathered(logits_tV, head), gathered(teacher_tV, head)
        del logits_tV
        found = _compared(whole_tV, teacher_tV, labels_t, head, needs, 0)
        if found.grad_TV is not None:
            found = found._replace(grad_TV=found.grad_TV[:, head.first : head.first + width])
    if slope_tV is not None and found.grad_TV is not None:
        found.grad_TV.mul_(slope_tV)
    return found


def _compared(
    logits_tV: Tensor, teacher_tV: Tensor, labels_t: Tensor, head: Head, needs: bool, first: int
) -> LogitsPiece:
    """first: id of the first token of `logits_tV`."""
    term = head.term
    assert isinstance(term, Distillation)
    mix, temperature = term.mix, term.temperature
    valid_t = (labels_t != IGNORE).to(logits_tV.dtype)
    at_t, own_t = own_positions(labels_t, first, logits_tV.shape[1])
    scratch_tV = torch.empty_like(logits_tV)
    sums = _sums(logits_tV, teacher_tV, scratch_tV, at_t, own_t, head, temperature)
    lse_t = sums.sum_t.log() + sums.top_t
    nll_t = (lse_t - sums.label_t) * valid_t
    # Of logits / temperature, from here on.
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
    """Of each token [t], over the whole vocabulary: the largest logit of both models; of the student the sum of
    exponentials of logits less that, the logit of the label, and the sum of those of logits / temperature; the latter
    of the teacher; whether both hold the same token most probable."""

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
    """scratch_tV: is overwritten. at_t, own_t: where labels stand, and whether they do."""
    width, lowest = logits_tV.shape[1], torch.finfo(logits_tV.dtype).min
    tops = [each.amax(-1) if width else each.new_full(at_t.shape, lowest) for each in (logits_tV, teacher_tV)]
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


def _over_ranks(found: Tensor, head: Head, operation: str = "sum") -> Tensor:
    """Of ranks that each have a piece of the vocabulary."""
    tensor = head.tensor
    return all_reduce(found, tensor.group, operation) if tensor is not None and tensor.loss else found


# Each takes log-probabilities [t, V] of teacher and student, which it overwrites as it does `scratch_tV`, and gives the
# divergence of each token [t], and by · its gradient by logits / temperature, with plain · the student's probabilities.
# With s the student's probabilities and h the derivatives of the divergence by their logarithms, the
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
