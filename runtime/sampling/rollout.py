"""Rollouts: completions from the model in training, with their log-probabilities, advantages and comparison."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from xtrain.dsl.schema.losses import OLD
from xtrain.dsl.schema.policy import KL_WEIGHT
from xtrain.plan.plan import Plan
from xtrain.records.training_events import GeneratedText, GenerateEvent
from xtrain.runtime.base.mesh import Meshes
from xtrain.runtime.base.ops import op, op_of
from xtrain.runtime.base.state import KlWeight, Progress, Rank, Resources
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
    overlong_rewards,
)
from xtrain.runtime.nn.loss import IGNORE, Term
from xtrain.runtime.nn.parallelize import reshard
from xtrain.runtime.nn.pipeline import PipelineSchedule
from xtrain.runtime.nn.router import ExpertRouter
from xtrain.runtime.nn.texts import Sampling
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.unit_losses import UnitTerm
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import Records
from xtrain.runtime.sampling.engine_sampler import EngineSampler, RunEngine
from xtrain.runtime.sampling.environments import OpenedEnvironment
from xtrain.runtime.sampling.prompts import Groups, KeptCompletions, PromptReader
from xtrain.runtime.sampling.sampler import RowRanks, Sampler
from xtrain.runtime.sampling.text_generator import LogitsNotFinite, TextGenerator


@op("rollout.generate")
def generate(
    model: ModelParts,
    tokenizer: TextTokenizer,
    rank: Rank,
    meshes: Meshes,
    prompts: PromptReader,
    plan: Plan,
    records: Records,
    node_id: str,
    group: int,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    top_k: int | None = None,
    replay_routing: bool = False,
    logprobs: str = "raw",
    compare: int = 0,
    show: int | None = None,
    steps: int = 1,
    updates: int = 1,
    stale: int = 0,
    environment: str | None = None,
    turns: int = 1,
    environments: Mapping[str, OpenedEnvironment] | None = None,
    feed: Feed | None = None,
    kept_completions: KeptCompletions | None = None,
    pipeline: PipelineSchedule | None = None,
    beat: HeartbeatWriter | None = None,
    engine: RunEngine | None = None,
) -> StepCall:
    """Sample `group` completions of each prompt, in the microbatches that they will form.

    Draws depend on the seed, the prompt's place in the run, the completion's number and the position, whatever the
    ranks. show: record those of the first prompt every `show` steps. steps, updates: steps divisible by their product
    sample for all steps up to the next such step; each completion is used in `updates` of them. environment:
    completions are episodes with it, of at most `turns` turns. engine: samples instead of the ranks of the run. stale:
    it is asked for the completions of this many steps ahead. Raises NonFinite on all ranks alike if no token can be
    chosen, PartFailed if the environment does something invalid, and EngineFailed on all ranks alike.
    """
    sampling, row_ranks = Sampling(temperature=temperature, top_k=top_k, top_p=top_p), RowRanks.of(rank, meshes)
    sampler: Sampler | EngineSampler
    if engine is not None:
        sampler = EngineSampler(
            engine=engine, tokenizer=tokenizer, row_ranks=row_ranks, sampling=sampling, most=max_tokens, beat=beat
        )
    else:
        sampler = Sampler(
            author=TextGenerator(model=model, rank=rank, pipeline=pipeline, beat=beat),
            tokenizer=tokenizer,
            row_ranks=row_ranks,
            sampling=sampling,
            most=max_tokens,
            records=replay_routing,
            processed=logprobs == "processed",
            compared=compare,
        )

    player, most = None, max_tokens
    names = [dataset.name for dataset in prompts.loader.datasets]
    if environment is not None:
        from xtrain.runtime.sampling.episodes import EpisodePlayer  # only for runs with environments

        assert environments is not None
        player = EpisodePlayer.of(plan, sampler, environments[environment], names, turns)
        most = player.positions + 1

    def completed(pairs: list[tuple[Prompt, int]]) -> list[Completion]:
        keys = [f"{seed} {prompt.place} {number}" for prompt, number in pairs]
        if player is None:
            ids = [prompt.ids.tolist() for prompt, _ in pairs]
            return sampler.sample(ids, [prompts.ends_of(prompt) for prompt, _ in pairs], keys)
        asked = [prompt for prompt, _ in pairs]
        begins = [f"{seed} {prompt.place} begin" for prompt in asked]
        return player.play(player.starts(asked, keys, begins, [names[max(0, prompt.dataset)] for prompt in asked]))

    def sampled(microbatch: list[Prompt]) -> list[SampledGroup]:
        pairs = [(prompt, number) for prompt in microbatch for number in range(group)]
        completions = completed(pairs)
        parts = (completions[first : first + group] for first in range(0, len(pairs), group))
        return [SampledGroup(prompt, part) for prompt, part in zip(microbatch, parts, strict=True)]

    def asked_for(number: int) -> Callable[[], Groups]:
        """Ask the engine for the completions of a step, and return the function that waits for them."""
        assert isinstance(sampler, EngineSampler)
        microbatches = prompts.of_step(number)
        pairs = [(prompt, each) for microbatch in microbatches for prompt in microbatch for each in range(group)]
        coming = sampler.ask(
            [prompt.ids.tolist() for prompt, _ in pairs],
            [prompts.ends_of(prompt) for prompt, _ in pairs],
            [f"{seed} {prompt.place} {each}" for prompt, each in pairs],
        )

        def groups() -> Groups:
            completions = iter(coming())
            return [[SampledGroup(prompt, [next(completions) for _ in range(group)]) for prompt in microbatch]
                    for microbatch in microbatches]  # fmt: skip

        return groups

    def of_step(step: Step) -> list[list[SampledGroup]]:
        if engine is not None and player is None and kept_completions is None:
            step.sampled = True
            return asked_for(step.index)()
        if stale:
            assert kept_completions is not None and feed is not None
            kept_completions.find(step.index, prompts, group=group, most=most, experts=False)
            for number in range(step.index, min(step.index + stale + 1, feed.steps)):
                if not kept_completions.has(number):
                    kept_completions.await_(number, asked_for(number))
            groups = kept_completions.of(step.index)
            assert groups is not None
            step.sampled = all(each.version == step.index for group in groups[0] for each in group.completions)
            return groups
        if kept_completions is None:
            step.sampled = True
            return [sampled(microbatch) for microbatch in prompts.of_step(step.index)]
        assert feed is not None
        widths = sampler.widths if isinstance(sampler, Sampler) else {}
        kept_completions.find(step.index, prompts, group=group, most=most, experts=replay_routing, widths=widths)
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

    @contextmanager
    def sampling_mode(step: Step) -> Iterator[None]:
        model.train(False)
        try:
            # Rows of one token and of prompts: a block compiled for the rows of a step does not help here.
            with torch.compiler.set_stance("force_eager"):
                yield
        except LogitsNotFinite as problem:
            nan = float("nan")
            raise NonFinite(step.index + 1, nan, nan, f"step {step.index + 1}: {problem}") from problem
        finally:
            reshard(model)
            model.train()

    def sample_completions(step: Step) -> None:
        def sample(asked: list[Prompt]) -> list[SampledGroup]:
            with sampling_mode(step):
                micro = prompts.loader.micro
                parts = (asked[first : first + micro] for first in range(0, len(asked), micro))
                return [group for part in parts for group in sampled(part)]

        begin, step.sample = time.perf_counter(), sample
        with sampling_mode(step):
            step.groups = of_step(step)
        if engine is not None:
            ages = [step.index - one.version for some in step.groups for each in some for one in each.completions
                    if one.version is not None]  # fmt: skip
            step.metrics["rollout/age"] = sum(ages) / max(1, len(ages))
            for remark in engine.remarks():
                records.warn(remark, step=step.index + 1)
        for sampled_group in (each for microbatch in step.groups for each in microbatch if player is not None):
            sampled_group.rewards = sampled_group.rewards_of_episodes()
        if show is not None and step.index % show == 0:
            first, seconds = step.groups[0][0], time.perf_counter() - begin
            samples = [GeneratedText(_begun(first.prompt, one, tokenizer), one.text) for one in first.completions]
            event = GenerateEvent(step=step.index, node=node_id, weights="trained", samples=samples, seconds=seconds)
            records.event(event)

    return sample_completions


def _begun(prompt: Prompt, completion: Completion, tokenizer: TextTokenizer) -> str:
    """Return the text before a completion: the prompt, or what an environment said first."""
    if completion.sampled is None:
        return prompt.text
    first = next((place for place, own in enumerate(completion.sampled) if own), len(completion.tokens))
    return tokenizer.decode(completion.tokens[:first])


@op("rollout.replace")
def replace(
    feed: Feed, rank: Rank, meshes: Meshes, plan: Plan, prompts: PromptReader, resources: Resources, attempts: int
) -> StepCall:
    """Replace groups of equal rewards by groups of other prompts (dynamic sampling, arXiv 2503.14476, §3.2).

    In attempt n a place of the step takes the prompt that has this place n times the steps of the run later, and so the
    same on every layout and after a resume. After `attempts` groups the last one stays.
    """
    counts = RowRanks.of(rank, meshes).is_first
    score: StepCall | None = None
    if "environment" not in plan.node("rollout.generate").args:
        node = plan.node("rollout.score")
        score = op_of(node).bind(node, {**resources, "node_id": node.id})()

    def sampled_instead(step: Step, asked: list[Prompt]) -> list[SampledGroup]:
        assert step.sample is not None
        groups = step.sample(asked)
        if score is not None:
            score(Step(index=step.index, groups=[groups]))
        for group in groups:
            group.rewards = group.rewards if score is not None else group.rewards_of_episodes()
        return groups

    def replace_silent(step: Step) -> None:
        first = [[group.prompt.place for group in microbatch] for microbatch in step.groups]
        replaced = 0
        for attempt in range(1, attempts):
            places = [(m, n) for m, some in enumerate(step.groups) for n, group in enumerate(some) if is_silent(group)]
            most = torch.tensor(len(places), device=rank.device)
            if rank.world_size > 1:
                dist.all_reduce(most, op=dist.ReduceOp.MAX)
            if not most.item():
                break
            other = step.index + attempt * feed.steps
            asked = [prompts.instead_of(first[m][n], step.index, other) for m, n in places]
            # Ranks with fewer of them sample one more often than it is used.
            spare = asked[-1] if asked else step.groups[0][0].prompt
            found = sampled_instead(step, asked + [spare] * (int(most.item()) - len(asked)))
            for (m, n), group in zip(places, found, strict=False):
                step.groups[m][n] = group
            replaced += len(places)
        numbers = (replaced, sum(map(len, step.groups)))
        sums = torch.tensor(numbers if counts else (0, 0), dtype=torch.float64, device=rank.device)
        if rank.world_size > 1:
            dist.all_reduce(sums)
        step.metrics["rollout/replaced"] = (sums[0] / sums[1]).item()

    return replace_silent


def is_silent(group: SampledGroup) -> bool:
    """Return True if all rewards are equal, so that advantages are 0."""
    return bool((group.rewards == group.rewards[0]).all())


@op("rollout.advantages")
def advantages(
    feed: Feed,
    rank: Rank,
    meshes: Meshes,
    plan: Plan,
    scale: str,
    mask_truncated: bool = False,
    overlong: int | None = None,
) -> StepCall:
    """Compute each completion's advantage over its group, and the rows that the step trains on.

    mask_truncated: exclude completions that were cut. overlong: number of last tokens before `max_tokens` in which
    lengths are punished.
    """
    form_rows = rows(feed, rank, meshes, plan, mask_truncated)
    counts, longest = RowRanks.of(rank, meshes).is_first, plan.node("rollout.generate").args["max_tokens"]

    def punish(step: Step, tokens: int) -> None:
        sums = torch.zeros(2, dtype=torch.float64)
        for group in (each for microbatch in step.groups for each in microbatch):
            lengths = np.array([len(completion.tokens) for completion in group.completions])
            punished = overlong_rewards(lengths, longest, tokens)
            group.rewards = group.rewards + punished
            sums += torch.tensor([punished.sum(), len(punished)]) * counts
        sums = sums.to(rank.device)
        if rank.world_size > 1:
            dist.all_reduce(sums)
        step.metrics["rollout/overlong"] = (sums[0] / sums[1]).item()

    def set_advantages(step: Step) -> None:
        if overlong is not None:
            punish(step, overlong)
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
    leaves_out, converses = "top_k" in sampled or sampled["top_p"] < 1, "environment" in sampled

    def form_rows(step: Step) -> None:
        rows = ([group.row(mask_truncated=mask_truncated) for group in microbatch] for microbatch in step.groups)
        step.microbatches = feed.collate.of_step(rows)
        sums = torch.tensor(summed(step.groups) if counts else [0.0] * 11, dtype=torch.float64, device=rank.device)
        if rank.world_size > 1:
            dist.all_reduce(sums)
        completions, groups, scored, reward, squares, silent, tokens, cut, left_out, turns, lost = sums.tolist()
        if scored:
            step.reward = mean = reward / scored
            deviation = max(0.0, squares / scored - mean**2) ** 0.5
            step.metrics |= {"rollout/reward_std": deviation, "rollout/no_signal": silent / groups}
        step.metrics |= {
            "rollout/tokens": tokens / completions,
            "rollout/cut": cut / completions,
            **({"rollout/left_out": left_out / tokens} if leaves_out else {}),
            **({"rollout/turns": turns / completions, "rollout/lost": lost / completions} if converses else {}),
        }

    return form_rows


def summed(microbatches: list[list[SampledGroup]]) -> list[float]:
    """Sum completions, groups, scored completions, rewards and their squares, groups of equal rewards, tokens, cut
    completions, the left-out probability over tokens, turns of episodes, and lost episodes."""
    groups = [group for microbatch in microbatches for group in microbatch]
    completions = [completion for group in groups for completion in group.completions]
    rewards = np.concatenate([group.rewards for group in groups])
    silent = sum(is_silent(group) for group in groups if len(group.rewards))
    tokens = sum(completion.count for completion in completions)
    cut = sum(completion.cut for completion in completions)
    left_out = sum(completion.left_out for completion in completions)
    scores = (len(rewards), rewards.sum(), np.square(rewards).sum(), silent)
    turns, lost = (sum(numbers) for numbers in zip(*((each.turns, each.lost) for each in completions), strict=True))
    return [float(number) for number in (len(completions), len(groups), *scores, tokens, cut, left_out, turns, lost)]


@op("rollout.compare")
def compare(rank: Rank, model: ModelParts, replay_routing: bool = False, distributions: bool = False) -> StepCall:
    """Compare the sampler's log-probabilities with those that the step computed, in steps that sampled; with
    `distributions` also the probabilities of its most probable tokens, and with `replay_routing` the share of experts
    that the step would have chosen differently."""
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
        step.metrics |= measured("rollout/logprob_gap", gaps(step.batches), step.valid_tokens)
        if distributions:
            step.metrics |= measured("rollout/divergence", divergences(step.batches), step.valid_tokens)

    def measured(name: str, parts: Iterator[torch.Tensor], tokens: int) -> dict[str, float]:
        """Return the mean over all ranks, and with `_max` the maximum."""
        total = torch.zeros((), dtype=torch.float64, device=rank.device)
        largest = torch.zeros_like(total)
        for part_T in parts:
            total += part_T.sum()
            largest = torch.maximum(largest, part_T.max()) if len(part_T) else largest
        if not rank.is_tp_first:
            total.zero_()
        if rank.world_size > 1:
            dist.all_reduce(total)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return {name: total.item() / tokens, f"{name}_max": largest.item()}

    return compare_logprobs


def gaps(batches: list[ModelBatch]) -> Iterator[torch.Tensor]:
    """Yield the absolute differences of each microbatch with losses on this rank, float64 [valid tokens]."""
    for batch in batches:
        if batch.losses_BS is not None:
            assert batch.labels_BS is not None
            valid_BS = batch.labels_BS != IGNORE
            sampled_T = batch.columns[OLD][valid_BS]
            yield (-batch.losses_BS[valid_BS].to(sampled_T.dtype).double() - sampled_T.double()).abs()


def divergences(batches: list[ModelBatch]) -> Iterator[torch.Tensor]:
    """Yield the divergences from the sampler of each microbatch with losses on this rank, float64 [valid tokens]."""
    for batch in batches:
        if batch.apart_BS is not None:
            assert batch.labels_BS is not None
            yield batch.apart_BS[batch.labels_BS != IGNORE]


@op("step.kl_weight", traced=False)
def weigh(model: ModelParts, progress: Progress, weight: float) -> StepCall:
    """Give the loss the weight of the step: `weight` at the start of a run, and then as adapted."""
    term = model.parts[0].head.term
    assert isinstance(term, Term | UnitTerm) and term.kl_weight is not None
    of_loss = term.kl_weight

    def set_weight(step: Step) -> None:
        progress.kl_weight = progress.kl_weight or KlWeight(weight)
        of_loss.value = step.metrics[KL_WEIGHT] = progress.kl_weight.value

    return set_weight


@op("step.adapt_kl_weight", traced=False)
def adapt(progress: Progress, target: float, gain: float) -> StepCall:
    """Adapt the weight by the divergence of the step, which all ranks know; see `KlWeight.adapt`."""

    def adapt_weight(step: Step) -> None:
        assert progress.kl_weight is not None
        progress.kl_weight.adapt(step.metrics["policy/reference_kl"], target, gain)

    return adapt_weight
