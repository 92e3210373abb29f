"""`tick.row_losses` and `step.row_losses`: the cross-entropy of each row of a step, summed over all ranks."""

from math import isfinite
from typing import Final

import torch
import torch.distributed as dist

from xtrain.plan.plan import Plan
from xtrain.records.training_events import RowLossesEvent
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.loop.node_calls import DueTicks
from xtrain.runtime.nn.batch import Step, StepCall
from xtrain.runtime.nn.loss import IGNORE
from xtrain.runtime.observe.records import Records

# Key of the sums for the tick.
TAKEN: Final = "tick.row_losses"


@op("step.row_losses")
def sum_rows(plan: Plan, feed: Feed, rank: Rank, due_ticks: DueTicks | None = None) -> StepCall:
    """Sum the cross-entropy of each row, if a tick writes it after this step. Collective."""
    nodes = [node.id for node in plan.nodes if node.op == TAKEN]

    @torch.no_grad()
    def sum_losses(step: Step) -> None:
        if due_ticks is not None and not due_ticks.will_run(nodes):
            return
        curriculum = feed.loader.curriculum
        first, count = curriculum.rows_before(step.index), curriculum.rows_per_step.at(step.index)
        sums_2R = torch.zeros(2, count, dtype=torch.float64, device=rank.device)
        for batch in step.batches if rank.is_tp_first else ():
            if batch.losses_BS is None or batch.labels_BS is None or batch.place_B is None:
                continue  # another stage of the pipeline has the head
            place_B = batch.place_B.to(rank.device) - first
            sums_2R[0].index_add_(0, place_B, batch.losses_BS.sum(1, dtype=torch.float64))
            sums_2R[1].index_add_(0, place_B, (batch.labels_BS != IGNORE).sum(1, dtype=torch.float64))
        if rank.world_size > 1:
            dist.all_reduce(sums_2R)
        losses, tokens = sums_2R.tolist()
        step.taken[TAKEN] = RowLossesEvent(
            step=step.index + 1,
            place=first,
            losses=[loss if isfinite(loss) else None for loss in losses],
            tokens=[int(number) for number in tokens],
        )

    return sum_losses


@op("tick.row_losses")
def write_rows(records: Records) -> StepCall:
    """Write the losses of the rows of the step; nothing before the first trained step of a start."""

    def write(step: Step) -> None:
        if TAKEN in step.taken:
            records.event(step.taken[TAKEN])

    return write
