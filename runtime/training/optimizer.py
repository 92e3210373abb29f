"""What optimizers are built from: the parameters of a rank in groups. Optimizers stand in `components/optimizers/`."""

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, Protocol, runtime_checkable

import torch
from attrs import evolve
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from xtrain.planner.model.groups import ParameterGroups, is_in, name_of
from xtrain.planner.plan import Node, Plan
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.ops import PlanMismatch, op, op_of
from xtrain.runtime.parallelize.wrapped import WrappedModel
from xtrain.runtime.state import Resources


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
    all_groups = ParameterGroups.of(plan).groups
    groups: dict[tuple[bool, str | None, DeviceMesh | None], list[nn.Parameter]] = {}
    for name, parameter in updated(plan, model):
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if only(name):
            pattern = next((name_of(each) for each in all_groups if is_in(each, name)), None)
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


@runtime_checkable
class KeepsPieces(Protocol):
    """An optimizer whose state is not that of parameters as they are, but of other pieces."""

    def tensors(self, plan: Plan) -> dict[str, Tensor]:
        """`optimizer.<name>.<moment>` → state of the parameter, for a checkpoint. Collective."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """`model.<name>` → those parameters that are in such pieces too. Collective."""
        ...

    def take_weights(self, tensors: dict[str, Tensor]) -> None:
        """Go on from parameters that have been read, those of `weights` into these tensors. Collective."""
        ...

    def take(self, plan: Plan, tensors: dict[str, Tensor]) -> None:
        """Go on from the state in these tensors, which have been read. Collective."""
        ...


class SeveralOptimizers(Optimizer):
    """Optimizers of different parameters, as one."""

    def __init__(self, optimizers: Sequence[Optimizer], tasks: Sequence[str] = ()) -> None:
        """tasks: whose parameters the last of the optimizers update, one each."""
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self.optimizers, self.tasks = tuple(optimizers), tuple(tasks)
        self.left_out: Set[str] = frozenset()
        self._share_state()

    def _share_state(self) -> None:
        for each in self.optimizers:
            for group in each.param_groups:
                for parameter in group["params"]:
                    self.state[parameter] = each.state[parameter]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters, one optimizer after the other, but those of tasks that are `left_out`. closure: not
        used."""
        first = len(self.optimizers) - len(self.tasks)
        for place, each in enumerate(self.optimizers):
            if place < first or self.tasks[place - first] not in self.left_out:
                each.step()
        self._share_state()


@op("setup.stack_optimizer", gives="optimizer")
def of_stack(wrapped: WrappedModel) -> Optimizer:
    """The optimizer that the stack has wrapped."""
    assert wrapped.optimizer is not None
    return wrapped.optimizer


@op("setup.group", gives="optimizer")
def set_group(
    plan: Plan,
    model: ModelParts,
    resources: Resources,
    optimizer: Optimizer,
    pattern: str = "",
    task: str = "",
    lr_scale: float = 1.0,
    weight_decay: float | None = None,
    own: dict[str, Any] | None = None,
) -> Optimizer:
    """The optimizer, with another learning rate, weight decay or update rule for the parameters that a pattern means,
    or those of a task.

    own: arguments of the optimizer that they have for themselves. Raises PlanMismatch where the optimizer has put some
    of them in one group of torch with others.
    """
    args = {"task": task} if task else {"pattern": pattern}
    if own is not None:
        node = Node(id=f"setup.group.{name_of(args)}", kind="setup", op="setup.optimizer", does="", args=own)
        built = op_of(node).bind(node, {**resources, "model": evolve(model, group=name_of(args))})()
        before, tasks = (optimizer,), ()
        if isinstance(optimizer, SeveralOptimizers):
            before, tasks = optimizer.optimizers, optimizer.tasks
        optimizer = SeveralOptimizers([*before, built], (*tasks, task) if task else tasks)
    names = {parameter: name for name, parameter in model.trained()}
    for group in optimizer.param_groups:
        meant = {is_in(args, names[parameter]) for parameter in group["params"]}
        if meant == {True}:
            group["lr_scale"] = group.get("lr_scale", 1.0) * lr_scale
            if weight_decay is not None:
                group["weight_decay"] = weight_decay
        elif len(meant) > 1:
            which = f"task {task}" if task else f"group {pattern}"
            raise PlanMismatch(
                f"the optimizer has joined parameters of `{which}` with others: it must keep the groups that "
                "it is given apart"
            )
    return optimizer
