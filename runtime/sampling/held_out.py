"""Evaluation of a run with rollouts: the rewards of completions of held-out prompts."""

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen

from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op_of
from xtrain.runtime.base.state import Rank, Resources
from xtrain.runtime.feed.packing.stored_rows import RowReader
from xtrain.runtime.feed.prepared import PreparedDataset
from xtrain.runtime.feed.tokenizers import TextTokenizer
from xtrain.runtime.nn.batch import SampledGroup, Step, StepCall
from xtrain.runtime.nn.texts import Sampling, TextEnds
from xtrain.runtime.sampling.prompts import check_prompts, ends_of, prompt_of
from xtrain.runtime.sampling.rollout import RowRanks, Sampler
from xtrain.runtime.sampling.text_generator import TextGenerator


@frozen(kw_only=True, eq=False)
class HeldOutPrompts:
    """One completion of each held-out prompt. rows: evaluated over all ranks; micro: sampled at once. seed: of the
    draws, the same in each evaluation."""

    reader: RowReader
    tokenizer: TextTokenizer
    ends: TextEnds
    sampler: Sampler
    score: StepCall
    rank: Rank
    rows: int
    micro: int
    seed: int

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
    ) -> "HeldOutPrompts":
        """Prepare an evaluation. rows: at most. greedy: complete with the likeliest tokens. Raises DataError for
        prompts that rollouts cannot sample from."""
        reader = dataset.parts["hold-out"]
        positions = plan.node("setup.prompts").args["positions"]
        sampled = plan.node("rollout.generate").args
        most = sampled["max_tokens"]
        check_prompts(f"{dataset.name}, hold-out", reader, positions + 1 - most, most)
        temperature = 0.0 if greedy else sampled["temperature"]
        sampling = Sampling(temperature=temperature, top_k=sampled.get("top_k"), top_p=sampled["top_p"])
        node = plan.node("rollout.score")
        return cls(
            reader=reader,
            tokenizer=tokenizer,
            ends=ends_of(plan, dataset.name, tokenizer),
            sampler=Sampler(author=author, tokenizer=tokenizer, row_ranks=row_ranks, sampling=sampling, most=most),
            score=op_of(node).bind(node, {**resources, "node_id": node.id})(),
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
        completions = self.sampler.sample(
            [prompt.ids.tolist() for prompt in prompts],
            [self.ends] * len(prompts),
            [f"{self.seed} held out {number}" for number in numbers],
        )
        return [SampledGroup(prompt, [completion]) for prompt, completion in zip(prompts, completions, strict=True)]
