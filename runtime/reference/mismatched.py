"""`step.reference_point`: how much likelier the model makes answers than its reference, behind prompts of others."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from attrs import define, evolve, frozen

from xtrain.dsl.schema.losses import MISMATCHED, REF
from xtrain.runtime.data.collate.batch import Microbatch
from xtrain.runtime.data.collate.collators import CollateChain
from xtrain.runtime.data.collate.samples import IGNORE_INDEX
from xtrain.runtime.data.packing.row_reader import RawRow, mismatched
from xtrain.runtime.data.packing.rows import Rows
from xtrain.runtime.input.feed import Feed
from xtrain.runtime.models.batch import ModelBatch
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.monitoring.heartbeat import HeartbeatWriter
from xtrain.runtime.ops import op
from xtrain.runtime.parallelize.fsdp import reshard
from xtrain.runtime.parallelize.pipeline import PipelineSchedule, forwarded
from xtrain.runtime.state import Rank
from xtrain.runtime.step_state import Step, StepCall


@define(kw_only=True, eq=False)
class ReferencePoint:
    """What a loss compares log-ratios with. estimated: anew for each step, and for each evaluation."""

    value: float
    estimated: bool


def exchanged_rows(raw: Iterable[list[RawRow]], rows: Rows, collate: CollateChain) -> Iterator[Microbatch]:
    """Microbatches of the same rows with the answers of other documents, and with what the reference gives these."""
    for microbatch in raw:
        found = (mismatched(row, rows) for row in microbatch)
        yield collate([evolve(row, columns=_of_reference(row)) for row in found])


def _of_reference(row: RawRow) -> dict[str, list[np.ndarray]]:
    """None while the reference is computed."""
    return {REF: row.columns[MISMATCHED]} if MISMATCHED in row.columns else {}


@frozen(kw_only=True, eq=False)
class PointEstimate:
    """All calls are collective."""

    model: ModelParts
    rank: Rank
    pipeline: PipelineSchedule | None = None
    beat: HeartbeatWriter | None = None

    @torch.no_grad()
    def of(self, microbatches: Iterable[Microbatch]) -> float:
        """The mean over the answers of all ranks of Σ log π − log π_ref over their tokens, and 0 where that is less
        (Ethayarajh et al. 2024, arXiv 2402.01306, section 4.1); 0 of no answers. The model has to be in evaluation
        mode."""
        rank = self.rank
        counts = all(rank.coordinates[axis] == 0 for axis in ("pp", "ring", "ulysses", "tp"))
        sums = torch.zeros(2, dtype=torch.float64, device=rank.device)

        def batches() -> Iterator[ModelBatch]:
            for microbatch in microbatches:
                if self.beat is not None:
                    self.beat.mark()
                if counts:
                    sums[1] += microbatch.num_units
                batch = ModelBatch.of(microbatch, rank.device)
                batch.each = True
                yield batch

        for batch in forwarded(self.model, self.pipeline, batches()):
            if batch.losses_BS is not None and rank.is_tp_first:
                assert batch.labels_BS is not None
                valid_BS = batch.labels_BS != IGNORE_INDEX
                sums[0] -= (batch.losses_BS.double() + batch.columns[REF].double())[valid_BS].sum()
        if rank.world_size > 1:
            dist.all_reduce(sums)
        total, answers = sums.tolist()
        return max(0.0, total / answers) if answers else 0.0


@op("step.reference_point")
def estimate(
    model: ModelParts,
    rank: Rank,
    feed: Feed,
    reference_point: ReferencePoint,
    pipeline: PipelineSchedule | None = None,
    beat: HeartbeatWriter | None = None,
) -> StepCall:
    """Estimate the point of a step from its own rows."""
    estimated = PointEstimate(model=model, rank=rank, pipeline=pipeline, beat=beat)
    rows = feed.loader.datasets[0].reader.rows

    def run(step: Step) -> None:
        model.train(False)
        try:
            reference_point.value = estimated.of(exchanged_rows(feed.loader.rows(step.index), rows, feed.collate))
        finally:
            reshard(model)
            model.train()

    return run
