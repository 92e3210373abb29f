"""`trace_plan`: one optimizer step of the real program of a rank, without memory and without the other ranks.

Set-up builds and cuts the model as it does in a run, by the same ops; then the step's nodes run on tensors that have
shapes and storages but no values. What needs values is told what they would be: tokens are routed evenly, rows are
full of one document each. `setup.compile` is left out: what is seen is the program as it was written. Attention is one
kernel that keeps its inputs, its output and a logsumexp, as those of CUDA devices and of CPUs do. DDP's buckets are
those of its first step, which later ones order anew.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from attrs import evolve
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from xtrain.planner.graph.replica_groups import groups_node
from xtrain.planner.plan import Memory, Plan, Traced, Traffic
from xtrain.runtime.ops import PlanMismatch, load_ops
from xtrain.runtime.state import Rank
from xtrain.runtime.tracing.program import Program
from xtrain.runtime.tracing.repeats import ENOUGH, NotAlike, Shared


def trace_plan(
    plan: Plan, ranks: Sequence[int] | None = None, told: Callable[[int, int], object] = lambda number, count: None
) -> tuple[Traced, ...]:
    """Trace `ranks`, or the first rank of every pipeline coordinate. told: is called before each, the first being 1.

    Raises RuntimeError if this process is part of a process group, PlanMismatch if plan and program differ.
    """
    if groups_node(plan) is not None:
        raise PlanMismatch("replica groups are of real ranks alone; a trace shows what stack parallel does")
    load_ops()
    if ranks is None:
        size = plan.mesh.size("pp")
        ranks = range(0, plan.mesh.world_size, plan.mesh.world_size // size)
    shared, found = Shared(), []
    for number, rank in enumerate(ranks, start=1):
        told(number, len(ranks))
        found.append(trace_rank(plan, rank, shared))
    return tuple(found)


def trace_rank(plan: Plan, number: int, shared: Shared | None = None) -> Traced:
    """Trace one rank, in a world of which it is the only one that is there. shared: what ranks know of each other.

    Of a pipeline no more microbatches are run than have to be, unless they turn out to differ.
    """
    begin = time.perf_counter()
    for known, repeats in ((shared, True), (None, True), (None, False)):
        try:
            with _quiet_schedules():
                memory, traffic = _step(plan, number, known, repeats)
        except NotAlike:
            continue
        except RuntimeError as error:  # as torch tells of what a forward raises
            if not isinstance(error.__cause__, NotAlike):
                raise
            continue
        pp = plan.mesh.coordinates(number)["pp"]
        return Traced(rank=number, pp=pp, memory=memory, traffic=traffic, seconds=time.perf_counter() - begin)
    raise AssertionError("where nothing is repeated nothing has to be alike")


@contextmanager
def _quiet_schedules() -> Iterator[None]:
    """Without the hundreds of lines that torch logs about a schedule in which something is raised."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def _step(plan: Plan, number: int, shared: Shared | None, repeats: bool) -> tuple[Memory, tuple[Traffic, ...]]:
    short, left_out = shortened(plan)
    with fake_world(plan, number) as rank:
        program = Program(short, rank)
        program.set_up()
        program.step(shared, repeats=repeats)
        return program.memory_owners.memory(), program.collectives.traffic(rank.coordinates["pp"], left_out)


# fewer microbatches --------------------------------------------------------------------------------------------------


def shortened(plan: Plan) -> tuple[Plan, int]:
    """The plan with at most ENOUGH microbatches in a step, and how many of those between were left out.

    Without a pipeline one follows the other, and between the first and the last each finds what the one before it
    found. A pipeline runs all of them.
    """
    count = plan.node("setup.loader").args["accumulate"]
    if plan.mesh.size("pp") > 1 or count <= ENOUGH:
        return plan, 0
    nodes = [evolve(n, args={**n.args, "accumulate": ENOUGH}) if "accumulate" in n.args else n for n in plan.nodes]
    return evolve(plan, nodes=tuple(nodes)), count - ENOUGH


# one rank of a world -------------------------------------------------------------------------------------------------


@contextmanager
def fake_world(plan: Plan, rank: int) -> Iterator[Rank]:
    """This process as rank `rank` of the plan. Raises RuntimeError if it is part of a process group already."""
    if dist.is_initialized():
        raise RuntimeError("a trace needs a process that is not part of a process group")
    mesh = plan.mesh
    dist.init_process_group("fake", rank=rank, world_size=mesh.world_size, store=FakeStore())
    try:
        yield Rank(
            rank=rank,
            local_rank=rank % mesh.ranks_per_node,
            world_size=mesh.world_size,
            data_rank=mesh.data_rank(rank),
            data_ranks=mesh.data_ranks,
            device=torch.device("cpu"),
            pipeline_ranks=mesh.size("pp"),
            coordinates=mesh.coordinates(rank),
        )
    finally:
        dist.destroy_process_group()
        # What DTensor remembers speaks of groups that are gone, by names that the next world uses again.
        _clear_sharding_prop_cache()
