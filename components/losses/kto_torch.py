"""`setup.loss` of kto."""

import torch
from torch import Tensor

from ...dsl.schema.losses import REF
from ...runtime.models.parts import ModelParts
from ...runtime.models.unit_losses import UnitSums, UnitTerm
from ...runtime.ops import op
from .kto import Kto


@op("setup.loss.kto")
def judge(model: ModelParts, beta: float, desirable: float, undesirable: float, reference_point: float) -> None:
    """Minimise a loss of labelled answers against a reference."""
    model.minimise(judged(beta, desirable, undesirable, reference_point))


def judged(beta: float, desirable: float, undesirable: float, reference_point: float) -> UnitTerm:
    """Arguments as the settings of `Kto`."""

    def loss(sequences: UnitSums) -> tuple[Tensor, dict[str, Tensor]]:
        (ratio_U,) = sequences.logprob_KU - sequences.sums[REF]
        good_U = (sequences.values["label"] > 0.5).double()
        sign_U = 2 * good_U - 1
        weight_U = desirable * good_U + undesirable * (1 - good_U)
        margin_U = sign_U * beta * ratio_U.detach()
        metrics = {"rewards/margin": margin_U, "rewards/accuracy": (margin_U > 0).double()}
        return weight_U * torch.sigmoid(-sign_U * beta * (ratio_U - reference_point)), metrics

    return UnitTerm(loss, columns=(REF,), metrics=tuple(Kto.metrics))
