"""`setup.loss` of importance_sampling."""

from typing import Any

import torch
from torch import Tensor

from xtrain.components.losses.policy_torch import of_tokens
from xtrain.runtime.base.ops import op
from xtrain.runtime.nn.transformer import ModelParts


@op("setup.loss.importance_sampling")
def improve(model: ModelParts, **settings: Any) -> None:
    """Set a policy loss without clipping."""
    model.minimise(of_tokens(weighted, **settings))


def weighted(logprob_T: Tensor, ratio_T: Tensor, advantage_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return −ρ A; no ratio is clipped."""
    return -ratio_T * advantage_T, torch.zeros_like(ratio_T, dtype=torch.bool)
