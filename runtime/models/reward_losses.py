"""Losses of rewards: numbers that a head gives sequences, each from the hidden state of its last token.

Shapes: B rows, S positions of them that this rank has between blocks, D dim, N segments of the rows of a microbatch, U
units, K sides of a unit: 1 of a sequence, 2 of a pair, the chosen one first.
"""

from collections.abc import Callable, Mapping

import torch
from attrs import frozen
from torch import Tensor, nn

from xtrain.runtime.data.collate.units import Units
from xtrain.runtime.models.batch import RowLosses
from xtrain.runtime.models.loss import Objective
from xtrain.runtime.parallel.axes import Axes
from xtrain.runtime.parallel.collectives import total


@frozen(kw_only=True, eq=False)
class UnitRewards:
    """What a loss of rewards is computed from: those of the sides of each unit, with gradients, and values, name → [U],
    of the data."""

    reward_KU: Tensor
    values: Mapping[str, Tensor]


@frozen
class RewardTerm(Objective):
    """What is minimised of each sequence or pair.

    function: is given `UnitRewards`, and returns the loss of each unit [U], and beside it a dict of the `metrics`, each
    [U].
    """

    function: Callable[[UnitRewards], tuple[Tensor, dict[str, Tensor]]]
    metrics: tuple[str, ...] = ()


def rewards(x_BSD: Tensor, norm: nn.Module, weight_1D: Tensor, units: Units, positions: int, axes: Axes) -> Tensor:
    """The reward of each segment, fp64 [N], on every rank that has positions of its row; 0 of padding.

    x_BSD: the residual stream behind the last block. positions: those of a row that the tensor-parallel ranks have
    together, of which each has S. The product is taken in at least fp32.
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
    """Σ of the term over the units of these rows, with gradients; the same and the sums of its metrics as this rank
    records them [1 + metrics]; and the summands [U]. The sums are in the format `exact`.

    Every rank that has positions of a row has all of its units' losses; the first of these ranks records them.
    """
    loss_U, metrics = term.function(UnitRewards(reward_KU=reward_N[units.members_KU], values=units.values))
    objective = loss_U.sum()
    recorded = torch.stack([objective.detach(), *(metrics[name].detach().sum() for name in term.metrics)])
    records = all(group is None or group.rank() == 0 for group in (axes.ring, axes.ulysses))
    return objective.to(exact), (recorded * records).to(exact), loss_U.detach()


def row_losses(loss_U: Tensor, units: Units, dataset_B: Tensor, positions: int) -> RowLosses:
    """Sums over the units of each row; a rank counts those of which it has the last token of the first side.

    positions: as of `rewards`.
    """
    last_U = units.last_N[units.members_KU[0]]
    own_U = last_U >= 0
    each_2U = torch.stack((torch.where(own_U, loss_U, 0.0), own_U.to(loss_U.dtype)))
    sums_2B = each_2U.new_zeros(2, len(dataset_B)).index_add(1, torch.where(own_U, last_U // positions, 0), each_2U)
    return RowLosses(dataset_B=dataset_B, cross_entropy_B=sums_2B[0], valid_B=sums_2B[1])
