"""Rollouts: completions from the model in training, with their log-probabilities, advantages and comparison."""

import time
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from xtrain.dsl.schema.losses import OLD
from xtrain.plan.plan import Plan
from xtrain.records.training_events import GeneratedText, GenerateEvent
from xtrain.runtime.base.collectives import all_gather
from xtrain.runtime.base.mesh import Meshes
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.feed.tokenizers import TextTokenizer
from xtrain.runtime.nn.batch import (
    Completion,
    ModelBatch,
    NonFinite,
    Prompt,
    SampledGroup,
    Step,
    StepCall,
    advantages_of,
)
from xtrain.runtime.nn.loss import IGNORE
from xtrain.runtime.nn.parallelize import reshard
from xtrain.runtime.nn.pipeline import PipelineSchedule
from xtrain.runtime.nn.router import ExpertRouter
from xtrain.runtime.nn.texts import NO_TOKEN, Continuation, Draws, Sampling, TextEnds
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import Records
from xtrain.runtime.sampling.prompts import Groups, KeptCompletions, PromptReader
from xtrain.runtime.sampling.text_generator import LogitsNotFinite, Prompts, TextGenerator


@frozen(eq=False)
class RowRanks:
    """Ranks that hold the same rows. row: the ranks of tp and cp; pipeline: the stages; None if that is this rank
    alone."""

    rank: Rank
    row: dist.ProcessGroup | None
    pipeline: dist.ProcessGroup | None

    @classmethod
    def of(cls, rank: Rank, meshes: Meshes) -> "RowRanks":
        return cls(rank, *(meshes.group(axis) if meshes.has(axis) else None for axis in ("row", "pp")))

    @property
    def is_first(self) -> bool:
        """True on the one rank, of all with the same rows, that does work needed once."""
        return all(self.rank.coordinates[axis] == 0 for axis in ("pp", "ring", "ulysses", "tp"))

    def share(self, tensor: Tensor, stage: int = 0) -> Tensor:
        """Broadcast a tensor in place from the first rank of a pipeline coordinate. Collective."""
        if self.row is not None:
            dist.broadcast(tensor, group=self.row, group_src=0)
        if self.pipeline is not None:
            dist.broadcast(tensor, group=self.pipeline, group_src=stage)
        return tensor


@frozen(kw_only=True, eq=False)
class Sampler:
    """Sampler of completions. most: tokens of a completion. records: also record the experts of each token. Calls are
    collective over all ranks, which need the same number of rows each."""

    author: TextGenerator
    tokenizer: TextTokenizer
    row_ranks: RowRanks
    sampling: Sampling
    most: int
    records: bool = False

    def sample(
        self, prompts: Sequence[Sequence[int]], ends: Sequence[TextEnds], keys: Sequence[str]
    ) -> list[Completion]:
        """Sample a completion of each prompt, with random numbers that depend only on its key and the position. Raises
        LogitsNotFinite on all ranks alike."""
        texts = [Continuation(self.tokenizer, ids, end, self.most) for ids, end in zip(prompts, ends, strict=True)]
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        left_out = [0.0] * len(prompts)
        sent: list[np.ndarray] = []
        draws = Draws(self.sampling, [Random(key) for key in keys])
        rows = Prompts.of(prompts, max(map(len, prompts)) + self.most - 1, self.author.rank.device)
        with self.author.model.axes.uncut_rows():
            batch = rows.first()
            for number in range(1, self.most + 1):
                following, chances, missing = self._drawn(draws, self._logits(batch, sent), len(prompts))
                for row, text in enumerate(texts):
                    if not text.done:
                        tokens[row].append(following[row])
                        logprobs[row].append(chances[row])
                        left_out[row] += missing[row]
                        text.add(following[row])
                if self._all_done(all(text.done for text in texts), NO_TOKEN not in following):
                    break
                if number < self.most:
                    batch = rows.next(following)
        experts = [None] * len(prompts) if not self.records else _of_rows(sent, prompts, tokens)
        return [
            Completion(tokens=ids, logprobs=chance, text=text.text, cut=text.cut, left_out=missing, experts=own)
            for ids, chance, text, missing, own in zip(tokens, logprobs, texts, left_out, experts, strict=True)
        ]

    def _logits(self, batch: ModelBatch, sent: list[np.ndarray]) -> Tensor | None:
        """Return the author's logits. sent: receives the experts of the batch's positions, int32 [B, S, width]."""
        if not self.records:
            return self.author.logits(batch)
        model, axes = self.author.model, self.author.model.axes
        axes.recorded = recorded = []
        try:
            logits_BV = self.author.logits(batch)
        finally:
            axes.recorded = None
        arch, (rows, positions) = model.parts[0].arch, batch.shape
        of_layer = dict(zip((layer for part in model.parts for layer in part.routing_layers), recorded, strict=True))
        none_BSK = torch.full((rows, positions, arch.experts_per_token), -1, device=self.author.rank.device)
        chosen_layers = []
        for layer in arch.expert_layers:
            chosen_BSK = of_layer.get(layer, none_BSK)
            if layer in of_layer and axes.tensor is not None:  # ranks have sharded the positions
                chosen_BSK = all_gather(chosen_BSK, 1, axes.tensor.group)[:, :positions]
            chosen_layers.append(chosen_BSK)
        sent.append((torch.cat(chosen_layers, 2) + 1).int().cpu().numpy())
        return logits_BV

    def _drawn(self, draws: Draws, logits_BV: Tensor | None, rows: int) -> tuple[list[int], list[float], list[float]]:
        """Return the next token of every row, its log-probability, and the probability of left-out tokens."""
        pipeline, device = self.author.pipeline, self.author.rank.device
        drawn = torch.zeros(3, rows, dtype=torch.float64, device=device)
        if logits_BV is not None:
            chosen_B = draws.next(logits_BV)
            exact_BV = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
            logprob_BV = (exact_BV / self.sampling.temperature).log_softmax(-1)
            drawn[0] = chosen_B
            drawn[1] = logprob_BV.gather(1, chosen_B.clamp(min=0)[:, None])[:, 0]
            drawn[2] = self.sampling.left_out(exact_BV, logprob_BV)
        self.row_ranks.share(drawn, 0 if pipeline is None else pipeline.last_owner)
        chosen, chances, missing = drawn.tolist()
        return [int(token) for token in chosen], chances, missing

    def _all_done(self, done: bool, finite: bool) -> bool:
        """Return True if every rank has finished its completions. Raises LogitsNotFinite if a rank has no token."""
        rank = self.author.rank
        state = torch.tensor([not done, not finite], dtype=torch.int32, device=rank.device)
        if rank.data_ranks > 1:
            dist.all_reduce(state, op=dist.ReduceOp.MAX)
        goes_on, broken = state.tolist()
        if broken:
            raise LogitsNotFinite("no token can be chosen: logits of the model are NaN or infinite")
        return not goes_on


def _of_rows(
    sent: Sequence[np.ndarray], prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Return the experts of each row: a token's entry is that of the position before it, where it is a label.

    sent: of the prompts, which end together, then of one position at a time, int32 [B, S, width].
    """
    whole = np.concatenate(sent, axis=1)
    longest, width = max(map(len, prompts)), whole.shape[2]
    columns = []
    for row, (ids, own) in enumerate(zip(prompts, tokens, strict=True)):
        first, positions = longest - len(ids), len(ids) + len(own) - 1
        columns.append(np.concatenate((np.zeros((1, width), np.int32), whole[row, first : first + positions])))
    return columns


@op("rollout.generate")
def generate(
    model: ModelParts,
    tokenizer: TextTokenizer,
    rank: Rank,
    meshes: Meshes,
    prompts: PromptReader,
    records: Records,
    node_id: str,
    group: int,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    top_k: int | None = None,
    replay_routing: bool = False,
    show: int | None = None,
    steps: int = 1,
    updates: int = 1,
    feed: Feed | None = None,
    kept_completions: KeptCompletions | None = None,
    pipeline: PipelineSchedule | None = None,
    beat: HeartbeatWriter | None = None,
) -> StepCall:
    """Sample `group` completions of each prompt, in the microbatches that they will form.

    Draws depend on the seed, the prompt's place in the run, the completion's number and the position, whatever the
    ranks. show: record those of the first prompt every `show` steps. steps, updates: steps divisible by their product
    sample for all steps up to the next such step; each completion is used in `updates` of them. Raises NonFinite on all
    ranks alike if no token can be chosen.
    """
    author = TextGenerator(model=model, rank=rank, pipeline=pipeline, beat=beat)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    sampler = Sampler(
        author=author,
        tokenizer=tokenizer,
        row_ranks=RowRanks.of(rank, meshes),
        sampling=sampling,
        most=max_tokens,
        records=replay_routing,
    )

    def sampled(microbatch: list[Prompt]) -> list[SampledGroup]:
        pairs = [(prompt, number) for prompt in microbatch for number in range(group)]
        completions = sampler.sample(
            [prompt.ids.tolist() for prompt, _ in pairs],
            [prompts.ends_of(prompt) for prompt, _ in pairs],
            [f"{seed} {prompt.place} {number}" for prompt, number in pairs],
        )
        parts = (completions[first : first + group] for first in range(0, len(pairs), group))
        return [SampledGroup(prompt, part) for prompt, part in zip(microbatch, parts, strict=True)]

    def of_step(step: Step) -> list[list[SampledGroup]]:
        if kept_completions is None:
            step.sampled = True
            return [sampled(microbatch) for microbatch in prompts.of_step(step.index)]
        assert feed is not None
        kept_completions.find(step.index, prompts, group=group, most=max_tokens, experts=replay_routing)
        if kept_completions.of(step.index) is None:
            step.sampled = True
            period = steps * updates
            made: dict[int, Groups] = {}
            for number in range(step.index, min((step.index // period + 1) * period, feed.steps)):
                # In later updates of a period the prompts repeat those of `steps` steps earlier.
                made[number] = made.get(number - steps) or [
                    sampled(microbatch) for microbatch in prompts.of_step(number)
                ]
                kept_completions.keep(number, made[number])
        groups = kept_completions.of(step.index)
        assert groups is not None
        return groups

    def sample_completions(step: Step) -> None:
        begin = time.perf_counter()
        model.train(False)
        try:
            # Rows of one token and of prompts: a block compiled for the rows of a step does not help here.
            with torch.compiler.set_stance("force_eager"):
                step.groups = of_step(step)
        except LogitsNotFinite as problem:
            nan = float("nan")
            raise NonFinite(step.index + 1, nan, nan, f"step {step.index + 1}: {problem}") from problem
        finally:
            reshard(model)
            model.train()
        if show is not None and step.index % show == 0:
            first, seconds = step.groups[0][0], time.perf_counter() - begin
            samples = [GeneratedText(first.prompt.text, completion.text) for completion in first.completions]
            event = GenerateEvent(step=step.index, node=node_id, weights="trained", samples=samples, seconds=seconds)
            records.event(event)

    return sample_completions


@op("rollout.advantages")
def advantages(
    feed: Feed, rank: Rank, meshes: Meshes, plan: Plan, scale: str, mask_truncated: bool = False
) -> StepCall:
    """Compute each completion's advantage over its group, and the rows that the step trains on.

    mask_truncated: exclude completions that were cut.
    """
    form_rows = rows(feed, rank, meshes, plan, mask_truncated)

    def set_advantages(step: Step) -> None:
        for microbatch in step.groups:
            for group in microbatch:
                group.advantages = advantages_of(group.rewards, scale)
        form_rows(step)

    return set_advantages


@op("rollout.rows")
def rows(feed: Feed, rank: Rank, meshes: Meshes, plan: Plan, mask_truncated: bool = False) -> StepCall:
    """Make the rows that the step trains on, and measure the completions.

    mask_truncated: exclude completions that were cut.
    """
    counts = RowRanks.of(rank, meshes).is_first
    sampled = plan.node("rollout.generate").args
    leaves_out = "top_k" in sampled or sampled["top_p"] < 1

    def form_rows(step: Step) -> None:
        rows = ([group.row(mask_truncated=mask_truncated) for group in microbatch] for microbatch in step.groups)
        step.microbatches = feed.collate.of_step(rows)
        sums = torch.tensor(summed(step.groups) if counts else [0.0] * 9, dtype=torch.float64, device=rank.device)
        if rank.world_size > 1:
            dist.all_reduce(sums)
        completions, groups, scored, reward, squares, silent, tokens, cut, left_out = sums.tolist()
        if scored:
            step.reward = mean = reward / scored
            deviation = max(0.0, squares / scored - mean**2) ** 0.5
            step.metrics |= {"rollout/reward_std": deviation, "rollout/no_signal": silent / groups}
        step.metrics |= {
            "rollout/tokens": tokens / completions,
            "rollout/cut": cut / completions,
            **({"rollout/left_out": left_out / tokens} if leaves_out else {}),
        }

    return form_rows


def summed(microbatches: list[list[SampledGroup]]) -> list[float]:
    """Sum completions, groups, scored completions, rewards and their squares, groups of equal rewards, tokens, cut
    completions, and the left-out probability over tokens."""
    groups = [group for microbatch in microbatches for group in microbatch]
    completions = [completion for group in groups for completion in group.completions]
    rewards = np.concatenate([group.rewards for group in groups])
    silent = sum(bool((group.rewards == group.rewards[:1]).all()) for group in groups if len(group.rewards))
    tokens = sum(len(completion.tokens) for completion in completions)
    cut = sum(completion.cut for completion in completions)
    left_out = sum(completion.left_out for completion in completions)
    scores = (len(rewards), rewards.sum(), np.square(rewards).sum(), silent)
    return [float(number) for number in (len(completions), len(groups), *scores, tokens, cut, left_out)]


@op("rollout.compare")
def compare(rank: Rank, model: ModelParts, replay_routing: bool = False) -> StepCall:
    """Compare the sampler's log-probabilities with those that the step computed, in steps that sampled; with
    `replay_routing` also the share of experts that the step would have chosen differently."""
    routers = [module for module in model.modules() if isinstance(module, ExpertRouter)]

    def differing() -> float:
        counts = torch.zeros(2, dtype=torch.int64, device=rank.device)
        for router in routers:
            if router.replayed is not None:
                counts += router.replayed
                router.replayed = None
        if rank.world_size > 1:
            dist.all_reduce(counts)
        replayed, other = counts.tolist()
        return other / replayed

    def compare_logprobs(step: Step) -> None:
        step.metrics |= {"rollout/routing_differs": differing()} if replay_routing else {}
        if not step.sampled:  # the weights have changed since
            return
        total = torch.zeros((), dtype=torch.float64, device=rank.device)
        largest = torch.zeros_like(total)
        for gap_T in gaps(step.batches):
            total += gap_T.sum()
            largest = torch.maximum(largest, gap_T.max()) if len(gap_T) else largest
        if not rank.is_tp_first:
            total.zero_()
        if rank.world_size > 1:
            dist.all_reduce(total)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        gap = total.item() / step.valid_tokens
        step.metrics |= {"rollout/logprob_gap": gap, "rollout/logprob_gap_max": largest.item()}

    return compare_logprobs


def gaps(batches: list[ModelBatch]) -> Iterator[torch.Tensor]:
    """Yield the absolute differences of each microbatch with losses on this rank, float64 [valid tokens]."""
    for batch in batches:
        if batch.losses_BS is not None:
            assert batch.labels_BS is not None
            valid_BS = batch.labels_BS != IGNORE
            logprobs_T = -batch.losses_BS[valid_BS].double()
            yield (logprobs_T - batch.columns[OLD][valid_BS].double()).abs()
