"""Model and optimizer as one flat dict of tensors under the parameters' own names, so any layout can read it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from xtrain.dsl.schema.state_tensors import StateTensor
from xtrain.planner.graph.checkpoint_fit import base_names
from xtrain.planner.model.groups import ParameterGroups
from xtrain.planner.plan import Plan
from xtrain.runtime.models.build import DTYPES
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.parallel.tensor import local


def model_tensors(model: ModelParts, prefix: str = "model.") -> dict[str, Tensor]:
    """`model.<name>` → parameter or buffer that is part of the model's state; shards stay shards."""
    tensors = {f"{prefix}{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for part in model.parts:
        saved = part.state_dict().keys()
        tensors |= {f"{prefix}{name}": buffer for name, buffer in part.named_buffers() if name in saved}
    return tensors


def saved_tensors(model: ModelParts, plan: Plan, prefix: str = "model.") -> dict[str, Tensor]:
    """Those of `model_tensors` that checkpoints of a plan hold."""
    base = base_names(plan)
    found = model_tensors(model, prefix)
    return {name: tensor for name, tensor in found.items() if name.removeprefix(prefix) not in base}


def optimizer_tensors(model: ModelParts, optimizer: Optimizer, plan: Plan) -> dict[str, Tensor]:
    """`optimizer.<name>.<moment>` → state, made as it begins for parameters that have not been updated yet."""
    groups = ParameterGroups.of(plan)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.trained():
        moments, count = groups.state(name), groups.scalars(name)
        state = optimizer.state[parameter]
        if not state:
            # As optimizers make them at their first step; a count is a tensor of the parameter's device when fused.
            for counter in count:
                state[counter] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for moment in moments:
                state[moment.name] = first_state(parameter, moment)
        keys = (*count, *(moment.name for moment in moments))
        tensors |= {f"optimizer.{name}.{key}": state[key] for key in keys}
    return tensors


def first_state(parameter: Tensor, tensor: StateTensor) -> Tensor:
    """What an optimizer begins with: zeros, or a copy of the parameter."""
    own = local(parameter)
    dtype = DTYPES[tensor.format] if tensor.format else parameter.dtype
    if tensor.begins == "weights":
        first = own.detach().to(dtype, copy=True)
    else:
        first = torch.zeros(tensor.shape(own.shape), dtype=dtype, device=own.device)
    if not isinstance(parameter, DTensor):
        return first
    shape = torch.Size(tensor.shape(parameter.shape))
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    mesh = parameter.device_mesh
    whole = parameter.dim() + tensor.single if tensor.single else None  # a dim that every rank has
    placements = [Replicate() if getattr(each, "dim", -1) == whole else each for each in parameter.placements]
    return DTensor.from_local(first, mesh, placements, run_check=False, shape=shape, stride=stride)


@contextmanager
def quiet_alone() -> Iterator[None]:
    """Keep torch from warning that one process saves or loads by itself, which is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def fill(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's piece of `whole` into `parameter`, in its number format.

    Without values there is nothing to copy, and finding the piece takes torch an operator for every rank of the axis.
    """
    if isinstance(local(parameter), FakeTensor):
        return
    whole = whole.to(parameter.dtype)
    if isinstance(parameter, DTensor):
        cut = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(cut.to_local())
    else:
        parameter.copy_(whole)


def own_indices(parameter: Tensor, dim: int) -> Tensor:
    """int64, in order: which indices of a dimension this rank's piece has, as the parameter itself is cut."""
    length = parameter.shape[dim]
    if not isinstance(parameter, DTensor):
        return torch.arange(length)
    placements = tuple(
        _along_first(placement) if getattr(placement, "dim", None) == dim else Replicate()
        for placement in parameter.placements
    )
    return _cut(length, parameter.device_mesh, placements)


@cache
def _cut(length: int, mesh: Any, placements: tuple[Any, ...]) -> Tensor:
    whole = torch.arange(length, device=mesh.device_type)
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local().cpu()


def _along_first(placement: Any) -> Any:
    """The same placement of the first dimension; a strided one, of a shard that is cut again, stays strided."""
    factor = getattr(placement, "split_factor", None)
    return type(placement)(0) if factor is None else type(placement)(0, split_factor=factor)
