"""`setup.parallel.fsdp` and `root_fsdp`: FSDP2 over the shard axes, gradients summed, never averaged.

The loss is already divided by the valid tokens of the whole step, so reduce-scatter only adds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import Shard

from xtrain.runtime.models.build import DTYPES
from xtrain.runtime.models.moe import Experts
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.models.transformer import Transformer
from xtrain.runtime.ops import PlanMismatch, op
from xtrain.runtime.parallel.mesh import Meshes
from xtrain.runtime.parallel.rules import matching
from xtrain.runtime.state import Rank


def make_unit(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    compute: str,
    reduce: str,
    reshard: bool,
    offload: bool,
    dimension: int = 0,
) -> None:
    """Shard what no unit inside `module` has sharded, along `dimension` of every parameter, and have gradients added.

    offload: shards, their gradients and the optimizer state live in host memory.
    """
    with _codes_without_gradients():
        fully_shard(
            module,
            mesh=mesh,
            shard_placement_fn=lambda parameter: Shard(dimension),
            mp_policy=MixedPrecisionPolicy(param_dtype=DTYPES[compute], reduce_dtype=DTYPES[reduce]),
            reshard_after_forward=reshard,
            offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
            ignored_params=set() if isinstance(module, Experts) else whole_experts(module),
        )
    sum_gradients(module)


class _Modules:
    """Stands for `torch.nn` where FSDP makes parameters of pieces."""

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)

    def Parameter(self, data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad=requires_grad and data.is_floating_point())


@contextmanager
def _codes_without_gradients() -> Iterator[None]:
    """torch 2.11 makes every piece of a parameter one that has gradients before it asks whether it is to have any:
    codes, which are whole numbers, cannot have them."""
    module: Any = _fsdp_param
    module.nn = _Modules()
    try:
        yield
    finally:
        module.nn = nn


def whole_experts(module: nn.Module) -> set[nn.Parameter]:
    """Parameters of experts that expert FSDP does not shard: a rank owns them alone, no dense mesh has a part in it."""
    experts = [m for m in module.modules() if isinstance(m, Experts) and not isinstance(m, FSDPModule)]
    return {parameter for m in experts for parameter in m.parameters()}


def sum_gradients(module: nn.Module) -> None:
    """Make one FSDP module add gradients: neither setting reaches the modules below it (torch 2.11 to 2.13)."""
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


@op("setup.parallel.fsdp")
def shard_blocks(
    model: ModelParts,
    rank: Rank,
    meshes: Meshes,
    pattern: str,
    matches: list[int],
    compute: str,
    reduce: str,
    reshard: bool,
    offload: bool,
) -> None:
    """Make every module whose name fits `pattern` a unit of its own.

    Raises PlanMismatch unless as many do as the plan says.
    """
    for _, unit in matching(model, pattern, matches, rank):
        make_unit(unit, meshes.fsdp, compute=compute, reduce=reduce, reshard=reshard, offload=offload)


@op("setup.parallel.root_fsdp")
def shard_root(model: ModelParts, meshes: Meshes, compute: str, reduce: str, reshard: bool, offload: bool) -> None:
    """Shard what the blocks left of every part: embedding, last norm and head, as one unit."""
    for part in model.parts:
        make_unit(part, meshes.fsdp, compute=compute, reduce=reduce, reshard=reshard, offload=offload)
        _end_backward(part)


def _end_backward(part: Transformer) -> None:
    """Let the lowest unit that has a backward gather nothing early: FSDP would gather the unit before it, whose turn
    never comes where nothing is trained from there on."""
    if part.embed_tokens.weight.requires_grad if part.span.embeds else not part.begins_backward:
        return
    trained = (block for block in part.layers.values() if any(p.requires_grad for p in block.parameters()))
    lowest = next(trained, None)
    for module in [part] if lowest is None else lowest.modules():
        if isinstance(module, FSDPModule):
            module.set_modules_to_backward_prefetch([module])  # itself, which is there


@op("setup.parallel.prefetch")
def gather_early(model: ModelParts, rank: Rank, units: list[int]) -> None:
    """Let every unit ask for the parameters of the next one before it computes its forward.

    Without it the host asks when it comes to that unit, which is late where it has waited for the device before. units:
    how many there are on each pipeline coordinate; raises PlanMismatch for another number.
    """
    found = 0
    for part in model.parts:
        every = _in_order(part)
        found += len(every)
        for (one, again), (following, _) in pairwise(every):
            if not again:
                one.set_modules_to_forward_prefetch([following])
    if found != units[rank.coordinates["pp"]]:
        raise PlanMismatch(f"{found} units are gathered, and the plan says {units[rank.coordinates['pp']]}")


def _in_order(part: Transformer) -> list[tuple[FSDPModule, bool]]:
    """The units of a part as every forward comes to them, without modules that only training runs; and whether a
    backward calls them again, when the next unit's turn is over: experts of blocks that are recomputed."""
    found: list[tuple[nn.Module, bool]] = [(part, False)]
    for number, block in part.layers.items():
        if int(number) < part.arch.blocks:
            found.append((block, False))
            found += [(each, block.recompute is not None) for each in block.modules() if isinstance(each, Experts)]
    return [(each, again) for each, again in found if isinstance(each, FSDPModule)]


def reshard(model: ModelParts) -> None:
    """Free gathered parameters everywhere.

    After a forward without backward the root keeps them, and `parameters()` would name those instead of the shards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
