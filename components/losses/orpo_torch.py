"""`setup.loss` of orpo."""

import torch
import torch.nn.functional as F
from torch import Tensor

from xtrain.components.losses.orpo import Orpo
from xtrain.components.losses.preference_torch import rewards_of
from xtrain.dsl.user_parts.kinds import LOGPROB
from xtrain.runtime.base.ops import op
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.unit_losses import UnitSums, UnitTerm


@op("setup.loss.orpo")
def prefer(model: ModelParts, beta: float) -> None:
    """Set a pair loss without a reference."""
    model.minimise(preference(beta))


def preference(beta: float) -> UnitTerm:
    """Return the ORPO loss, with odds = e^a / (1 − e^a) for mean log-probabilities a of answers. beta: as the setting
    of `Orpo`."""

    def loss(pairs: UnitSums) -> tuple[Tensor, dict[str, Tensor]]:
        mean_KU = pairs.mean(LOGPROB)
        chosen_U, _ = mean_KU
        certain = -torch.finfo(mean_KU.dtype).tiny  # a probability of 1 has infinite odds
        odds_KU = mean_KU - torch.log(-torch.expm1(mean_KU.clamp(max=certain)))
        return -chosen_U - beta * F.logsigmoid(odds_KU[0] - odds_KU[1]), rewards_of(beta * mean_KU)

    return UnitTerm(loss, metrics=tuple(Orpo.metrics))
