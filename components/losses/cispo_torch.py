"""`setup.loss` of cispo."""

from typing import Any

from torch import Tensor

from xtrain.components.losses.policy_torch import Surrogate, of_tokens
from xtrain.runtime.base.ops import op
from xtrain.runtime.nn.transformer import ModelParts


@op("setup.loss.cispo")
def improve(model: ModelParts, ratio_low: float, ratio_high: float, outside: str = "clip", **others: Any) -> None:
    """Set a policy loss whose ratios are weights."""
    model.minimise(of_tokens(weighted(ratio_low, ratio_high, outside), **others))


def weighted(low: float, high: float, outside: str = "clip") -> Surrogate:
    """Return the surrogate −clip(ρ, low, high) A log π, ρ without gradient. outside: `mask` replaces clipped ratios by
    0."""

    def surrogate(logprob_T: Tensor, ratio_T: Tensor, advantage_T: Tensor) -> tuple[Tensor, Tensor]:
        ratio_T = ratio_T.detach()
        beyond_T = (ratio_T < low) | (ratio_T > high)
        # A clipped token still counts: the clipped ratio is its weight.
        weight_T = ratio_T.clamp(low, high) if outside == "clip" else ratio_T.masked_fill(beyond_T, 0)
        return -weight_T * advantage_T * logprob_T, beyond_T

    return surrogate
