"""Tensors of the model and the optimizer by parameter name, initial values, and quantization of frozen matrices.

Initial values depend only on the seed and the parameter's name, not on the layout.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from xtrain.dsl.schema.optimizers import StateTensor
from xtrain.dsl.schema.precision import Base, base_of
from xtrain.plan.architecture import Architecture, Initial
from xtrain.plan.checkpoints import base_names
from xtrain.plan.groups import ParameterGroups
from xtrain.plan.mesh import local_shapes
from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import PlanMismatch, op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.nn.axes import local
from xtrain.runtime.nn.build import DTYPES
from xtrain.runtime.nn.layers import Linear, generator_of
from xtrain.runtime.nn.moe import Experts
from xtrain.runtime.nn.number_formats import QuantisedMatrix
from xtrain.runtime.nn.transformer import ModelParts, QuantisedParameter, Transformer

Draw = Callable[[str, tuple[int, ...]], Tensor]
"""Name and whole shape of a parameter → its initial values."""


def model_tensors(model: ModelParts, prefix: str = "model.") -> dict[str, Tensor]:
    """Return `model.<name>` → parameter or buffer of the model's state; shards stay shards."""
    tensors = {f"{prefix}{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for part in model.parts:
        saved = part.state_dict().keys()
        tensors |= {f"{prefix}{name}": buffer for name, buffer in part.named_buffers() if name in saved}
    return tensors


def saved_tensors(model: ModelParts, plan: Plan, prefix: str = "model.") -> dict[str, Tensor]:
    """Return the `model_tensors` that checkpoints of a plan contain."""
    base = base_names(plan)
    tensors = model_tensors(model, prefix)
    return {name: tensor for name, tensor in tensors.items() if name.removeprefix(prefix) not in base}


def optimizer_tensors(model: ModelParts, optimizer: Optimizer, plan: Plan) -> dict[str, Tensor]:
    """Return `optimizer.<name>.<moment>` → state; initial values for parameters that have not been updated yet."""
    groups = ParameterGroups.of(plan)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.trained():
        moments, count = groups.state(name), groups.scalars(name)
        state = optimizer.state[parameter]
        if not state:
            # As optimizers create them in their first step; a count is a tensor on the parameter's device when fused.
            for counter in count:
                state[counter] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for moment in moments:
                state[moment.name] = first_state(parameter, moment)
        keys = (*count, *(moment.name for moment in moments))
        tensors |= {f"optimizer.{name}.{key}": state[key] for key in keys}
    return tensors


def first_state(parameter: Tensor, tensor: StateTensor) -> Tensor:
    """Return an optimizer's initial state: zeros, or a copy of the parameter."""
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
    whole = parameter.dim() + tensor.single if tensor.single else None  # a dim that every rank has whole
    placements = [Replicate() if getattr(place, "dim", -1) == whole else place for place in parameter.placements]
    return DTensor.from_local(first, mesh, placements, run_check=False, shape=shape, stride=stride)


@contextmanager
def quiet_alone() -> Iterator[None]:
    """Suppress torch's warning that one process saves or loads alone, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def fill(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's shard of `whole` into `parameter`, in its number format.

    Does nothing for fake tensors: finding the shard costs torch an operator for every rank of the axis.
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
    """Return the indices of a dimension that this rank's shard has, int64, in order."""
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
    """Return the same placement for the first dimension; a strided one, of a shard that is cut again, stays strided."""
    factor = getattr(placement, "split_factor", None)
    return type(placement)(0) if factor is None else type(placement)(0, split_factor=factor)


@op("setup.quantise")
def quantise(plan: Plan, model: ModelParts, base: dict[str, Any], matrices: int) -> None:
    """Replace the planned matrices, on the meta device and sharded, by bytes.

    Raises PlanMismatch unless the plan has this number of `matrices`, and all of their modules can store them.
    """
    names = {tensor.name for tensor in plan.parameters.tensors if tensor.quantised}
    if len(names) != matrices:
        raise PlanMismatch(f"the plan stores {len(names):,} matrices, but its node says {matrices:,}")
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
    """Return the first indices of this rank's shard, which is cut along at most one axis of ranks."""
    first = [0] * parameter.ndim
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if (dim := getattr(placement, "dim", None)) is not None:
                first[dim] = -(-parameter.shape[dim] // mesh.size(axis)) * mesh.get_local_rank(axis)
    return tuple(first)


# Values ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def store(stored: QuantisedParameter, whole: Tensor) -> None:
    """Store this rank's shard of a whole matrix, or stack."""
    codes, scales = stored.matrix.pack(whole)
    fill(stored.parameter, codes)
    if scales is not None:
        stored.module.get_buffer(stored.matrix.scales).copy_(scales)


@torch.no_grad()
def store_experts(stored: QuantisedParameter, read: Callable[[int], Tensor], *, every: bool = False) -> None:
    """Store a stack, one matrix at a time and only this rank's experts; `share_scales` does the rest.

    read: returns the whole matrix of an expert. every: reads all experts, so that the rank has the scales of all.
    """
    matrix, parameter = stored.matrix, stored.parameter
    piece, rows = local(parameter), own_indices(parameter, 1).to(parameter.device)
    places = {expert: place for place, expert in enumerate(own_indices(parameter, 0).tolist())}
    first, count = (0, matrix.shape[0]) if every else (matrix.first[0], matrix.piece[0])
    for expert in range(first, first + count):
        codes, scales = matrix.expert(0).pack(read(expert))
        if expert in places:
            piece[places[expert]].copy_(codes.to(piece.device)[rows.to(piece.device)])
        if scales is not None:
            stored.module.get_buffer(matrix.scales)[expert].copy_(scales)


@torch.no_grad()
def share_scales(model: ModelParts) -> None:
    """Share the scales of all experts, of which each rank of ep has stored its own. Collective."""
    group = model.axes.experts
    for stack in model.quantised():
        if group is not None and stack.matrix.scales and len(stack.matrix.shape) == 3:
            dist.all_reduce(stack.module.get_buffer(stack.matrix.scales), group=group)  # zeros except in one place


def values_of(stored: QuantisedParameter) -> Tensor:
    """Return the values of this rank's shard in fp32; zeros in the padding of a block."""
    matrix, parameter = stored.matrix, stored.parameter
    packed, beside, base = local(parameter), matrix.beside(stored.module), matrix.base
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


def places_of(stored: QuantisedParameter) -> tuple[tuple[int, ...], list[Tensor]]:
    """Return the shape of a whole matrix or stack, or of its blocks if they cross rows, and the indices of each
    dimension that `values_of` returns, int64."""
    matrix, parameter = stored.matrix, stored.parameter
    indices = [own_indices(parameter, dim) for dim in range(parameter.ndim - 1)]
    if matrix.base.in_rows(matrix.shape):
        return matrix.shape, [*indices, matrix.first[-1] + torch.arange(matrix.piece[-1])]
    return (parameter.shape[0], matrix.base.block), [*indices, torch.arange(matrix.base.block)]


@op("setup.weights")
@torch.no_grad()
def initialise(
    plan: Plan,
    model: ModelParts,
    rank: Rank,
    offload: bool,
    seed: int | None = None,
    init_std: float | None = None,
    scales: Mapping[str, float] = MappingProxyType({}),
    anew: bool = False,
) -> None:
    """Allocate and initialize every parameter: norm factors are 1, biases 0, matrices normal with `init_std`; buffers
    are zero. Parameters of an adapter are only allocated (`setup.adapter`). scales: see `drawing`.

    Without a seed parameters are only allocated: their values are read (`setup.read_weights`). offload: parameters are
    in host memory. anew: they are allocated already.

    Each value is drawn in fp32 for the whole parameter and then cut, so every rank of every layout, and every number
    format, starts from the same model. Raises PlanMismatch if this rank's parameters differ from the plan.
    """
    device = torch.device("cpu") if offload else rank.device
    for part in model.parts:
        if anew:
            part.fill_buffers()
        else:
            part.allocate(device, rank.device)
    assert_local_shapes(plan, model, rank)
    if seed is not None and init_std is not None:
        _draw(plan, model, rank, seed, drawing(plan.architecture, seed, init_std, rank.device, scales))


@op("setup.head")
@torch.no_grad()
def draw_head(plan: Plan, model: ModelParts, rank: Rank, seed: int, init_std: float) -> None:
    """Initialize a reward head, with the values of `setup.weights`, if the rest of the model is read; a resumed run
    reads its checkpoint afterwards."""
    name = f"{plan.architecture.head_module}.weight"
    draw = drawing(plan.architecture, seed, init_std, rank.device)
    for parameter in (parameter for own, parameter in model.named_parameters() if own == name):
        fill(parameter, draw(name, tuple(parameter.shape)))


def _draw(plan: Plan, model: ModelParts, rank: Rank, seed: int, draw: Draw) -> None:
    others = {tensor.name for tensor in plan.parameters.tensors if tensor.adapter}
    if "code" in plan.architecture.own:
        draw = _drawing_code(model.whole, seed, rank.device)
    quantised = {stored.name: stored for stored in model.quantised()}
    for name, parameter in model.named_parameters():
        if name in others:
            continue
        if (stored := quantised.get(name)) is not None:
            store(stored, draw(name, stored.matrix.shape))
        else:
            fill(parameter, draw(name, tuple(parameter.shape)))


def _drawing_code(model: Transformer, seed: int, device: torch.device) -> Draw:
    """Set the saved buffers of a model of transformers, and return the function that draws its parameters."""
    from xtrain.runtime.nn.code_transformer import CodeTransformer

    assert isinstance(model, CodeTransformer)
    if any(isinstance(local(parameter), FakeTensor) for parameter in model.parameters()):
        return lambda name, shape: torch.zeros(shape)  # a trace has no values, and initializers may look at them
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in saved and name in model.drawable:
            buffer.copy_(model.drawn(name, seed))
    return lambda name, shape: model.drawn(name, seed).to(device)


def drawing(
    arch: Architecture,
    seed: int,
    init_std: float,
    device: torch.device,
    scales: Mapping[str, float] = MappingProxyType({}),
) -> Draw:
    """Return the function that draws the initial values of a parameter, from its name and whole shape, in fp32.

    scales: factors on the standard deviation, by the roles of `plan.parametrization`.
    """
    kinds, roles = initials(arch), dict[str, str]()
    if scales:
        from xtrain.plan.parametrization import roles_of

        roles |= roles_of(arch)
    # For matrices added to the residual stream, 2 · layers times (GPT-2: scaled down by the root of that).
    residual_std = init_std / math.sqrt(2 * arch.blocks)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        kind = kinds.get(name, "normal")
        std = (residual_std if kind == "residual" else init_std) * scales.get(roles.get(name, ""), 1.0)
        return initial_values(name, shape, kind, std, seed, device)

    return draw


def initials(arch: Architecture) -> dict[str, Initial]:
    """Return the kind of each parameter's initial values; embedding and head, which are not included, are normal."""
    kinds: dict[str, Initial] = {"norm.weight": "zeros" if arch.ends.norm_plus_one else "ones"}
    for kind in arch.kinds:
        for parameter in kind.block.parameters(arch):
            kinds |= {f"layers.{layer}.{parameter.name}": parameter.initial for layer in kind.layers}
    return kinds


def assert_local_shapes(plan: Plan, model: ModelParts, rank: Rank) -> None:
    """Check the shards of this rank against the plan, by name and local shape."""
    planned = local_shapes(plan, rank.rank)
    built = {name: tuple(local(p).shape) for name, p in model.named_parameters()}
    if built != planned:
        different = sorted(n for n in built.keys() | planned.keys() if built.get(n) != planned.get(n))
        shown = "; ".join(f"{n}: planned {planned.get(n)}, built {built.get(n)}" for n in different[:5])
        raise PlanMismatch(f"rank {rank.rank} differs from the plan: {shown}")


def initial_values(
    name: str, shape: tuple[int, ...], kind: Initial, std: float, seed: int, device: torch.device
) -> Tensor:
    """Return the whole initial parameter `name` in fp32."""
    if kind in ("ones", "zeros"):
        return torch.full(shape, float(kind == "ones"), device=device)
    if kind == "log_uniform":
        return torch.empty(shape, device=device).uniform_(0.01, 16, generator=generator_of(name, seed, device)).log_()
    if kind == "softplus":  # evenly by their logarithms, as in Mamba (arXiv 2312.00752, section 3.6)
        steps = torch.empty(shape, device=device).uniform_(-3, -1, generator=generator_of(name, seed, device))
        return (10**steps).expm1().log()
    return torch.empty(shape, device=device).normal_(0.0, std, generator=generator_of(name, seed, device))
