"""Losses of sequences and of pairs: a term of sums over the tokens of each of them.

Shapes: T tokens of a rank, N segments of the rows of a microbatch, U units, K sides of a unit: 1 of a sequence, 2 of a
pair, the chosen one first. Sums are taken in fp64, over all ranks that hold positions of the same rows.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from xtrain.dsl.user_parts.kinds import LOGPROB
from xtrain.runtime.data.collate.units import Units
from xtrain.runtime.models.head_product import HeadFactors
from xtrain.runtime.models.loss import IGNORE, Head, LossTerms, Objective
from xtrain.runtime.models.token_statistics import token_statistics
from xtrain.runtime.parallel.axes import Axes
from xtrain.runtime.parallel.collectives import total


@frozen(kw_only=True, eq=False)
class UnitSums:
    """What a loss of units is computed from, with gradients.

    sums: name → [K, U], of the log-probabilities of labels, and of what the term reads. tokens_KU: how many labels they
    are of. values: name → [U].
    """

    sums: Mapping[str, Tensor]
    tokens_KU: Tensor
    values: Mapping[str, Tensor]

    @property
    def logprob_KU(self) -> Tensor:
        return self.sums[LOGPROB]

    def mean(self, name: str) -> Tensor:
        """Over the labels of each side, [K, U]."""
        return self.sums[name] / self.tokens_KU


@frozen
class UnitTerm(Objective):
    """What is minimised of each sequence or pair.

    function: is given `UnitSums`, and returns the loss of each unit [U], and beside it, if there are `metrics`, a dict
    of these, each [U]. reads, columns: what is summed besides the log-probabilities of labels, of STATISTICS and of the
    columns of the data. each: is given all of these [T] by name, and returns more of them, by name: numbers of tokens
    that are no linear function of what is summed.
    failures: what errors of the function and of its backward pass through.
    """

    function: Callable[[UnitSums], Any]
    reads: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    each: Callable[..., dict[str, Tensor]] | None = None
    failures: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)


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
    """Σ of the term of `head` over the units of these rows.

    Every rank that holds positions of a row has all of its units' losses, each with the gradients of its own tokens;
    the first of these ranks records them.
    """
    term = head.term
    assert isinstance(term, UnitTerm) and not head.z_weight
    valid_T = labels_T != IGNORE
    found = token_statistics(hidden_TD, weight_VD, labels_T, head, term.reads, factors)
    nll_T = torch.where(valid_T, -found[LOGPROB].detach(), 0.0)
    tokens = found | {name: torch.where(valid_T, columns[name], 0.0) for name in term.columns}
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
