"""`tick.eval`: evaluation on held-out documents.

It measures the loss over every valid token once, the loss for each byte, the accuracy of choices, and in a run with
rollouts the rewards of completions of held-out prompts.
"""

import math
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor

from xtrain.plan.plan import Plan
from xtrain.records.training_events import EvalEvent
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.base.mesh import Meshes
from xtrain.runtime.base.ops import op, op_of
from xtrain.runtime.base.state import Progress, Rank, Resources
from xtrain.runtime.feed.loader import EvalLoader
from xtrain.runtime.feed.microbatch import IGNORE_INDEX, Microbatch
from xtrain.runtime.feed.packing.stored_rows import RowReader
from xtrain.runtime.feed.prepared import PreparedDataset
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.feed.tokenizers import TextTokenizer, TokenBytes
from xtrain.runtime.loop.hooks import evaluation_body
from xtrain.runtime.nn.averages import WeightAverages, Weights
from xtrain.runtime.nn.batch import ModelBatch, SampledGroup, Step, StepCall
from xtrain.runtime.nn.parallelize import reshard
from xtrain.runtime.nn.pipeline import Outlines, PipelineSchedule, forwarded
from xtrain.runtime.nn.texts import Sampling, TextEnds
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import Records
from xtrain.runtime.sampling.prompts import check_prompts, ends_of, prompt_of
from xtrain.runtime.sampling.reference_weights import PointEstimate, ReferencePoint, exchanged_rows
from xtrain.runtime.sampling.sampler import RowRanks, Sampler
from xtrain.runtime.sampling.text_generator import TextGenerator
from xtrain.runtime.store.saver import Saver

if TYPE_CHECKING:
    from xtrain.runtime.sampling.episodes import EpisodePlayer


@frozen(kw_only=True, eq=False)
class HeldOutPrompts:
    """One completion of each held-out prompt. rows: evaluated over all ranks; micro: sampled at once. seed: of the
    draws, the same in each evaluation. score: None for episodes, which `player` plays."""

    reader: RowReader
    tokenizer: TextTokenizer
    ends: TextEnds
    sampler: Sampler
    score: StepCall | None
    rank: Rank
    rows: int
    micro: int
    seed: int
    name: str
    player: "EpisodePlayer | None" = None

    @classmethod
    def of(
        cls,
        plan: Plan,
        author: TextGenerator,
        tokenizer: TextTokenizer,
        dataset: PreparedDataset,
        rows: int | None,
        row_ranks: RowRanks,
        resources: Resources,
        *,
        greedy: bool,
        environment: str | None = None,
    ) -> "HeldOutPrompts":
        """Prepare an evaluation. rows: at most. greedy: complete with the likeliest tokens. environment: has an episode
        for each prompt. Raises DataError for prompts that rollouts cannot sample from."""
        reader = dataset.parts["hold-out"]
        positions = plan.node("setup.prompts").args["positions"]
        sampled = plan.node("rollout.generate").args
        most = sampled["max_tokens"]
        check_prompts(f"{dataset.name}, hold-out", reader, positions + 1 - most, most)
        temperature = 0.0 if greedy else sampled["temperature"]
        sampling = Sampling(temperature=temperature, top_k=sampled.get("top_k"), top_p=sampled["top_p"])
        sampler = Sampler(author=author, tokenizer=tokenizer, row_ranks=row_ranks, sampling=sampling, most=most)
        score = player = None
        if environment is None:
            node = plan.node("rollout.score")
            score = op_of(node).bind(node, {**resources, "node_id": node.id})()
        else:
            from xtrain.runtime.sampling.episodes import EpisodePlayer  # only for runs with environments

            world = resources["environments"][environment]
            player = EpisodePlayer.of(plan, sampler, world, [dataset.name], sampled["turns"])
        return cls(
            reader=reader,
            tokenizer=tokenizer,
            ends=ends_of(plan, dataset.name, tokenizer),
            sampler=sampler,
            score=score,
            name=dataset.name,
            player=player,
            rank=author.rank,
            rows=min(reader.rows.num_rows, rows or reader.rows.num_rows),
            micro=plan.node("setup.loader").args["micro"],
            seed=sampled["seed"],
        )

    def reward(self) -> float:
        """Return the mean reward over all prompts. Collective; raises LogitsNotFinite on all ranks alike."""
        rank, together = self.rank, self.micro * self.rank.data_ranks
        sums = torch.zeros(2, dtype=torch.float64, device=rank.device)
        for begin in range(0, self.rows, together):
            first = begin + rank.data_rank * self.micro
            # After the last prompt, ranks sample the first one again, because other ranks wait for them.
            numbers = [number if number < self.rows else 0 for number in range(first, first + self.micro)]
            groups = self._sampled(numbers)
            if self.score is not None:
                self.score(Step(index=0, groups=[groups]))
            if self.sampler.row_ranks.is_first:
                reward_sums = [group.rewards.sum() for group in groups[: max(0, self.rows - first)]]
                sums += torch.tensor(
                    [float(np.sum(reward_sums)), len(reward_sums)], dtype=torch.float64, device=rank.device
                )
        if rank.world_size > 1:
            dist.all_reduce(sums)
        total, count = sums.tolist()
        return total / count

    def _sampled(self, numbers: list[int]) -> list[SampledGroup]:
        prompts = [prompt_of(self.reader.row(number), self.tokenizer) for number in numbers]
        keys = [f"{self.seed} held out {number}" for number in numbers]
        if self.player is None:
            ids = [prompt.ids.tolist() for prompt in prompts]
            completions = self.sampler.sample(ids, [self.ends] * len(prompts), keys)
        else:
            begins = [f"{key} begin" for key in keys]
            completions = self.player.play(self.player.starts(prompts, keys, begins, [self.name] * len(keys)))
        groups = [SampledGroup(prompt, [found]) for prompt, found in zip(prompts, completions, strict=True)]
        for group in groups if self.player is not None else ():
            group.rewards = group.rewards_of_episodes()
        return groups


@frozen(kw_only=True)
class EvaluationResult:
    """Result of an evaluation. metrics: name after `eval/DATASET/` → value. facts: fields of the event. warning: empty
    if there is none."""

    metrics: Mapping[str, float]
    facts: Mapping[str, Any]
    warning: str = ""


class Measure(Protocol):
    """Measure computed from a sum over microbatches and ranks."""

    loader: EvalLoader

    def zeros(self) -> Tensor:
        """Return float64 zeros for the sums, which are added over all ranks at the end."""
        ...

    def count(self, sums: Tensor, microbatch: Microbatch) -> None:
        """Add counts known before the forward, on one of the ranks that hold the same tokens."""
        ...

    def add(self, sums: Tensor, batch: ModelBatch) -> None:
        """Add results of a forward, on one of the ranks that have them."""
        ...

    def measured(self, sums: Tensor) -> EvaluationResult:
        """Return the result of the sums over all ranks."""
        ...


@define(eq=False)
class LossMeasure:
    """Loss of held-out rows: sums over all ranks divided by sums of tokens and bytes, never an average of averages. A
    reward model's loss is its objective.

    token_bytes: None if bits per byte are undefined. Sums: losses, valid tokens; with `token_bytes` also losses of text
    tokens, and their bytes. objective: unit of the objective (token, sequence or pair), which is then measured too;
    None: not measured. Its sums follow the others: number of sequences or pairs, objective, and the metrics of the
    loss. counts_units: this rank counts them, of all ranks that hold positions of the same rows.
    """

    loader: EvalLoader
    device: torch.device
    token_bytes: TokenBytes | None
    model: ModelParts
    objective: str | None = None
    counts_units: bool = True
    _tables: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def zeros(self) -> Tensor:
        more = 0 if self.objective is None else 2 + len(self.model.measured)
        return torch.zeros(4 + more, dtype=torch.float64, device=self.device)

    def count(self, sums: Tensor, microbatch: Microbatch) -> None:
        sums[1] += microbatch.num_valid
        if self.objective is not None and self.counts_units:
            sums[4] += microbatch.num_units

    def add(self, sums: Tensor, batch: ModelBatch) -> None:
        assert batch.cross_entropy is not None
        sums[0] += batch.cross_entropy
        self.add_text(sums, batch)
        if self.objective is not None:
            assert batch.recorded is not None
            sums[5:] += batch.recorded

    def add_text(self, sums: Tensor, batch: ModelBatch) -> None:
        """Add losses and bytes of a batch; NaN if its losses were requested and not computed."""
        if batch.losses_BS is not None:
            sums[2:4] += self._of_text(batch)
        elif batch.each:
            sums[3] = math.nan

    def _of_text(self, batch: ModelBatch) -> Tensor:
        """Return losses and bytes of the labels that are text; special tokens have no bytes."""
        assert self.token_bytes is not None and batch.losses_BS is not None
        assert batch.labels_BS is not None and batch.input_ids_BS is not None
        if self._tables is None:
            token_bytes = self.token_bytes
            self._tables = (
                torch.from_numpy(token_bytes.inside).to(self.device),
                torch.from_numpy(token_bytes.first).to(self.device),
            )
        inside_V, first_V = self._tables
        labels_BS = batch.labels_BS.clamp(min=0)
        begins_BS = (batch.positions_BS == 0) & (inside_V[batch.input_ids_BS] == 0)
        text_BS = (batch.labels_BS != IGNORE_INDEX) & (inside_V[labels_BS] > 0)
        bytes_BS = torch.where(begins_BS, first_V[labels_BS], inside_V[labels_BS]) * text_BS
        return torch.stack(((batch.losses_BS.double() * text_BS).sum(), bytes_BS.sum().double()))

    def measured(self, sums: Tensor) -> EvaluationResult:
        total, tokens, of_text, size, *more = sums.tolist()
        loss = _mean(total, tokens if self.model.predicts else more[0])
        metrics, facts = {"loss": loss}, {"loss": loss, "tokens": int(tokens)}
        if size > 0:  # false for NaN
            metrics["bits_per_byte"] = facts["bits_per_byte"] = of_text / size / math.log(2)
            facts["bytes"] = int(size)
        if self.objective is not None:
            minimised, measured = self._minimised(tokens, *more)
            metrics |= {"objective": minimised, **measured}
            facts |= {"objective": minimised, **({"metrics": measured} if measured else {})}
        warning = "" if tokens else "the held-out rows have no valid token, so there is no loss"
        return EvaluationResult(metrics=metrics, facts=facts, warning=warning)

    def _minimised(self, tokens: float, units: float, total: float, *others: float) -> tuple[float, dict[str, float]]:
        """Return the objective and the metrics of the loss by name: means over tokens, sequences or pairs."""
        measured = units if self.model.measures_units else tokens
        metrics = {name: _mean(other, measured) for name, other in zip(self.model.measured, others, strict=True)}
        return _mean(total, tokens if self.objective == "token" else units), metrics


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan


@define(eq=False)
class ChoicesMeasure:
    """Accuracy on multiple-choice questions. Sums: the loss of every document of the store, each a choice after its
    question."""

    loader: EvalLoader
    device: torch.device
    _choices: np.ndarray = field(init=False)
    _scored: np.ndarray = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Raises DataError if a choice alone is longer than a row."""
        store, capacity = self.loader.store, self.loader.rows.capacity
        assert store.choices is not None
        self._choices, self._scored = store.choices, store.predicted()
        if (longest := int(self._scored.max())) > capacity:
            raise DataError(
                f"a choice of {longest:,} tokens does not fit into a row of {capacity:,}", remedy="Lengthen the rows."
            )

    def zeros(self) -> Tensor:
        return torch.zeros(len(self._choices), dtype=torch.float64, device=self.device)

    def count(self, sums: Tensor, microbatch: Microbatch) -> None:
        """Do nothing: all tokens are known beforehand."""

    def add(self, sums: Tensor, batch: ModelBatch) -> None:
        assert batch.losses_BS is not None and batch.text_BS is not None
        sums.index_add_(0, batch.text_BS.flatten(), batch.losses_BS.flatten().double())

    def measured(self, sums: Tensor) -> EvaluationResult:
        """Return `accuracies`, and the loss of the right choices in nats a token."""
        losses, right = sums.cpu().numpy(), self._choices[:, 1] == 1
        metrics = {"loss": float(losses[right].sum() / self._scored[right].sum()), **accuracies(-losses, self._choices)}
        facts = {**metrics, "tokens": int(self._scored.sum()), "questions": int(right.sum())}
        return EvaluationResult(metrics=metrics, facts=facts)


def accuracies(likelihoods: np.ndarray, choices: np.ndarray) -> dict[str, float]:
    """Return acc, acc_norm, acc_bytes: shares of questions whose right choice has the largest log-likelihood, as it is,
    per character and per byte; NaN if a log-likelihood is NaN.

    likelihoods: float64 [documents]. choices: int32 [documents, 4], see `TokenDocument.choice`.
    """
    numbers, right, characters, size = choices.astype(np.int64).T
    bounds = np.append(np.flatnonzero(numbers == 0), len(numbers))
    shares = {}
    for name, lengths in (("acc", np.ones_like(size)), ("acc_norm", characters), ("acc_bytes", size)):
        scores = likelihoods / lengths
        best = [start + int(np.argmax(scores[start:end])) for start, end in pairwise(bounds)]
        shares[name] = math.nan if np.isnan(scores).any() else float(right[best].mean())
    return shares


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
    environment: str | None = None,
    curve: str = "eval",
    resources: Resources | None = None,
    reference_point: ReferencePoint | None = None,
):
    """Evaluate the model with `Measure` over the rows of all ranks.

    choices: documents are answer choices after their questions. objective: the unit of the training loss (token,
    sequence or pair), measured too; None: cross-entropy only. task: use this task's adapter; None: none. answers: how
    held-out prompts are completed, `greedy` or `sampled`; their mean reward is measured too. environment: has an
    episode for each. curve: first part of the names of metrics. averaged: use the averaged weights once they exist.
    user: a user function called instead of the forward.
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
        given, world = resources or {}, environment
        asked = HeldOutPrompts.of(
            plan, author, tokenizer, prepared, rows, ranks, given, greedy=greedy, environment=world
        )

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
            f"{curve}/{dataset}/{name}": value
            for name, value in (dict(found.metrics) | ({} if reward is None else {"reward": reward})).items()
        }
        progress.measured |= {name: (progress.step, value) for name, value in metrics.items()}
        records.measured(metrics)
        if saver is not None:
            for metric in metrics:
                saver.measured(metric)

    return run
