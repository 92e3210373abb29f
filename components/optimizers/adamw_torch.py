"""`setup.optimizer` of adamw: torch's own, fused."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...planner.plan import Plan
from ...runtime.models.parts import ModelParts
from ...runtime.ops import op
from ...runtime.parallel.tensor import local
from ...runtime.training.optimizer import groups_of


class LocalAdamW(torch.optim.AdamW):
    """AdamW of torch, whose update takes the parts of a rank as plain tensors.

    Every element by itself, so nothing is sent. As DTensors torch would derive their layout anew from that of all
    parameters, which in the first step takes a second for a few hundred of them, and some of that again in each step.
    """

    def _init_group(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, group: dict[str, Any], *lists: list[Tensor]
    ) -> bool:
        """Fill `lists` with parameters, gradients and moments."""
        found = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return found


@op("setup.optimizer.adamw", gives="optimizer")
def build_adamw(
    plan: Plan, model: ModelParts, lr: float, betas: list[float], eps: float, weight_decay: float
) -> Optimizer:
    """The plan says of every parameter whether it decays."""
    groups = groups_of(plan, model, weight_decay)
    return LocalAdamW(groups, lr=lr, betas=(betas[0], betas[1]), eps=eps, fused=True)
