"""`setup.loss` of grpo."""

from typing import Any

from ...runtime.models.parts import ModelParts
from ...runtime.ops import op
from .policy_torch import clipped, of_tokens


@op("setup.loss.grpo")
def improve(model: ModelParts, clip_low: float, clip_high: float, dual_clip: float | None, **others: Any) -> None:
    """Minimise a clipped loss of a policy, by sequences."""
    model.minimise(of_tokens(clipped(clip_low, clip_high, dual_clip), **others))
