"""`setup.observe`: the numbers of a run since the last of them were written."""

import torch
import torch.distributed as dist
from attrs import define, field

from xtrain.planner.mesh.hardware_specs import FP8, FP8_SPEED, product_format
from xtrain.planner.plan import Plan
from xtrain.runtime.models.build import compute_format
from xtrain.runtime.monitoring.devices import peak_flops as peak_of_device
from xtrain.runtime.monitoring.rates import CountedWork, Rates
from xtrain.runtime.monitoring.waits import WAITS
from xtrain.runtime.ops import op
from xtrain.runtime.state import Rank
from xtrain.runtime.step_state import Step
from xtrain.runtime.training.dataset_losses import DatasetLosses


@define
class Window:
    """The steps since the last log line. timed: those of them that times are of, which are all but the first one of a
    start, and what `counted` is of. comm_seconds: that this rank waited for others; 0 where nobody measures."""

    losses: DatasetLosses
    rates: Rates
    sequence: int
    steps: int = 0
    rows: int = 0
    valid_tokens: int = 0
    timed: int = 0
    seconds: float = 0.0
    data_seconds: float = 0.0
    comm_seconds: float = 0.0
    counted: CountedWork = field(factory=CountedWork)
    node_seconds: dict[str, float] = field(factory=dict)
    logged: int | None = None
    """The step that was logged last; None where none was since the run began, or went back."""

    def add(self, step: Step, now: float) -> None:
        self.steps += 1
        self.rows += step.rows
        self.valid_tokens += step.valid_tokens
        self.losses.add(step.row_losses)
        if step.warms_up:
            return
        self.timed += 1
        self.seconds += now - step.began
        self.data_seconds += step.data_seconds
        self.comm_seconds += WAITS.seconds - step.waited
        self.counted.add(step.valid_tokens, step.rows * self.sequence, step.documents)

    def clear(self) -> None:
        self.steps = self.rows = self.valid_tokens = self.timed = 0
        self.seconds = self.data_seconds = self.comm_seconds = 0.0
        self.counted = CountedWork()
        for node in self.node_seconds:
            self.node_seconds[node] = 0.0
        self.losses.clear()
        self.logged = None


@op("setup.observe", gives="window")
def observe(plan: Plan, rank: Rank, peak_flops: float | None) -> Window:
    """Start counting. peak_flops: what a device can do, if the spec says so; else its data sheet does. Collective."""
    WAITS.begin(plan, rank)
    fp8 = None
    if peak_flops is None:
        product = product_format(compute_format(plan), plan.node("setup.bootstrap").args["matmul"])
        peak_flops = peak_of_device(rank.device, product)
        fp8 = peak_of_device(rank.device, FP8)
    else:
        fp8 = FP8_SPEED * peak_flops
    in_fp8 = plan.estimates.work.position_fp8 > 0
    return Window(
        losses=DatasetLosses(plan.node("setup.loader").args["datasets"], rank),
        rates=Rates(
            work=plan.estimates.work,
            devices=rank.world_size * rank.replicas,
            peak=_of_all(peak_flops, rank),
            fp8_peak=_of_all(fp8, rank) if in_fp8 else None,
        ),
        sequence=plan.node("setup.loader").args["sequence"],
    )


def _of_all(peak: float | None, rank: Rank) -> float | None:
    """The sum over the devices of all ranks, which need not be alike; None unless each is known. Collective."""
    if rank.world_size == 1:
        return None if peak is None else peak * rank.replicas
    sums = torch.tensor([peak or 0.0, float(peak is None)], dtype=torch.float64, device=rank.device)
    dist.all_reduce(sums)
    whole, unknown = sums.tolist()
    return None if unknown else whole * rank.replicas
