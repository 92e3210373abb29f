"""`tick.memory_snapshot`: a snapshot of a rank's memory."""

from torch.optim import Optimizer

from xtrain.planner.plan import Plan
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.monitoring.heartbeat import HeartbeatWriter
from xtrain.runtime.ops import op
from xtrain.runtime.profiling.found import planned_of
from xtrain.runtime.profiling.snapshot import Snapshot
from xtrain.runtime.profiling.under_way import UnderWay
from xtrain.runtime.reporting.records import Records
from xtrain.runtime.state import Progress, Rank
from xtrain.runtime.step_state import Step, StepCall
from xtrain.runtime.training.ema import WeightAverages


@op("tick.memory_snapshot")
def memory_snapshot(
    node_id: str,
    plan: Plan,
    model: ModelParts,
    optimizer: Optimizer,
    rank: Rank,
    records: Records,
    progress: Progress,
    under_way: UnderWay,
    history: int,
    ranks: list[int] | None = None,
    ema: WeightAverages | None = None,
    beat: HeartbeatWriter | None = None,
) -> StepCall:
    """Take a memory snapshot at once or after `history` more steps, unless another snapshot is in progress."""
    planned = planned_of(plan, rank)

    def run(step: Step) -> None:
        if under_way.has("memory_snapshot"):
            message = f"{node_id}: another memory snapshot is being recorded, and this one is skipped"
            records.warn(message, step=progress.step)
            return
        snapshot = Snapshot(
            node=node_id,
            ranks=ranks,
            history=history,
            model=model,
            optimizer=optimizer,
            ema=ema,
            planned=planned,
            rank=rank,
            records=records,
            progress=progress,
            beat=beat,
        )
        if snapshot.begin():
            under_way.begin(snapshot)

    return run
