"""Losses of sequences and pairs: terms of sums over their tokens, and terms of rewards.

The head keeps one number for each token, and computes logits a second time in its backward. A reward is the number that
a head gives the last hidden state of a sequence.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from xtrain.dsl.user_parts.kinds import LOGPROB
from xtrain.runtime.base.collectives import total
from xtrain.runtime.base.state import KlWeight
from xtrain.runtime.feed.microbatch import Units
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.batch import RowLosses
from xtrain.runtime.nn.head_product import HeadFactors, HeadProduct, own_positions, product_of
from xtrain.runtime.nn.loss import (
    IGNORE,
    Head,
    LossTerms,
    Objective,
    Statistics,
    cap_logits,
    cool_logits,
    gradient_of,
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
    """Return by name, in at least fp32, with gradients: the log-probability [T] of each label, and the STATISTICS in
    `reads`.

    For the label −100 a log-probability is −1, and nothing has a gradient. The gradient of `hidden_TD` is over this
    rank's piece of the vocabulary.
    """
    product = product_of(hidden_TD, weight_VD, factors)
    statistics = _TokenStatistics.apply(product, labels_T, head, reads, *product.tensors)
    return dict(zip((LOGPROB, *reads), statistics, strict=True))  # pyright: ignore[reportArgumentType]


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
            cool_logits(logits_tV, head, part)
            statistics = statistics_of(logits_tV, labels_T[part], head, reads)
            if head.compared is not None:
                head.compared.compare(statistics.softmax_TV, head.first, head.group, part)
            lse_T[part] = statistics.lse_T
            found_T[0][part] = statistics.logprobs(labels_T[part] != IGNORE)
            for name, value_T in zip(reads, found_T[1:], strict=True):
                value_T[part] = statistics.read(name)
            del logits_tV, statistics  # no tensor of a piece stays for the next one
        entropy_T = found_T[1 + reads.index("entropy_T")] if "entropy_T" in reads else None
        if any(product.needs):
            ctx.save_for_backward(labels_T, lse_T, entropy_T, *tensors)
            ctx.product = product.with_tensors(tuple(tensor.new_empty(0) for tensor in tensors))
        ctx.head, ctx.reads, ctx.grads = head, reads, None
        return tuple(found_T)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        grads = ctx.grads
        if grads is None:
            grads = _gradients(ctx, dict(zip((LOGPROB, *ctx.reads), grad_outputs, strict=True)))
        # A pipeline that computes gradients of inputs and weights separately calls it for both.
        ctx.grads = grads if ctx.head.twice and ctx.grads is None else None
        return None, None, None, None, *grads


def _gradients(ctx: Any, by: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients of the logits' inputs, from the gradients of the statistics [T].

    The ranks of a vocabulary need not communicate: with the log-sum-exp each knows the softmax of its piece.
    """
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
        cool_logits(logits_tV, head, part)
        position_t, own_t = own_positions(labels_t, head.first, logits_tV.shape[1])
        logprob_tV = logits_tV.sub_(lse_t[:, None])
        softmax_tV = logprob_tV.exp_() if entropy_T is None else logprob_tV.exp()
        statistics = Statistics(
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
        grad_tV = gradient_of({name: grad[part] * valid_t for name, grad in by.items()}, statistics, valid_t, head)
        if slope_tV is not None:
            grad_tV.mul_(slope_tV)
            slope_tV = None
        grads.add(part, grad_tV)
        del statistics, grad_tV, slope_tV
    return grads.found()


@frozen(kw_only=True, eq=False)
class UnitSums:
    """Inputs of a loss of units, with gradients.

    sums: name → [K, U], of the log-probabilities of labels, and of the statistics that the term reads. tokens_KU:
    number of labels. values: name → [U].
    """

    sums: Mapping[str, Tensor]
    tokens_KU: Tensor
    values: Mapping[str, Tensor]

    @property
    def logprob_KU(self) -> Tensor:
        return self.sums[LOGPROB]

    def mean(self, name: str) -> Tensor:
        """Return the mean over the labels of each side, [K, U]."""
        return self.sums[name] / self.tokens_KU


@frozen
class UnitTerm(Objective):
    """Objective per sequence or pair.

    function: takes `UnitSums`, and returns the loss of each unit [U], and if there are `metrics`, a dict of these, each
    [U]. reads, columns: STATISTICS and columns of the data that are summed in addition to the log-probabilities of
    labels. each: takes all of these [T] by name, and returns more of them, by name: numbers of tokens that are not
    linear in the sums. failures: context for errors of the function and its backward. kl_weight: weight that the
    function reads.
    """

    function: Callable[[UnitSums], Any]
    reads: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    each: Callable[..., dict[str, Tensor]] | None = None
    failures: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)
    kl_weight: KlWeight | None = None


def unit_losses(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    head: Head,
    columns: Mapping[str, Tensor],
    units: Units,
    axes: Axes,
    *,
    each: bool = False,
    factors: Sequence[HeadFactors] = (),
) -> LossTerms:
    """Return Σ of the term of `head` over the units of these rows.

    Every rank with positions of a row has all of its units' losses, each with the gradients of its own tokens; the
    first of these ranks records them.
    """
    term = head.term
    assert isinstance(term, UnitTerm) and not head.z_weight
    valid_T = labels_T != IGNORE
    statistics = token_statistics(hidden_TD, weight_VD, labels_T, head, term.reads, factors)
    nll_T = torch.where(valid_T, -statistics[LOGPROB].detach(), 0.0)
    tokens = statistics | {name: torch.where(valid_T, columns[name], 0.0) for name in term.columns}
    with term.failures():
        tokens |= {} if term.each is None else term.each(**tokens)
    summands = torch.stack([torch.where(valid_T, value_T.double(), 0.0) for value_T in tokens.values()])
    sums = summands.new_zeros(len(tokens), len(units.tokens_N))
    sums = sums.index_add(1, units.segment_BS.flatten(), summands)
    for group in (axes.ring, axes.ulysses):
        sums = sums if group is None else total(sums, group)
    given = UnitSums(
        sums=dict(zip(tokens, sums[:, units.members_KU], strict=True)),
        tokens_KU=units.tokens_N[units.members_KU],
        values=units.values,
    )
    with term.failures():
        loss_U = term.function(given)
        loss_U, metrics = loss_U if term.metrics else (loss_U, {})
    objective = loss_U.sum()
    recorded = torch.stack([objective.detach(), *(metrics[name].detach().double().sum() for name in term.metrics)])
    records = all(group is None or group.rank() == 0 for group in (axes.ring, axes.ulysses))
    exact = nll_T.dtype
    return LossTerms(objective.to(exact), nll_T.sum(), nll_T if each else None, (recorded * records).to(exact))


@frozen(kw_only=True, eq=False)
class UnitRewards:
    """Inputs of a loss of rewards: rewards of the sides of each unit, with gradients, and values, name → [U], of the
    data."""

    reward_KU: Tensor
    values: Mapping[str, Tensor]


@frozen
class RewardTerm(Objective):
    """Objective per sequence or pair, from rewards.

    function: takes `UnitRewards`, and returns the loss of each unit [U], and a dict of the `metrics`, each [U].
    """

    function: Callable[[UnitRewards], tuple[Tensor, dict[str, Tensor]]]
    metrics: tuple[str, ...] = ()


def rewards(
    x_BSD: Tensor, norm: Callable[[Tensor], Tensor], weight_1D: Tensor, units: Units, positions: int, axes: Axes
) -> Tensor:
    """Return the reward of each segment, fp64 [N], on every rank with positions of its row; 0 for padding.

    x_BSD: the residual stream after the last block. positions: of a row on all tensor-parallel ranks together, of which
    each has S. The product is in at least fp32.
    """
    last_N, tensor = units.last_N, axes.tensor
    own_N = last_N >= 0
    summed = [axes.ring, axes.ulysses]
    if tensor is not None and tensor.sequence:
        width = x_BSD.shape[1]
        in_row_N = last_N % positions - tensor.group.rank() * width
        own_N = own_N & (in_row_N >= 0) & (in_row_N < width)
        last_N = last_N // positions * width + in_row_N
        summed.append(tensor.group)
    x_ND = x_BSD.flatten(0, 1).index_select(0, torch.where(own_N, last_N, 0))
    hidden_ND = norm(x_ND)
    exact = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
    reward_N = (hidden_ND.to(exact) * weight_1D.to(exact)).sum(-1).double()
    reward_N = torch.where(own_N, reward_N, 0.0)
    for group in summed:
        reward_N = reward_N if group is None else total(reward_N, group)
    return reward_N


def reward_losses(
    reward_N: Tensor, term: RewardTerm, units: Units, axes: Axes, exact: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ of the term over the units of these rows, with gradients; the sum and its metrics as this rank records
    them, [1 + metrics]; and the summands [U]. The sums have the format `exact`.

    Every rank with positions of a row has all of its units' losses; the first of these ranks records them.
    """
    loss_U, metrics = term.function(UnitRewards(reward_KU=reward_N[units.members_KU], values=units.values))
    objective = loss_U.sum()
    recorded = torch.stack([objective.detach(), *(metrics[name].detach().sum() for name in term.metrics)])
    records = all(group is None or group.rank() == 0 for group in (axes.ring, axes.ulysses))
    return objective.to(exact), (recorded * records).to(exact), loss_U.detach()


def row_losses(loss_U: Tensor, units: Units, dataset_B: Tensor, positions: int) -> RowLosses:
    """Return sums over the units of each row; a rank counts units whose first side's last token it has.

    positions: see `rewards`.
    """
    last_U = units.last_N[units.members_KU[0]]
    own_U = last_U >= 0
    each_2U = torch.stack((torch.where(own_U, loss_U, 0.0), own_U.to(loss_U.dtype)))
    sums_2B = each_2U.new_zeros(2, len(dataset_B)).index_add(1, torch.where(own_U, last_U // positions, 0), each_2U)
    return RowLosses(dataset_B=dataset_B, cross_entropy_B=sums_2B[0], valid_B=sums_2B[1])
