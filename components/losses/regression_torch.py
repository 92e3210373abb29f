"""`setup.loss` of regression."""

from torch import Tensor

from xtrain.components.losses.regression import Regression
from xtrain.runtime.base.ops import op
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.unit_losses import RewardTerm, UnitRewards


@op("setup.loss.regression")
def regress(model: ModelParts) -> None:
    """Set the squared error of rewards."""
    model.minimise(squared())


def squared() -> RewardTerm:
    """Return the loss (r − `reward`)² of each sequence."""

    def loss(sequences: UnitRewards) -> tuple[Tensor, dict[str, Tensor]]:
        (reward_U,) = sequences.reward_KU
        distance_U = reward_U - sequences.values["reward"]
        return distance_U.square(), {"rewards/mean": reward_U.detach(), "rewards/error": distance_U.detach().abs()}

    return RewardTerm(loss, metrics=tuple(Regression.metrics))
