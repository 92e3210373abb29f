"""What optimizers are built from: the parameters of a rank in groups. Optimizers stand in `components/optimizers/`."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...planner.plan import Plan
from ..models.parts import ModelParts


def groups_of(
    plan: Plan, model: ModelParts, weight_decay: float, only: Callable[[str], bool] = lambda name: True
) -> list[dict[str, Any]]:
    """Groups of the trained parameters for an optimizer of torch: those that decay, as the plan says, and those that do
    not. only: whether a parameter, by its name, is among them.

    One fused update works on tensors of one mesh only: experts and the rest are groups of their own.
    """
    decays = {p.name: p.decays for p in plan.parameters.tensors}
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for name, parameter in model.trained():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if only(name):
            groups.setdefault((decays[name], mesh), []).append(parameter)
    if not groups:  # of a stage that has nothing to train; an optimizer wants a group all the same
        return [{"params": [], "weight_decay": weight_decay}]
    return [
        {"params": parameters, "weight_decay": weight_decay if decay else 0.0}
        for (decay, _), parameters in groups.items()
    ]
