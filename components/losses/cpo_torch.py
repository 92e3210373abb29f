"""`setup.loss` of cpo."""

from torch import Tensor

from xtrain.components.losses.cpo import Cpo
from xtrain.components.losses.preference_torch import compared, rewards_of
from xtrain.dsl.user_parts.kinds import LOGPROB
from xtrain.runtime.base.ops import op
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.unit_losses import UnitSums, UnitTerm


@op("setup.loss.cpo")
def prefer(model: ModelParts, beta: float, form: str, label_smoothing: float, alpha: float) -> None:
    """Set a pair loss without a reference."""
    model.minimise(preference(beta, form, label_smoothing, alpha))


def preference(beta: float, form: str, label_smoothing: float, alpha: float) -> UnitTerm:
    """Return the CPO loss. Arguments are settings of `Cpo`."""

    def loss(pairs: UnitSums) -> tuple[Tensor, dict[str, Tensor]]:
        by_KU = pairs.mean(LOGPROB) if form == "ipo" else pairs.logprob_KU
        chosen_U, rejected_U = by_KU
        found_U = compared(form, beta, chosen_U - rejected_U, label_smoothing)
        return found_U - alpha * pairs.mean(LOGPROB)[0], rewards_of(beta * by_KU)

    return UnitTerm(loss, metrics=tuple(Cpo.metrics))
