"""What optimizers are built from: the parameters of a rank in groups. Optimizers stand in `components/optimizers/`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from attrs import evolve
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...planner.model.frozen import covers
from ...planner.model.groups import ParameterGroups
from ...planner.plan import Node, Plan
from ..models.parts import ModelParts
from ..ops import PlanMismatch, op, op_of
from ..state import Resources


def updated(plan: Plan, model: ModelParts) -> Iterator[tuple[str, nn.Parameter]]:
    """The trained parameters, by name, that the optimizer which is being built updates: those of `model.group`."""
    owner = ParameterGroups.of(plan).owner
    return ((name, parameter) for name, parameter in model.trained() if owner(name) == model.group)


def groups_of(
    plan: Plan, model: ModelParts, weight_decay: float, only: Callable[[str], bool] = lambda name: True
) -> list[dict[str, Any]]:
    """Groups of the parameters that an optimizer of torch updates: those that decay, as the plan says, and those that
    do not, and of each those of every `group`. only: whether a parameter, by its name, is among them.

    One fused update works on tensors of one mesh only: experts and the rest are groups of their own.
    """
    decays = {p.name: p.decays for p in plan.parameters.tensors}
    patterns = [group["pattern"] for group in ParameterGroups.of(plan).groups]
    groups: dict[tuple[bool, str | None, DeviceMesh | None], list[nn.Parameter]] = {}
    for name, parameter in updated(plan, model):
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if only(name):
            pattern = next((each for each in patterns if covers(each, name)), None)
            groups.setdefault((decays[name], pattern, mesh), []).append(parameter)
    if not groups:  # of a stage that has nothing to train; an optimizer wants a group all the same
        return [{"params": [], "weight_decay": weight_decay}]
    return [
        {"params": parameters, "weight_decay": weight_decay if decay else 0.0}
        for (decay, _, _), parameters in groups.items()
    ]


@runtime_checkable
class MovesWeights(Protocol):
    """An optimizer whose gradients are taken elsewhere than at the weights that it leaves behind."""

    def to_training_point(self) -> None:
        """Move the weights there; the update of the step moves them back."""
        ...


class SeveralOptimizers(Optimizer):
    """Optimizers of different parameters, as one."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self.optimizers = tuple(optimizers)
        self._share_state()

    def _share_state(self) -> None:
        for each in self.optimizers:
            for group in each.param_groups:
                for parameter in group["params"]:
                    self.state[parameter] = each.state[parameter]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters, one optimizer after the other. closure: not used."""
        for each in self.optimizers:
            each.step()
        self._share_state()


@op("setup.group", gives="optimizer")
def set_group(
    plan: Plan,
    model: ModelParts,
    resources: Resources,
    optimizer: Optimizer,
    pattern: str,
    lr_scale: float = 1.0,
    weight_decay: float | None = None,
    own: dict[str, Any] | None = None,
) -> Optimizer:
    """The optimizer, with another learning rate, weight decay or update rule for the parameters that a pattern means.

    own: arguments of the optimizer that they have for themselves. Raises PlanMismatch where the optimizer has put some
    of them in one group of torch with others.
    """
    if own is not None:
        node = Node(id=f"setup.group.{pattern}", kind="setup", op="setup.optimizer", does="", args=own)
        built = op_of(node).bind(node, {**resources, "model": evolve(model, group=pattern)})()
        before = optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else (optimizer,)
        optimizer = SeveralOptimizers([*before, built])
    names = {parameter: name for name, parameter in model.trained()}
    for group in optimizer.param_groups:
        meant = {covers(pattern, names[parameter]) for parameter in group["params"]}
        if meant == {True}:
            group["lr_scale"] = group.get("lr_scale", 1.0) * lr_scale
            if weight_decay is not None:
                group["weight_decay"] = weight_decay
        elif len(meant) > 1:
            raise PlanMismatch(
                f"the optimizer has joined parameters of `group {pattern}` with others: it must keep the groups that "
                "it is given apart"
            )
    return optimizer
