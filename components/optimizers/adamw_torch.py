"""`setup.optimizer` of adamw: torch's own, fused."""

import torch
from torch.optim import Optimizer

from ...planner.plan import Plan
from ...runtime.models.parts import ModelParts
from ...runtime.ops import op
from ...runtime.training.optimizer import groups_of


@op("setup.optimizer.adamw", gives="optimizer")
def build_adamw(
    plan: Plan, model: ModelParts, lr: float, betas: list[float], eps: float, weight_decay: float
) -> Optimizer:
    """The plan says of every parameter whether it decays."""
    groups = groups_of(plan, model, weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1]), eps=eps, fused=True)
