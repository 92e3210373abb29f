"""Device meshes and process groups of a rank (`setup.mesh`), and errors that all ranks raise together."""

from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from math import prod
from typing import TypeVar

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh

from xtrain.plan.mesh import own_group
from xtrain.plan.plan import Mesh, Plan
from xtrain.runtime.base.errors import StorageFailed
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank

# Mesh axes over which FSDP cuts dense parameters, and experts.
SHARD, EXPERT_SHARD = "shard", "ep_fsdp"


@define(eq=False)
class Meshes:
    """Device meshes of a rank.

    dense: `pp · unfolded context axes · replicate · shard · tp`; axes of one rank are left out except shard, which
    combines fsdp and the context axes folded into it. experts: `pp · ep_replicate · ep_fsdp · ep`.
    """

    dense: DeviceMesh
    experts: DeviceMesh
    _groups: dict[str, ProcessGroup] = field(factory=dict)

    def has(self, axis: str) -> bool:
        """Return True if `group(axis)` has other ranks than this one."""
        return axis in self._groups

    def group(self, axis: str) -> ProcessGroup:
        """Return the group of this rank along `axis`; `row`: all ranks that hold positions of the same rows."""
        return self._groups[axis]

    @cached_property  # one object: DTensor compares different mesh objects rank by rank
    def fsdp(self) -> DeviceMesh:
        """Mesh that dense parameters are sharded over and, with HSDP, replicated over."""
        return _some(self.dense, ("replicate", SHARD))

    @cached_property
    def expert_fsdp(self) -> DeviceMesh:
        return _some(self.experts, ("ep_replicate", EXPERT_SHARD))


@op("setup.mesh", gives="meshes")
def build_meshes(plan: Plan, rank: Rank, axes: list, expert_axes: list, shard_axes: list[str]) -> Meshes:
    """Create every process group of this rank that the plan needs. Collective: each group waits for its ranks."""
    if not dist.is_initialized():
        # FSDP needs a process group even for one rank (where it only does mixed precision).
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
    """Build the dense mesh; ranks are permuted, as shard axes need not be adjacent (`fold = ulysses_only` skips
    ring)."""
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
    return _mesh(extents, torch.arange(mesh.world_size), EXPERT_SHARD, rank)


def _mesh(extents: dict[str, int], ranks: torch.Tensor, always: str, rank: Rank) -> DeviceMesh:
    axes = {name: size for name, size in extents.items() if size > 1 or name == always}
    grid = ranks.view(*axes.values())
    place = (grid == rank.rank).nonzero()[0].tolist()
    axis_groups = []
    for dim, name in enumerate(axes):
        along = tuple(slice(None) if other == dim else at for other, at in enumerate(place))
        axis_groups.append(_group(grid[along].tolist(), f"mesh_{name}"))
    if len(axis_groups) == 1:
        return DeviceMesh.from_group(axis_groups[0], rank.device.type, mesh_dim_names=tuple(axes))
    return DeviceMesh.from_group(axis_groups, rank.device.type, mesh=grid, mesh_dim_names=tuple(axes))


def _group(ranks: list[int], name: str) -> ProcessGroup:
    """Create a group of these ranks, which include this one; the group of all ranks exists already.

    All ranks must create the same groups in the same order: torch names a group by its ranks and by the number of
    groups before it.
    """
    if len(ranks) == dist.get_world_size():
        group = dist.group.WORLD
    else:
        group = dist.new_group(ranks, use_local_synchronization=True, group_desc=name)
    assert isinstance(group, ProcessGroup)
    return group


def _some(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    present = tuple(name for name in names if name in (mesh.mesh_dim_names or ()))
    return mesh[present] if present != mesh.mesh_dim_names else mesh


T = TypeVar("T")
# The slowest rank may write for this long while the others wait.
TIMEOUT = timedelta(hours=2)


@frozen(eq=False)
class CollectiveErrors:
    """Errors that all ranks of a run raise together, over a group of their own: messages of threads and steps never
    mix."""

    rank: int
    size: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, rank: Rank) -> "CollectiveErrors":
        """Create the group. Collective."""
        if rank.world_size == 1:
            return cls(rank.rank, 1, None)
        group = dist.new_group(backend="gloo", timeout=TIMEOUT, group_desc="saving")
        assert isinstance(group, dist.ProcessGroup)
        return cls(rank.rank, rank.world_size, group)

    def all(self, action: Callable[[], T]) -> list[T]:
        """Call `action` on every rank and return the results by rank. Raises StorageFailed on all ranks if it failed on
        any."""
        outcomes = [_tried(action)]
        if self.group is not None:
            own, outcomes = outcomes[0], [("", None)] * self.size
            dist.all_gather_object(outcomes, own, group=self.group)
        errors = dict.fromkeys(error for error, _ in outcomes if error)  # the same error of many ranks is reported once
        if errors:
            raise StorageFailed("; ".join(errors))
        return [result for _, result in outcomes]  # type: ignore[misc]

    def first(self, action: Callable[[], T]) -> T:
        """Call `action` on the first rank and return its result on all. Raises StorageFailed on all ranks if it
        failed."""
        outcome: list[tuple[str, T | None]] = [_tried(action) if self.rank == 0 else ("", None)]
        if self.group is not None:
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        error, result = outcome[0]
        if error:
            raise StorageFailed(error)
        return result  # type: ignore[return-value]


def _tried(action: Callable[[], T]) -> tuple[str, T | None]:
    """Return (why it failed, its result). Catches only errors from outside: disks, and content read from them."""
    try:
        return "", action()
    except OSError as error:
        return reason(error), None
    except CheckpointException as error:
        if not all(isinstance(failure, OSError) for failure, _ in error.failures.values()):
            raise  # on all ranks, as they have exchanged the error
        return "; ".join(dict.fromkeys(reason(failure) for failure, _ in error.failures.values())), None


def reason(error: BaseException) -> str:
    """Return a file error in a few words, with the file if it is known."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
