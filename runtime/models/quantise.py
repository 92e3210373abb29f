"""`setup.quantise`: matrices that are not trained as blocks of codes; and how they get their values."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xtrain.dsl.schema.bases import Base, base_of
from xtrain.planner.plan import Plan
from xtrain.runtime.models.layers import Linear
from xtrain.runtime.models.moe import Experts
from xtrain.runtime.models.parts import ModelParts, QuantisedParameter
from xtrain.runtime.models.quantised import QuantisedMatrix
from xtrain.runtime.models.tensors import fill, own_indices
from xtrain.runtime.ops import PlanMismatch, op
from xtrain.runtime.parallel.tensor import local


@op("setup.quantise")
def quantise(plan: Plan, model: ModelParts, base: dict[str, Any], matrices: int) -> None:
    """Put bytes in the place of the planned matrices, which have no memory yet, cut as they are.

    Raises PlanMismatch unless the plan has so many `matrices`, and all of them are of modules that can store them.
    """
    names = {tensor.name for tensor in plan.parameters.tensors if tensor.quantised}
    if len(names) != matrices:
        raise PlanMismatch(f"the plan stores {len(names):,} matrices, and its node says {matrices:,}")
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if f"{path}.{name}" in names:
                _replace(module, name, parameter, base_of(base))


def _replace(module: nn.Module, name: str, parameter: Tensor, base: Base) -> None:
    whole, own = tuple(parameter.shape), tuple(local(parameter).shape)
    scales = base.scales_shape(whole)
    beside = f"{name}_scales" if scales else ""
    matrix = QuantisedMatrix(base, whole, own, _first(parameter), beside)
    if isinstance(module, Experts):
        module.quantised[name] = matrix
    elif isinstance(module, Linear) and name == "weight":
        module.quantised = matrix
    else:
        raise PlanMismatch(f"{type(module).__name__} cannot store `{name}` as {base.kind}")
    codes = torch.empty(base.stored_shape(own), dtype=torch.uint8, device=parameter.device)
    if isinstance(parameter, DTensor):
        shape = base.stored_shape(whole)
        stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        codes = DTensor.from_local(
            codes, parameter.device_mesh, parameter.placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
    module.register_parameter(name, nn.Parameter(codes, requires_grad=False))
    if beside:
        module.register_buffer(beside, torch.empty(scales, device=parameter.device))


def _first(parameter: Tensor) -> tuple[int, ...]:
    """The indices at which this rank's piece begins, cut along one axis of ranks at most."""
    first = [0] * parameter.ndim
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if (dim := getattr(placement, "dim", None)) is not None:
                first[dim] = -(-parameter.shape[dim] // mesh.size(axis)) * mesh.get_local_rank(axis)
    return tuple(first)


# Values ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def store(found: QuantisedParameter, whole: Tensor) -> None:
    """Keep this rank's piece of a matrix, or a stack, of which all is given."""
    codes, scales = found.matrix.pack(whole)
    fill(found.parameter, codes)
    if scales is not None:
        found.module.get_buffer(found.matrix.scales).copy_(scales)


@torch.no_grad()
def store_experts(found: QuantisedParameter, read: Callable[[int], Tensor], *, every: bool = False) -> None:
    """The same of a stack, one matrix at a time and only those of this rank's experts; `share_scales` does the rest.

    read: gives all of the matrix of an expert. every: of all experts, so that the rank has the scales of all.
    """
    matrix, parameter = found.matrix, found.parameter
    piece, rows = local(parameter), own_indices(parameter, 1).to(parameter.device)
    places = {expert: place for place, expert in enumerate(own_indices(parameter, 0).tolist())}
    first, count = (0, matrix.shape[0]) if every else (matrix.first[0], matrix.piece[0])
    for expert in range(first, first + count):
        codes, scales = matrix.expert(0).pack(read(expert))
        if expert in places:
            piece[places[expert]].copy_(codes.to(piece.device)[rows.to(piece.device)])
        if scales is not None:
            found.module.get_buffer(matrix.scales)[expert].copy_(scales)


@torch.no_grad()
def share_scales(model: ModelParts) -> None:
    """Let every rank have the scales of all experts, of which each rank of ep has stored its own. Collective."""
    group = model.axes.experts
    for found in model.quantised():
        if group is not None and found.matrix.scales and len(found.matrix.shape) == 3:
            dist.all_reduce(found.module.get_buffer(found.matrix.scales), group=group)  # zeros but in one place


def values_of(found: QuantisedParameter) -> Tensor:
    """What the codes of this rank's own piece mean, in fp32; zeros where a block is filled up."""
    matrix, parameter = found.matrix, found.parameter
    packed, beside, base = local(parameter), matrix.beside(found.module), matrix.base
    if not packed.numel():
        return packed.new_zeros(0, dtype=torch.float32)
    rows = own_indices(parameter, parameter.ndim - 2)
    if len(matrix.shape) == 3:
        part = evolve(matrix.expert(0), piece=(len(rows), matrix.shape[2]), first=(int(rows[0]), 0))
        places = enumerate(own_indices(parameter, 0).tolist())
        own = [part.values(packed[at], None if beside is None else beside[e], torch.float32) for at, e in places]
        return torch.stack(own)
    if base.in_rows(matrix.shape):
        piece, first = (len(rows), matrix.piece[1]), (int(rows[0]), matrix.first[1])
        return evolve(matrix, piece=piece, first=first).values(packed, beside, torch.float32)
    blocks = (parameter.shape[0], base.block)
    piece = (len(rows), base.block)
    return evolve(matrix, shape=blocks, piece=piece, first=(int(rows[0]), 0)).values(packed, beside, torch.float32)
