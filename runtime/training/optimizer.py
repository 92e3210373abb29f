"""`setup.optimizer`: AdamW with decay for matrices only."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...planner.plan import Plan
from ..models.parts import ModelParts
from ..ops import op


@op("setup.optimizer", gives="optimizer")
def build_optimizer(
    plan: Plan, model: ModelParts, kind: str, lr: float, betas: list[float], eps: float, weight_decay: float
) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019), fused. The plan says of every parameter whether it decays."""
    assert kind == "adamw"
    decays = {p.name: p.decays for p in plan.parameters.tensors}
    # One fused update works on tensors of one mesh only: experts and the rest are groups of their own.
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((decays[name], mesh), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": weight_decay if decay else 0.0}
            for (decay, _), parameters in groups.items()
        ],
        lr=lr,
        betas=(betas[0], betas[1]),
        eps=eps,
        fused=True,
    )
