"""A world of ranks of which one is there: collectives return at once and change nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from ...planner.plan import Plan
from ..state import Rank


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
