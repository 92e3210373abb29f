"""`setup.loss` of kto."""

import torch
from torch import Tensor

from xtrain.components.losses.kto import POINT, Kto
from xtrain.dsl.schema.losses import REF
from xtrain.runtime.base.ops import op
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.unit_losses import UnitSums, UnitTerm
from xtrain.runtime.sampling.reference_weights import ReferencePoint


@op("setup.loss.kto", gives="reference_point")
def judge(
    model: ModelParts, beta: float, desirable: float, undesirable: float, reference_point: float | str
) -> ReferencePoint:
    """Set the loss of labeled answers against a reference."""
    fixed = None if isinstance(reference_point, str) else reference_point
    point = ReferencePoint(value=fixed or 0.0, estimated=fixed is None)
    model.minimise(judged(beta, desirable, undesirable, point))
    return point


def judged(beta: float, desirable: float, undesirable: float, point: ReferencePoint) -> UnitTerm:
    """Return the KTO loss. Arguments are settings of `Kto`; `point` is read when the loss is computed."""

    def loss(sequences: UnitSums) -> tuple[Tensor, dict[str, Tensor]]:
        (ratio_U,) = sequences.logprob_KU - sequences.sums[REF]
        good_U = (sequences.values["label"] > 0.5).double()
        sign_U = 2 * good_U - 1
        weight_U = desirable * good_U + undesirable * (1 - good_U)
        margin_U = sign_U * beta * ratio_U.detach()
        metrics = {"rewards/margin": margin_U, "rewards/accuracy": (margin_U > 0).double()}
        metrics |= {POINT: torch.full_like(margin_U, point.value)} if point.estimated else {}
        return weight_U * torch.sigmoid(-sign_U * beta * (ratio_U - point.value)), metrics

    names = tuple(name for name in Kto.metrics if name != POINT or point.estimated)
    return UnitTerm(loss, columns=(REF,), metrics=names)
