"""`trace_plan`: one optimizer step of the real program of a rank, without memory and without the other ranks.

Set-up builds and cuts the model as it does in a run, by the same ops; then the step's nodes run on tensors that have
shapes and storages but no values. What needs values is told what they would be: tokens are routed evenly, rows are
full of one document each. `setup.compile` is left out: what is seen is the program as it was written. Attention is one
kernel that keeps its inputs, its output and a logsumexp, as those of CUDA devices and of CPUs do. DDP's buckets are
those of its first step, which later ones order anew.
"""

import time
from collections.abc import Sequence

from ...planner.plan import Plan, Traced
from ..ops import load_ops
from .program import Program
from .shorten import shortened
from .world import fake_world


def trace_plan(plan: Plan, ranks: Sequence[int] | None = None) -> tuple[Traced, ...]:
    """Trace `ranks`, or the first rank of every pipeline coordinate.

    Raises RuntimeError if this process is part of a process group, PlanMismatch if plan and program differ.
    """
    load_ops()
    if ranks is None:
        size = plan.mesh.size("pp")
        ranks = range(0, plan.mesh.world_size, plan.mesh.world_size // size)
    return tuple(trace_rank(plan, rank) for rank in ranks)


def trace_rank(plan: Plan, number: int) -> Traced:
    """Trace one rank, in a world of which it is the only one that is there."""
    begin = time.perf_counter()
    short, left_out = shortened(plan)
    with fake_world(plan, number) as rank:
        program = Program(short, rank)
        program.set_up()
        program.step()
        memory = program.memory_owners.memory()
    pp = rank.coordinates["pp"]
    traffic = program.collectives.traffic(pp, left_out)
    return Traced(rank=number, pp=pp, memory=memory, traffic=traffic, seconds=time.perf_counter() - begin)
