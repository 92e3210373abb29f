"""`setup.parallel.fsdp` and `root_fsdp`: FSDP2 over the data ranks, gradients summed, never averaged.

The loss is already divided by the valid tokens of the whole step, so reduce-scatter only adds.
"""

from fnmatch import fnmatch

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ..build import DTYPES
from ..ops import PlanMismatch, op
from ..state import Rank


def data_mesh(rank: Rank, replicate: int, fsdp: int) -> DeviceMesh:
    """The data ranks as one axis, or as two where the sharded model is replicated (HSDP)."""
    if rank.world_size == 1:
        _alone(rank)
    if replicate > 1:
        return init_device_mesh(rank.device.type, (replicate, fsdp), mesh_dim_names=("replicate", "fsdp"))
    return init_device_mesh(rank.device.type, (fsdp,), mesh_dim_names=("fsdp",))


def _alone(rank: Rank) -> None:
    # FSDP wants a process group even for one rank (it is there then for its mixed precision only).
    if not dist.is_initialized():
        backend = "nccl" if rank.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def policy(compute: str, reduce: str) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=DTYPES[compute], reduce_dtype=DTYPES[reduce])


def sum_gradients(module: nn.Module) -> None:
    """Make one FSDP module add gradients: neither setting reaches the modules below it (torch 2.11 to 2.13)."""
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


@op("setup.parallel.fsdp", gives="fsdp_mesh")
def shard_blocks(
    model: nn.Module,
    rank: Rank,
    pattern: str,
    matches: int,
    compute: str,
    reduce: str,
    reshard: bool,
    replicate: int,
    fsdp: int,
) -> DeviceMesh:
    """Make every module whose name fits `pattern` a unit of its own.

    Raises PlanMismatch unless exactly `matches` modules do.
    """
    depth = pattern.count(".")
    units = [m for name, m in model.named_modules() if name.count(".") == depth and fnmatch(name, pattern)]
    if len(units) != matches:
        raise PlanMismatch(f"`{pattern}` fits {len(units)} modules of the model, and the plan says {matches}")
    mesh = data_mesh(rank, replicate, fsdp)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy(compute, reduce), reshard_after_forward=reshard)
        sum_gradients(unit)
    return mesh


@op("setup.parallel.root_fsdp", gives="model")
def shard_root(model: nn.Module, fsdp_mesh: DeviceMesh, compute: str, reduce: str) -> nn.Module:
    """Shard what the blocks left: embedding, last norm and head, as one unit."""
    fully_shard(model, mesh=fsdp_mesh, mp_policy=policy(compute, reduce))
    sum_gradients(model)
    return model


def reshard(model: nn.Module) -> None:
    """Free gathered parameters everywhere.

    After a forward without backward the root keeps them, and `parameters()` would name those instead of the shards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def sync_gradients(model: nn.Module, on: bool) -> None:
    """Reduce gradients in the coming backward, or only add them up on this rank."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)
