"""`setup.observe` and `tick.log`: the numbers of a run, reduced over ranks before they are written."""

import resource
import sys
import time
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field

from ...planner.plan import Plan
from ..build import compute_format
from ..feed import Feed
from ..models.parts import Parts
from ..ops import op
from ..router_step import RouterMetrics
from ..state import Progress, Rank, Step
from .dataset_losses import DatasetLosses
from .devices import peak_flops
from .records import Records


@define
class Window:
    """The steps since the last log line."""

    losses: DatasetLosses
    steps: int = 0
    seconds: float = 0.0
    data_seconds: float = 0.0
    node_seconds: dict[str, float] = field(factory=dict)

    def add(self, step: Step, now: float) -> None:
        self.steps += 1
        self.seconds += now - step.began
        self.data_seconds += step.data_seconds
        self.losses.add(step.row_losses)

    def clear(self) -> None:
        self.steps, self.seconds, self.data_seconds = 0, 0.0, 0.0
        for node in self.node_seconds:
            self.node_seconds[node] = 0.0
        self.losses.clear()


@op("setup.observe", gives="window")
def observe(plan: Plan, rank: Rank) -> Window:
    """Start counting."""
    return Window(losses=DatasetLosses(plan.node("setup.loader").args["datasets"], rank))


@op("tick.log")
def log(plan: Plan, model: Parts, feed: Feed, rank: Rank, records: Records, progress: Progress, window: Window):
    """Write one record: loss, gradient norm and learning rate of the step; times are those of the slowest rank,
    averaged over the steps since the last record, and so are the losses of the datasets of a mixture."""
    tokens_per_step = plan.estimates.tokens_per_step
    peak = peak_flops(rank.device, compute_format(plan))
    routers = RouterMetrics.of(plan, model, rank)

    def run(step: Step) -> None:
        steps = max(1, window.steps)
        own = [window.seconds / steps, window.data_seconds / steps, float(memory_bytes(rank.device))]
        slowest = torch.tensor(own, dtype=torch.float64, device=rank.device)
        if rank.world_size > 1:
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        seconds, data_seconds, memory = slowest.tolist()
        now = time.time()
        rate = tokens_per_step / seconds if seconds else 0.0
        record: dict[str, Any] = {"step": progress.step, "time": now}
        if isfinite(step.loss) and isfinite(step.grad_norm):  # a step that nothing was learned from has none of these
            record |= {"loss": step.loss, "grad_norm": step.grad_norm, "lr": step.lr}
        record |= {
            "tokens": progress.tokens,
            "tokens_per_second": rate,
            "step_seconds": seconds,
            "data_seconds": data_seconds,
            "memory_bytes": int(memory),
            "phase": feed.phase(step.index).name,
        }
        if peak is not None:
            record["mfu"] = rate * plan.estimates.flops_per_token / (peak * rank.world_size)
        rows = {f"rows/{name}": count for name, count in feed.rows_taken(progress.step).items()}
        records.metric(record | window.losses.take() | rows | routers.take(steps))
        nodes = {node: round(total / steps, 6) for node, total in window.node_seconds.items()}
        records.own.write({"step": progress.step, "time": now, "memory_bytes": int(own[2]), "node_seconds": nodes})
        window.clear()

    return run


def memory_bytes(device: torch.device) -> int:
    """Peak bytes this rank has held: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
