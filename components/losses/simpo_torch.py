"""`setup.loss` of simpo."""

import torch.nn.functional as F
from torch import Tensor

from ...dsl.user_parts.kinds import LOGPROB
from ...runtime.models.parts import ModelParts
from ...runtime.models.unit_losses import UnitSums, UnitTerm
from ...runtime.ops import op
from .preference_torch import rewards_of
from .simpo import Simpo


@op("setup.loss.simpo")
def prefer(model: ModelParts, beta: float, gamma: float) -> None:
    """Minimise a loss of pairs without a reference."""
    model.minimise(preference(beta, gamma))


def preference(beta: float, gamma: float) -> UnitTerm:
    """Arguments as the settings of `Simpo`."""

    def loss(pairs: UnitSums) -> tuple[Tensor, dict[str, Tensor]]:
        mean_KU = pairs.mean(LOGPROB)
        chosen_U, rejected_U = mean_KU
        return -F.logsigmoid(beta * (chosen_U - rejected_U) - gamma), rewards_of(beta * mean_KU)

    return UnitTerm(loss, metrics=tuple(Simpo.metrics))
