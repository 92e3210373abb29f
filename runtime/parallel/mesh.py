"""`setup.mesh`: the ranks as torch sees them: device meshes of dense parameters and of experts, groups of axes.

A rank makes its own groups alone, which takes as long on 16 ranks as on 100,000: torch's `init_device_mesh` goes
through the groups of all others.
"""

from functools import cached_property
from math import prod

import torch
import torch.distributed as dist
from attrs import define, field
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from xtrain.planner.mesh.mesh import own_group
from xtrain.planner.plan import Mesh, Plan
from xtrain.runtime.ops import op
from xtrain.runtime.state import Rank

SHARD = "shard"


@define(eq=False)
class Meshes:
    """dense: the ranks as `pp · unfolded context axes · replicate · shard · tp`, axes of one rank left out but shard,
    which stands for fsdp and the context axes folded into it. experts: `pp · ep_replicate · ep_fsdp · ep`."""

    dense: DeviceMesh
    experts: DeviceMesh
    _groups: dict[str, ProcessGroup] = field(factory=dict)

    def has(self, axis: str) -> bool:
        """Whether `group(axis)` has more ranks than this one."""
        return axis in self._groups

    def group(self, axis: str) -> ProcessGroup:
        """The group of this rank along `axis`; `row`: all ranks that hold positions of the same rows."""
        return self._groups[axis]

    @cached_property  # one object: where meshes are not the same, DTensor compares their ranks, one by one
    def fsdp(self) -> DeviceMesh:
        """What dense parameters are sharded over, and where the sharded model is replicated (HSDP) that too."""
        return _some(self.dense, ("replicate", SHARD))

    @cached_property
    def expert_fsdp(self) -> DeviceMesh:
        return _some(self.experts, ("ep_replicate", "ep_fsdp"))


@op("setup.mesh", gives="meshes")
def build_meshes(plan: Plan, rank: Rank, axes: list, expert_axes: list, shard_axes: list[str]) -> Meshes:
    """Make every process group of this rank that the plan needs. Collective: its groups wait for their ranks."""
    if not dist.is_initialized():
        # FSDP wants a process group even for one rank (it is there then for its mixed precision only).
        backend = "nccl" if rank.device.type == "cuda" else "gloo"
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    mesh = plan.mesh
    assert [[a.name, a.size] for a in mesh.axes] == axes
    assert [[a.name, a.size] for a in mesh.expert_axes] == expert_axes
    meshes = Meshes(dense=_dense(mesh, shard_axes, rank), experts=_experts(mesh, rank))
    wide = [name for name, size in axes if size > 1]
    for name in wide:
        in_mesh = name in (meshes.dense.mesh_dim_names or ())
        own = own_group(mesh, name, rank.rank)
        meshes._groups[name] = meshes.dense.get_group(name) if in_mesh else _group(own, name)
    if (size := mesh.size("ring") * mesh.size("ulysses") * mesh.size("tp")) > 1:
        first = rank.rank // size * size
        meshes._groups["row"] = _group(list(range(first, first + size)), "row")
    if dict(expert_axes)["ep"] > 1:
        meshes._groups["ep"] = meshes.experts.get_group("ep")
    return meshes


def _dense(mesh: Mesh, shard_axes: list[str], rank: Rank) -> DeviceMesh:
    """Shard axes need not be neighbours in rank numbers (`fold = ulysses_only` steps over ring): ranks are permuted."""
    names = [axis.name for axis in mesh.axes]
    sizes = {axis.name: axis.size for axis in mesh.axes}
    unfolded = [name for name in ("ring", "ulysses") if name not in shard_axes]
    order = ["pp", *unfolded, "replicate", *shard_axes, "tp"]
    ranks = torch.arange(mesh.world_size).view([sizes[name] for name in names]).permute(*map(names.index, order))
    extents = {"pp": sizes["pp"], **{name: sizes[name] for name in unfolded}, "replicate": sizes["replicate"]}
    extents |= {SHARD: prod(sizes[name] for name in shard_axes), "tp": sizes["tp"]}
    return _mesh(extents, ranks.reshape(-1), SHARD, rank)


def _experts(mesh: Mesh, rank: Rank) -> DeviceMesh:
    extents = {axis.name: axis.size for axis in mesh.expert_axes}
    return _mesh(extents, torch.arange(mesh.world_size), "ep_fsdp", rank)


def _mesh(extents: dict[str, int], ranks: torch.Tensor, always: str, rank: Rank) -> DeviceMesh:
    axes = {name: size for name, size in extents.items() if size > 1 or name == always}
    grid = ranks.view(*axes.values())
    place = (grid == rank.rank).nonzero()[0].tolist()
    found = []
    for dim, name in enumerate(axes):
        along = tuple(slice(None) if other == dim else at for other, at in enumerate(place))
        found.append(_group(grid[along].tolist(), f"mesh_{name}"))
    if len(found) == 1:
        return DeviceMesh.from_group(found[0], rank.device.type, mesh_dim_names=tuple(axes))
    return DeviceMesh.from_group(found, rank.device.type, mesh=grid, mesh_dim_names=tuple(axes))


def _group(ranks: list[int], name: str) -> ProcessGroup:
    """Of these, this rank among them; that of all ranks is there already. All of them make the same groups in the same
    order: torch names a group by its ranks and by how many there are."""
    if len(ranks) == dist.get_world_size():
        group = dist.group.WORLD
    else:
        group = dist.new_group(ranks, use_local_synchronization=True, group_desc=name)
    assert isinstance(group, ProcessGroup)
    return group


def _some(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    present = tuple(name for name in names if name in (mesh.mesh_dim_names or ()))
    return mesh[present] if present != mesh.mesh_dim_names else mesh
