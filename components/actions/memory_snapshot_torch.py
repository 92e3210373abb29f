"""`tick.memory_snapshot`: a snapshot of a rank's memory."""

from torch.optim import Optimizer

from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.inspect.memory_snapshot import Snapshot
from xtrain.runtime.loop.commands import UnderWay
from xtrain.runtime.loop.memory_report import planned_of
from xtrain.runtime.nn.averages import WeightAverages
from xtrain.runtime.nn.batch import Step, StepCall
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import Records


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
