"""`rollout.score`: what all rewards have in common."""

from collections.abc import Callable, Sequence

import torch

from xtrain.runtime.rollout.groups import Prompt, SampledGroup
from xtrain.runtime.rollout.row_ranks import RowRanks
from xtrain.runtime.step_state import Step, StepCall

Score = Callable[[SampledGroup], Sequence[float]]
"""From a group to the rewards of its completions."""


def by_text(reward: Callable[[Prompt, str], float]) -> Score:
    """Scores that follow from a prompt and the text of a completion."""
    return lambda group: [reward(group.prompt, each.text) for each in group.completions]


def scoring(score: Score, row_ranks: RowRanks) -> StepCall:
    """One of the ranks with the same rows scores each group, the others are told."""

    def run(step: Step) -> None:
        groups = [group for microbatch in step.groups for group in microbatch]
        count = sum(len(group.completions) for group in groups)
        found = [reward for group in groups for reward in score(group)] if row_ranks.is_first else [0.0] * count
        rewards = row_ranks.share(torch.tensor(found, dtype=torch.float64, device=row_ranks.rank.device)).cpu().numpy()
        first = 0
        for group in groups:
            group.rewards = rewards[first : first + len(group.completions)]
            first += len(group.completions)

    return run
