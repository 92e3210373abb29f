"""`tick.eval`: evaluation on held-out documents."""

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from xtrain.plan.plan import Plan
from xtrain.records.training_events import EvalEvent
from xtrain.runtime.base.mesh import Meshes
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank, Resources
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.feed.tokenizers import TextTokenizer
from xtrain.runtime.loop.evaluation import ChoicesMeasure, LossMeasure, Measure
from xtrain.runtime.loop.hooks import evaluation_body
from xtrain.runtime.nn.averages import WeightAverages, Weights
from xtrain.runtime.nn.batch import ModelBatch, Step
from xtrain.runtime.nn.parallelize import reshard
from xtrain.runtime.nn.pipeline import Outlines, PipelineSchedule, forwarded
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import Records
from xtrain.runtime.sampling.held_out import HeldOutPrompts
from xtrain.runtime.sampling.reference_weights import PointEstimate, ReferencePoint, exchanged_rows
from xtrain.runtime.sampling.rollout import RowRanks
from xtrain.runtime.sampling.text_generator import TextGenerator
from xtrain.runtime.store.saver import Saver


@op("tick.eval")
def evaluate(
    plan: Plan,
    model: ModelParts,
    feed: Feed,
    tokenizer: TextTokenizer,
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
    choices: bool = False,
    objective: str | None = None,
    task: str | None = None,
    answers: str | None = None,
    resources: Resources | None = None,
    reference_point: ReferencePoint | None = None,
):
    """Evaluate the model with `Measure` over the rows of all ranks.

    choices: documents are answer choices after their questions. objective: the unit of the training loss (token,
    sequence or pair), measured too; None: cross-entropy only. task: use this task's adapter; None: none. answers: how
    held-out prompts are completed, `greedy` or `sampled`; their mean reward is measured too. averaged: use the averaged
    weights once they exist. user: a user function called instead of the forward.
    """
    weights = Weights(ema=ema if averaged else None, saver=saver)
    loader = feed.evaluation(dataset, rows, rank, measures=objective is not None)
    known_bytes = tokenizer.bytes_of
    first = rank.coordinates["ring"] == rank.coordinates["ulysses"] == 0
    loss = LossMeasure(loader, rank.device, known_bytes, model, objective, counts_units=first)
    measure: Measure = ChoicesMeasure(loader, rank.device) if choices else loss
    outlines = Outlines.of(plan, feed.collate, rank, meshes)
    counts = rank.is_tp_first and rank.coordinates["pp"] == 0
    body = None if user is None else evaluation_body(plan, user, resources or {})
    asked = None
    if answers is not None:
        author = TextGenerator(model=model, rank=rank, pipeline=pipeline, beat=beat)
        ranks, greedy = RowRanks.of(rank, meshes), answers == "greedy"
        prepared = feed.datasets[dataset]
        asked = HeldOutPrompts.of(plan, author, tokenizer, prepared, rows, ranks, resources or {}, greedy=greedy)

    @torch.no_grad()
    def run(step: Step) -> None:
        begin = time.perf_counter()
        model.train(False)
        sums = measure.zeros()

        def batches() -> Iterator[ModelBatch]:
            for microbatch in outlines.completed(loader, len(loader)):
                if beat is not None:
                    beat.mark()
                if counts:
                    measure.count(sums, microbatch)
                batch = ModelBatch.of(microbatch, rank.device)
                batch.each = choices or known_bytes is not None
                batch.measures = objective is not None
                yield batch
                if body is not None and rank.is_tp_first:
                    loss.add_text(sums, batch)  # state left by the forward

        with weights.in_place() as which, model.with_adapter_of(task):
            if reference_point is not None and reference_point.estimated and objective is not None:
                estimate = PointEstimate(model=model, rank=rank, pipeline=pipeline, beat=beat)
                others = exchanged_rows(loader.raw_rows(), loader.rows, feed.collate)
                reference_point.value = estimate.of(others)
            if body is not None:
                total = body(step, batches())
                sums[0] += total if rank.is_tp_first else 0
            else:
                for batch in forwarded(model, pipeline, batches()):
                    if batch.cross_entropy is not None and rank.is_tp_first:
                        measure.add(sums, batch)
            if rank.world_size > 1:
                dist.all_reduce(sums)
            reward: float | None = None
            if asked is not None:
                with torch.compiler.set_stance("force_eager"):
                    reward = asked.reward()
            reshard(model)
        model.train()
        found = measure.measured(sums)
        seconds = time.perf_counter() - begin
        records.event(
            EvalEvent(
                step=progress.step,
                node=node_id,
                dataset=dataset,
                weights=which,
                batches=len(loader),
                seconds=seconds,
                reward=reward,
                **found.facts,
            )
        )
        if found.warning:
            records.warn(f"eval {dataset}: {found.warning}", step=progress.step)
        metrics = {
            f"eval/{dataset}/{name}": value
            for name, value in (dict(found.metrics) | ({} if reward is None else {"reward": reward})).items()
        }
        progress.measured |= {name: (progress.step, value) for name, value in metrics.items()}
        records.measured(metrics)
        if saver is not None:
            for metric in metrics:
                saver.measured(metric)

    return run
