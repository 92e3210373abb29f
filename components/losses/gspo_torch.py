"""`setup.loss` of gspo."""

from torch import Tensor

from xtrain.components.losses.policy_torch import clipped, divergence, measured, measures
from xtrain.dsl.schema.losses import ADVANTAGES, OLD, REF
from xtrain.dsl.user_parts.kinds import LOGPROB
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import KlWeight
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.unit_losses import UnitSums, UnitTerm


@op("setup.loss.gspo")
def improve(
    model: ModelParts, clip_low: float, clip_high: float, kl: str, kl_weight: float, entropy_weight: float = 0.0
) -> None:
    """Set a clipped policy loss of sequences."""
    model.minimise(of_sequences(clip_low, clip_high, kl, kl_weight, entropy_weight))


def of_sequences(
    clip_low: float, clip_high: float, kl: str = "none", kl_weight: float = 0.0, entropy_weight: float = 0.0
) -> UnitTerm:
    """Return the GSPO loss. Arguments are settings of `Gspo`."""
    surrogate, weight = clipped(clip_low, clip_high), KlWeight(kl_weight)

    def each(**tokens: Tensor) -> dict[str, Tensor]:
        return {"kl": divergence(kl, tokens[LOGPROB], tokens[REF])}

    def loss(sequences: UnitSums) -> tuple[Tensor, dict[str, Tensor]]:
        (log_ratio_U,) = sequences.mean(LOGPROB) - sequences.mean(OLD)
        (advantage_U,), (entropy_U,) = sequences.mean(ADVANTAGES), sequences.mean("entropy_T")
        loss_U, clipped_U = surrogate(log_ratio_U, log_ratio_U.exp(), advantage_U)
        found = measures(log_ratio_U, clipped_U, entropy_U)
        if kl != "none":
            (kl_U,) = sequences.mean("kl")
            loss_U, found["policy/reference_kl"] = loss_U + weight.value * kl_U, kl_U
        if entropy_weight:
            loss_U = loss_U - entropy_weight * entropy_U
        return loss_U, found

    columns = (OLD, ADVANTAGES, *((REF,) if kl != "none" else ()))
    return UnitTerm(
        loss,
        reads=("entropy_T",),
        columns=columns,
        metrics=measured(kl),
        each=None if kl == "none" else each,
        kl_weight=weight,
    )
