"""`setup.loss` of bradley_terry."""

import torch.nn.functional as F
from torch import Tensor

from xtrain.components.losses.bradley_terry import BradleyTerry
from xtrain.components.losses.preference_torch import rewards_of
from xtrain.runtime.base.ops import op
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.unit_losses import RewardTerm, UnitRewards


@op("setup.loss.bradley_terry")
def compare(model: ModelParts, margin: bool, centre: float) -> None:
    """Set a loss of the rewards of pairs."""
    model.minimise(ranked(margin, centre))


def ranked(margin: bool = False, centre: float = 0.0) -> RewardTerm:
    """Return the Bradley-Terry loss. Arguments are settings of `BradleyTerry`."""

    def loss(pairs: UnitRewards) -> tuple[Tensor, dict[str, Tensor]]:
        chosen_U, rejected_U = pairs.reward_KU
        difference_U = chosen_U - rejected_U
        if margin:
            difference_U = difference_U - pairs.values["margin"]
        loss_U = -F.logsigmoid(difference_U)
        if centre:
            loss_U = loss_U + centre * (chosen_U + rejected_U).square()
        return loss_U, rewards_of(pairs.reward_KU)

    return RewardTerm(loss, metrics=tuple(BradleyTerry.metrics))
