"""`rollout.generate`, `rollout.advantages` and `rollout.compare`: what a step does around its scores.

Shapes: T positions of a microbatch that this rank holds.
"""

import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist

from xtrain.dsl.schema.losses import OLD
from xtrain.planner.plan import Plan
from xtrain.records.step_events import GeneratedText, GenerateEvent
from xtrain.runtime.data.documents.tokenizers import TextTokenizer
from xtrain.runtime.generation.sampling import Sampling
from xtrain.runtime.generation.text_generator import LogitsNotFinite, TextGenerator
from xtrain.runtime.input.feed import Feed
from xtrain.runtime.models.batch import ModelBatch
from xtrain.runtime.models.loss import IGNORE
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.models.router import ExpertRouter
from xtrain.runtime.monitoring.heartbeat import HeartbeatWriter
from xtrain.runtime.ops import op
from xtrain.runtime.parallel.mesh import Meshes
from xtrain.runtime.parallelize.fsdp import reshard
from xtrain.runtime.parallelize.pipeline import PipelineSchedule
from xtrain.runtime.reporting.records import Records
from xtrain.runtime.rollout.completions import Groups, KeptCompletions
from xtrain.runtime.rollout.groups import Prompt, SampledGroup, advantages_of
from xtrain.runtime.rollout.prompts import PromptReader
from xtrain.runtime.rollout.row_ranks import RowRanks
from xtrain.runtime.rollout.sampler import Sampler
from xtrain.runtime.state import Rank
from xtrain.runtime.step_state import NonFinite, Step, StepCall


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
    """Sample `group` completions of each prompt, by the microbatches that will be made of them.

    What is drawn follows from the seed, the place of the prompt in the run, the number of the completion and the
    position, whatever ranks there are. show: every so many steps those of the first prompt are recorded. steps,
    updates: the steps whose numbers their product divides sample for all up to the next one; each completion is that of
    `updates` of these. Raises NonFinite, on all ranks alike, where no token can be chosen.
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
        each = [(prompt, number) for prompt in microbatch for number in range(group)]
        completions = sampler.sample(
            [prompt.ids.tolist() for prompt, _ in each],
            [prompts.ends_of(prompt) for prompt, _ in each],
            [f"{seed} {prompt.place} {number}" for prompt, number in each],
        )
        parts = (completions[first : first + group] for first in range(0, len(each), group))
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
                # Up to the end of the period the prompts are those of `steps` steps before.
                made[number] = made.get(number - steps) or [sampled(each) for each in prompts.of_step(number)]
                kept_completions.keep(number, made[number])
        found = kept_completions.of(step.index)
        assert found is not None
        return found

    def run(step: Step) -> None:
        begin = time.perf_counter()
        model.train(False)
        try:
            # Rows of one token, and of prompts: a block that is compiled for the rows of a step is of no use for them.
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
            samples = [GeneratedText(first.prompt.text, each.text) for each in first.completions]
            event = GenerateEvent(step=step.index, node=node_id, weights="trained", samples=samples, seconds=seconds)
            records.event(event)

    return run


@op("rollout.advantages")
def advantages(
    feed: Feed, rank: Rank, meshes: Meshes, plan: Plan, scale: str, mask_truncated: bool = False
) -> StepCall:
    """How much better each completion is than the others of its group, and the rows that the step learns from.

    mask_truncated: not from completions that are cut.
    """
    counts = RowRanks.of(rank, meshes).is_first
    sampled = plan.node("rollout.generate").args
    leaves_out = "top_k" in sampled or sampled["top_p"] < 1

    def run(step: Step) -> None:
        for microbatch in step.groups:
            for group in microbatch:
                group.advantages = advantages_of(group.rewards, scale)
        rows = ([group.row(mask_truncated=mask_truncated) for group in microbatch] for microbatch in step.groups)
        step.microbatches = [feed.collate(each) for each in rows]
        sums = torch.tensor(summed(step.groups) if counts else [0.0] * 8, dtype=torch.float64, device=rank.device)
        if rank.world_size > 1:
            dist.all_reduce(sums)
        completions, groups, reward, squares, silent, tokens, cut, left_out = sums.tolist()
        step.reward = mean = reward / completions
        step.metrics |= {
            "rollout/reward_std": max(0.0, squares / completions - mean**2) ** 0.5,
            "rollout/no_signal": silent / groups,
            "rollout/tokens": tokens / completions,
            "rollout/cut": cut / completions,
            **({"rollout/left_out": left_out / tokens} if leaves_out else {}),
        }

    return run


def summed(microbatches: list[list[SampledGroup]]) -> list[float]:
    """Completions, groups, rewards and their squares, groups of equal rewards, tokens, completions that are cut, sum
    over tokens of the probability that was left out."""
    groups = [group for microbatch in microbatches for group in microbatch]
    completions = [each for group in groups for each in group.completions]
    rewards = np.concatenate([group.rewards for group in groups])
    silent = sum(bool((group.rewards == group.rewards[0]).all()) for group in groups)
    tokens, cut = sum(len(each.tokens) for each in completions), sum(each.cut for each in completions)
    left_out = sum(each.left_out for each in completions)
    numbers = (len(completions), len(groups), rewards.sum(), np.square(rewards).sum(), silent, tokens, cut, left_out)
    return [float(number) for number in numbers]


@op("rollout.compare")
def compare(rank: Rank, model: ModelParts, replay_routing: bool = False) -> StepCall:
    """How far the log-probabilities of the sampler are from those that the step has computed, in steps that have
    sampled; with `replay_routing` also how many experts the step would have chosen otherwise."""
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

    def run(step: Step) -> None:
        step.metrics |= {"rollout/routing_differs": differing()} if replay_routing else {}
        if not step.sampled:  # the weights have moved since
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

    return run


def gaps(batches: list[ModelBatch]) -> Iterator[torch.Tensor]:
    """The differences of each microbatch that this rank has losses of, float64 [valid tokens]."""
    for batch in batches:
        if batch.losses_BS is not None:
            assert batch.labels_BS is not None
            valid_BS = batch.labels_BS != IGNORE
            logprobs_T = -batch.losses_BS[valid_BS].double()
            yield (logprobs_T - batch.columns[OLD][valid_BS].double()).abs()
