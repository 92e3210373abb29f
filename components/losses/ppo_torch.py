"""`setup.loss` of ppo."""

from typing import Any

from xtrain.components.losses.policy_torch import clipped, of_tokens
from xtrain.runtime.base.ops import op
from xtrain.runtime.nn.transformer import ModelParts


@op("setup.loss.ppo")
def improve(model: ModelParts, clip_low: float, clip_high: float, dual_clip: float | None, **others: Any) -> None:
    """Set a clipped policy loss."""
    model.minimise(of_tokens(clipped(clip_low, clip_high, dual_clip), **others))
