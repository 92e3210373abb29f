"""What each rank owns: the exact local shape of every parameter, from the plan alone.

The runtime holds the model it has built and cut against this, so plan and code cannot drift apart. The estimates of a
plan are those of the first rank of every pipeline coordinate, which has the largest piece of everything.
"""

from math import prod
from typing import Any

from xtrain.dsl.schema.bases import Base, base_of
from xtrain.planner.architecture import ParameterSpec
from xtrain.planner.mesh.sharding import CutPlace, Cuts
from xtrain.planner.mesh.stages import Pipeline, by_coordinate
from xtrain.planner.plan import Mesh, Plan


def local_shapes(plan: Plan, rank: int) -> dict[str, tuple[int, ...]]:
    """Name → local shape of every parameter of a rank, in the order of the inventory.

    A piece may have no rows. A tied head on the last stage is there as `embed_tokens.weight`. Raises IndexError for a
    rank outside the world.
    """
    if not 0 <= rank < plan.mesh.world_size:
        raise IndexError(f"rank {rank} of {plan.mesh.world_size}")
    cuts, place = _cuts(plan), _place(plan, rank)
    return {tensor.name: cuts.shape(tensor, place) for tensor in _owned(plan, rank)}


def _owned(plan: Plan, rank: int) -> list[ParameterSpec]:
    """The parameters whose stage lies on a rank, whole."""
    args = plan.node("setup.build_model").args
    pipeline = Pipeline(
        spans=tuple((first, last) for first, last in args["stages"]), owners=tuple(map(tuple, args["owners"]))
    )
    found = by_coordinate(plan.parameters.tensors, plan.architecture, pipeline)
    return found[plan.mesh.coordinates(rank)["pp"]]


def _cuts(plan: Plan) -> Cuts:
    """The cuts that the nodes of a plan make; what has no node is not cut."""
    tensor = _args(plan, "setup.parallel.tp")
    experts = _args(plan, "setup.parallel.expert_fsdp")
    sharded = bool(_args(plan, "setup.parallel.fsdp"))
    return Cuts(
        tp=tensor.get("size", 1),
        fsdp=prod(plan.mesh.size(axis) for axis in _shard_axes(plan)) if sharded else 1,
        ep=_args(plan, "setup.parallel.ep").get("size", 1),
        ep_fsdp=_expert_size(plan.mesh, "ep_fsdp") if experts else 1,
        expert_dimension=experts.get("dimension", 0),
        rules=tuple((rule["pattern"], rule["style"]) for rule in tensor.get("rules", ())),
        base=base_of_plan(plan),
    )


def base_of_plan(plan: Plan) -> Base | None:
    """How quantised parameters are stored; None where there are none."""
    args = _args(plan, "setup.quantise")
    return base_of(args["base"]) if args else None


def _place(plan: Plan, rank: int) -> CutPlace:
    """Where a rank stands along the cuts; over several shard axes it counts from the outer to the inner one."""
    coordinates = plan.mesh.coordinates(rank)
    shard = 0
    for axis in _shard_axes(plan):
        shard = shard * plan.mesh.size(axis) + coordinates[axis]
    expert = {axis.name: rank // axis.stride % axis.size for axis in plan.mesh.expert_axes}
    return CutPlace(tp=coordinates["tp"], shard=shard, ep=expert["ep"], ep_fsdp=expert["ep_fsdp"])


def _shard_axes(plan: Plan) -> list[str]:
    return plan.node("setup.mesh").args["shard_axes"]


def _expert_size(mesh: Mesh, name: str) -> int:
    return next(axis.size for axis in mesh.expert_axes if axis.name == name)


def _args(plan: Plan, node: str) -> dict[str, Any]:
    """The arguments of a node, none if the plan does not have it."""
    return next((n.args for n in plan.nodes if n.id == node), {})
