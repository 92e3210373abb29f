"""`setup.weights`: initial values that depend on the seed and the parameter's name alone, not on the layout."""

import math
from collections.abc import Callable
from hashlib import blake2b

import torch
from torch import Tensor

from xtrain.planner.architecture import Architecture, Initial
from xtrain.planner.mesh.placement import local_shapes
from xtrain.planner.plan import Plan
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.models.quantise import store
from xtrain.runtime.models.tensors import fill
from xtrain.runtime.ops import PlanMismatch, op
from xtrain.runtime.parallel.tensor import local
from xtrain.runtime.state import Rank


@op("setup.weights")
@torch.no_grad()
def initialise(
    plan: Plan,
    model: ModelParts,
    rank: Rank,
    offload: bool,
    seed: int | None = None,
    init_std: float | None = None,
    anew: bool = False,
) -> None:
    """Give memory and values to every parameter: norms multiply by 1, biases are 0, matrices normal with `init_std`;
    buffers are zero. Those of an adapter get memory alone (`setup.adapter`).
    Without a seed parameters get memory alone: their values are read (`setup.read_weights`).

    offload: parameters live in host memory. anew: they have memory already.

    Each value is drawn in fp32 for the whole parameter and then cut, so every rank of every layout, and every number
    format, starts from the same model. Raises PlanMismatch if what this rank holds is not what the plan says.
    """
    device = torch.device("cpu") if offload else rank.device
    for part in () if anew else model.parts:
        part.to_empty(device=device)
    assert_local_shapes(plan, model, rank)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            # Where the work is done, wherever the parameters live.
            if anew:
                buffer.zero_()
            else:
                setattr(module, name, torch.zeros_like(buffer, device=rank.device))
    if seed is not None and init_std is not None:
        _draw(plan, model, rank, seed, init_std)


@op("setup.head")
@torch.no_grad()
def draw_head(plan: Plan, model: ModelParts, rank: Rank, seed: int, init_std: float) -> None:
    """Give a head of rewards its first values, where the rest of the model is read: those that `setup.weights` draws;
    a run that goes on reads its checkpoint afterwards."""
    name = f"{plan.architecture.head_module}.weight"
    draw = drawing(plan.architecture, seed, init_std, rank.device)
    for parameter in (parameter for own, parameter in model.named_parameters() if own == name):
        fill(parameter, draw(name, tuple(parameter.shape)))


def _draw(plan: Plan, model: ModelParts, rank: Rank, seed: int, init_std: float) -> None:
    others = {tensor.name for tensor in plan.parameters.tensors if tensor.adapter}
    draw = drawing(plan.architecture, seed, init_std, rank.device)
    quantised = {found.name: found for found in model.quantised()}
    for name, parameter in model.named_parameters():
        if name in others:
            continue
        if (found := quantised.get(name)) is not None:
            store(found, draw(name, found.matrix.shape))
        else:
            fill(parameter, draw(name, tuple(parameter.shape)))


def drawing(
    arch: Architecture, seed: int, init_std: float, device: torch.device
) -> Callable[[str, tuple[int, ...]], Tensor]:
    """What gives the first values of a parameter, by its name and whole shape, in fp32."""
    kinds = initials(arch)
    # What is added to the residual stream, 2 · layers times (GPT-2: scaled down by the root of that).
    residual_std = init_std / math.sqrt(2 * arch.blocks)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        kind = kinds.get(name, "normal")
        return initial_values(name, shape, kind, residual_std if kind == "residual" else init_std, seed, device)

    return draw


def initials(arch: Architecture) -> dict[str, Initial]:
    """What each parameter begins with; embedding and head, which are not in it, are normal."""
    found: dict[str, Initial] = {"norm.weight": "zeros" if arch.ends.norm_plus_one else "ones"}
    for kind in arch.kinds:
        for parameter in kind.block.parameters(arch):
            found |= {f"layers.{layer}.{parameter.name}": parameter.initial for layer in kind.layers}
    return found


def assert_local_shapes(plan: Plan, model: ModelParts, rank: Rank) -> None:
    """Hold the pieces of this rank against the plan, by name and local shape."""
    planned = local_shapes(plan, rank.rank)
    built = {name: tuple(local(p).shape) for name, p in model.named_parameters()}
    if built != planned:
        different = sorted(n for n in built.keys() | planned.keys() if built.get(n) != planned.get(n))
        shown = "; ".join(f"{n}: planned {planned.get(n)}, built {built.get(n)}" for n in different[:5])
        raise PlanMismatch(f"rank {rank.rank} does not hold what the plan says: {shown}")


def initial_values(
    name: str, shape: tuple[int, ...], kind: Initial, std: float, seed: int, device: torch.device
) -> Tensor:
    """The whole parameter `name` in fp32."""
    if kind in ("ones", "zeros"):
        return torch.full(shape, float(kind == "ones"), device=device)
    return torch.empty(shape, device=device).normal_(0.0, std, generator=generator_of(name, seed, device))


def generator_of(name: str, seed: int, device: torch.device) -> torch.Generator:
    """What the first values of a parameter are drawn from."""
    digest = blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    # The top bit stays clear: some generators take signed seeds.
    return torch.Generator(device).manual_seed(int.from_bytes(digest) >> 1)
