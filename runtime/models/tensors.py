"""Model and optimizer as one flat dict of tensors under the parameters' own names, so any layout can read it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...dsl.schema.state_tensors import StateTensor
from ...planner.model.groups import ParameterGroups
from ...planner.plan import Plan
from ..parallel.tensor import local
from .build import DTYPES
from .parts import ModelParts


def model_tensors(model: ModelParts, prefix: str = "model.") -> dict[str, Tensor]:
    """`model.<name>` → parameter or buffer that is part of the model's state; shards stay shards."""
    tensors = {f"{prefix}{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for part in model.parts:
        saved = part.state_dict().keys()
        tensors |= {f"{prefix}{name}": buffer for name, buffer in part.named_buffers() if name in saved}
    return tensors


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
    """What an optimizer begins with: zeros."""
    own = local(parameter)
    dtype = DTYPES[tensor.format] if tensor.format else parameter.dtype
    zeros = torch.zeros(tensor.shape(own.shape), dtype=dtype, device=own.device)
    if not isinstance(parameter, DTensor):
        return zeros
    shape = torch.Size(tensor.shape(parameter.shape))
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(zeros, mesh, placements, run_check=False, shape=shape, stride=stride)


@contextmanager
def quiet_alone() -> Iterator[None]:
    """Keep torch from warning that one process saves or loads by itself, which is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
