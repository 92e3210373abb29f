"""`tick.eval`: the loss on held-out documents, over every valid token once."""

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...planner.plan import Plan
from ...records.step_events import EvalEvent
from ...runtime.checkpoint.saver import Saver
from ...runtime.hooks.bodies import evaluation_body
from ...runtime.input.feed import Feed
from ...runtime.models.batch import ModelBatch
from ...runtime.models.parts import ModelParts
from ...runtime.monitoring.heartbeat import HeartbeatWriter
from ...runtime.ops import op
from ...runtime.parallel.mesh import Meshes
from ...runtime.parallelize.fsdp import reshard
from ...runtime.parallelize.outline import Outlines
from ...runtime.parallelize.pipeline import PipelineSchedule
from ...runtime.reporting.records import Records
from ...runtime.state import Progress, Rank, Resources, Step
from ...runtime.training.ema import WeightAverages, Weights


@op("tick.eval")
def evaluate(
    plan: Plan,
    model: ModelParts,
    feed: Feed,
    rank: Rank,
    records: Records,
    progress: Progress,
    meshes: Meshes,
    node_id: str,
    dataset: str,
    rows: int | None,
    pipeline: PipelineSchedule | None = None,
    averaged: bool = False,
    ema: WeightAverages | None = None,
    saver: Saver | None = None,
    beat: HeartbeatWriter | None = None,
    user: dict[str, Any] | None = None,
    resources: Resources | None = None,
):
    """Sum of losses over all ranks divided by the sum of valid tokens: no average of averages.

    averaged: of the averaged weights, once there are any. user: a function of the user's own in place of the forward.
    """
    weights = Weights(ema=ema if averaged else None, saver=saver)
    loader = feed.evaluation(dataset, rows, rank)
    outlines = Outlines.of(plan, feed, rank, meshes)
    counts = rank.is_tp_first and rank.coordinates["pp"] == 0
    body = None if user is None else evaluation_body(plan, user, resources or {})

    @torch.no_grad()
    def run(step: Step) -> None:
        begin = time.perf_counter()
        model.train(False)
        sums = torch.zeros(2, dtype=torch.float64, device=rank.device)

        def batches() -> Iterator[ModelBatch]:
            for microbatch in outlines.completed(loader, len(loader)):
                if beat is not None:
                    beat.mark()
                sums[1] += microbatch.num_valid if counts else 0
                yield ModelBatch.of(microbatch, rank.device)

        with weights.in_place() as which:
            if body is not None:
                found = body(step, batches())
                sums[0] += found if rank.is_tp_first else 0
            else:
                for batch in forwarded(model, pipeline, batches()):
                    if batch.cross_entropy is not None and rank.is_tp_first:
                        sums[0] += batch.cross_entropy
            if rank.world_size > 1:
                dist.all_reduce(sums)
            reshard(model)
        model.train()
        total, tokens = sums.tolist()
        loss = total / tokens if tokens else math.nan
        seconds = time.perf_counter() - begin
        records.event(
            EvalEvent(
                step=progress.step,
                node=node_id,
                dataset=dataset,
                weights=which,
                loss=loss,
                tokens=int(tokens),
                batches=len(loader),
                seconds=seconds,
            )
        )
        if not tokens:
            message = f"eval {dataset}: the held-out rows have no valid token, so there is no loss"
            records.warn(message, step=progress.step)
        metric = f"eval/{dataset}/loss"
        progress.measured[metric] = progress.step, loss
        records.measured({metric: loss})
        if saver is not None:
            saver.measured(metric)

    return run


def forwarded(
    model: ModelParts, pipeline: PipelineSchedule | None, batches: Iterator[ModelBatch]
) -> Iterator[ModelBatch]:
    """Every batch after its forward, through all stages. Collective."""
    if pipeline is None:
        for batch in batches:
            model.whole(None, batch)
            yield batch
        return
    for batch, _ in pipeline.forward(batches):
        yield batch
