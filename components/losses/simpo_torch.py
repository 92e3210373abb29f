"""`setup.loss` of simpo."""

import torch.nn.functional as F
from torch import Tensor

from xtrain.components.losses.preference_torch import rewards_of
from xtrain.components.losses.simpo import Simpo
from xtrain.dsl.user_parts.kinds import LOGPROB
from xtrain.runtime.base.ops import op
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.unit_losses import UnitSums, UnitTerm


@op("setup.loss.simpo")
def prefer(model: ModelParts, beta: float, gamma: float) -> None:
    """Set a pair loss without a reference."""
    model.minimise(preference(beta, gamma))


def preference(beta: float, gamma: float) -> UnitTerm:
    """Return the SimPO loss. Arguments are settings of `Simpo`."""

    def loss(pairs: UnitSums) -> tuple[Tensor, dict[str, Tensor]]:
        mean_KU = pairs.mean(LOGPROB)
        chosen_U, rejected_U = mean_KU
        return -F.logsigmoid(beta * (chosen_U - rejected_U) - gamma), rewards_of(beta * mean_KU)

    return UnitTerm(loss, metrics=tuple(Simpo.metrics))
