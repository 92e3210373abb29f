"""`setup.loss` of dpo."""

from torch import Tensor

from xtrain.components.losses.dpo import Dpo
from xtrain.components.losses.preference_torch import compared, rewards_of
from xtrain.dsl.schema.losses import REF
from xtrain.runtime.base.ops import op
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.unit_losses import UnitSums, UnitTerm


@op("setup.loss.dpo")
def prefer(model: ModelParts, beta: float, form: str, label_smoothing: float, length_normalised: bool) -> None:
    """Set a pair loss against a reference."""
    model.minimise(preference(beta, form, label_smoothing, length_normalised))


def preference(beta: float, form: str, label_smoothing: float = 0.0, length_normalised: bool = False) -> UnitTerm:
    """Return the DPO loss. Arguments are settings of `Dpo`."""

    def loss(pairs: UnitSums) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_KU = pairs.logprob_KU - pairs.sums[REF]
        if length_normalised or form == "ipo":
            ratio_KU = ratio_KU / pairs.tokens_KU
        chosen_U, rejected_U = ratio_KU
        return compared(form, beta, chosen_U - rejected_U, label_smoothing), rewards_of(beta * ratio_KU)

    return UnitTerm(loss, columns=(REF,), metrics=tuple(Dpo.metrics))
