"""`tick.health`: a small timed all-reduce. Reports the last rank and the time of a reduction."""

import time

import torch
import torch.distributed as dist

from xtrain.records.training_events import HealthEvent
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.nn.batch import Step, StepCall
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import Records


@op("tick.health")
def probe(
    rank: Rank, records: Records, progress: Progress, beat: HeartbeatWriter, node_id: str, limit_seconds: float
) -> StepCall:
    """Reduce twice over all ranks. The rank that waits least in the first reduction came last; the second measures the
    network. Only durations are compared, because clocks of machines differ. `setup.watch` reports a rank that
    exceeds the limit as stuck."""

    def run(step: Step) -> None:
        beat.limit = limit_seconds
        waited = [_seconds_of_sum(rank), _seconds_of_sum(rank)]
        found = torch.tensor(waited, dtype=torch.float64, device=rank.device)
        everyone = [torch.empty_like(found) for _ in range(rank.world_size)]
        if rank.world_size > 1:
            dist.all_gather(everyone, found)
        else:
            everyone = [found]
        beat.limit = None
        firsts, seconds = torch.stack(everyone).T.tolist()
        slowest = min(range(rank.world_size), key=firsts.__getitem__)
        late = max(firsts) - firsts[slowest]
        most = max(seconds)
        records.event(HealthEvent(step=progress.step, node=node_id, seconds=most, slowest=slowest, late_seconds=late))

    return run


def _seconds_of_sum(rank: Rank) -> float:
    """Return the time in seconds that this rank spends in an all-reduce."""
    begin = time.perf_counter()
    ones = torch.ones(1, dtype=torch.float64, device=rank.device)
    if rank.world_size > 1:
        dist.all_reduce(ones)
    if ones.item() != rank.world_size:
        raise RuntimeError(f"a sum of ones over {rank.world_size} ranks gives {ones.item():g}")
    return time.perf_counter() - begin
