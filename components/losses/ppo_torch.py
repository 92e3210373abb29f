"""`setup.loss` of ppo."""

from typing import Any

from ...runtime.models.parts import ModelParts
from ...runtime.ops import op
from .policy_torch import clipped, of_tokens


@op("setup.loss.ppo")
def improve(model: ModelParts, clip_low: float, clip_high: float, dual_clip: float | None, **others: Any) -> None:
    """Minimise a clipped loss of a policy."""
    model.minimise(of_tokens(clipped(clip_low, clip_high, dual_clip), **others))
