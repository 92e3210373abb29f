"""`setup.optimizer` of sgd: torch's own, over lists of tensors."""

import torch
from torch.optim import Optimizer

from ...planner.plan import Plan
from ...runtime.models.parts import ModelParts
from ...runtime.ops import op
from ...runtime.training.optimizer import groups_of


@op("setup.optimizer.sgd", gives="optimizer")
def build_sgd(
    plan: Plan, model: ModelParts, lr: float, momentum: float, nesterov: bool, weight_decay: float
) -> Optimizer:
    """The plan says of every parameter whether it decays."""
    groups = groups_of(plan, model, weight_decay)
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0, foreach=True)
