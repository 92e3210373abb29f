"""`setup.optimizer`: AdamW with decay for matrices only."""

import torch
from torch import nn
from torch.optim import Optimizer

from ..planner.plan import Plan
from .ops import op


@op("setup.optimizer", gives="optimizer")
def build_optimizer(
    plan: Plan, model: nn.Module, kind: str, lr: float, betas: list[float], eps: float, weight_decay: float
) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019), fused. The plan says of every parameter whether it decays."""
    assert kind == "adamw"
    decays = {p.name: p.decays for p in plan.parameters.tensors}
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[decays[name]].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": weight_decay},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(betas[0], betas[1]),
        eps=eps,
        fused=True,
    )
