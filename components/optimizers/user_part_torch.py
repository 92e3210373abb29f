"""`setup.optimizer` with user code: the optimizer made by the user's function, checked against its declaration."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.user_parts import UserPart, failures_of, part_of, spec_folder
from xtrain.runtime.nn.optimizer import groups_of, updated
from xtrain.runtime.nn.transformer import ModelParts


@op("setup.optimizer.user", gives="optimizer")
def build_user_optimizer(
    plan: Plan, model: ModelParts, lr: float, user: dict[str, Any], state: list[str], scalars: list[str]
) -> Optimizer:
    """Build the user's optimizer; the plan decides weight decay per parameter. After each step the optimizer's state is
    compared with `state` and `scalars`. Raises PartFailed if the result is not an optimizer of these groups."""
    part = part_of("optimizer", user, spec_folder(plan.spec))
    decay = part.arguments.get("weight_decay", 0.0)
    groups = [{**group, "lr": lr} for group in groups_of(plan, model, decay or 0.0)]
    names = {id(parameter): name for name, parameter in updated(plan, model)}
    with failures_of(part):
        make = part.load()
        filled = {"lr": lr} if "lr" in inspect.signature(make).parameters else {}
        optimizer = make(groups, **filled, **part.arguments)
    if not isinstance(optimizer, Optimizer):
        raise part.failed(f"returned {type(optimizer).__name__}, and an optimizer is a torch.optim.Optimizer")
    taken = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if left := [name for each, name in names.items() if each not in set(taken)]:
        raise part.failed(f"returned an optimizer without {_listed(left)}: pass on every group")
    if len(taken) != len(names):
        raise part.failed("returned an optimizer of parameters that are not among the groups")
    checked = _checked(part, optimizer, optimizer.step, names, (tuple(state), tuple(scalars)))
    optimizer.step = checked  # type: ignore[method-assign]
    return optimizer


def _checked(
    part: UserPart,
    optimizer: Optimizer,
    update: Callable[[], Any],
    names: dict[int, str],
    entries: tuple[tuple[str, ...], ...],
) -> Callable[[], None]:
    """Wrap an optimizer's `step`: report its errors and undeclared state in the terms of its declaration."""
    declared, seen = {name for names in entries for name in names}, False

    def step() -> None:
        nonlocal seen
        with failures_of(part):
            update()
        for parameter, values in optimizer.state.items():
            if values and values.keys() != declared:
                raise part.failed(_difference(names[id(parameter)], set(values), declared))
            if values and not seen:
                for place, words in zip(entries, (_tensor_of, _scalar), strict=True):
                    for name in place:
                        if wrong := words(values[name], parameter):
                            raise part.failed(f"keeps `{name}` of {names[id(parameter)]}, which is {wrong}")
        seen = True

    return step


def _difference(name: str, present: set[str], declared: set[str]) -> str:
    if more := sorted(present - declared):
        return f"keeps {_listed(more)} of {name}, which its `state` and `scalars` do not name"
    return f"keeps no {_listed(sorted(declared - present))} of {name}, which its `state` or `scalars` names"


def _tensor_of(value: Any, parameter: Tensor) -> str:
    """Return the problem of a state tensor, which needs the parameter's shape and format; empty if it is valid."""
    if not isinstance(value, Tensor):
        return f"{type(value).__name__}, and a tensor of the shape of the parameter was declared"
    if value.shape != parameter.shape or value.dtype != parameter.dtype:
        found, wanted = (f"{tuple(each.shape)} in {each.dtype}" for each in (value, parameter))
        return f"{found}, and {wanted} was declared, as the parameter is: name single numbers in `scalars`"
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
        return "a plain tensor, and the parameter is a piece on each rank: make it with `torch.zeros_like(parameter)`"
    return ""


def _scalar(value: Any, parameter: Tensor) -> str:
    """Return the problem of a state value that should be a single number; empty if it is valid."""
    if isinstance(value, Tensor) and value.shape == () and value.dtype == torch.float32:
        return ""
    found = f"{tuple(value.shape)} in {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
    return f"{found}, and a tensor without dimensions was declared: make it with `torch.tensor(0.0)`"


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
