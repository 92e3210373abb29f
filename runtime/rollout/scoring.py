"""`rollout.score`: what all rewards have in common."""

from collections.abc import Callable

import torch

from ..state import Step
from .groups import Prompt
from .row_ranks import RowRanks

StepCall = Callable[[Step], None]
Score = Callable[[Prompt, str], float]
"""From a prompt and the text of a completion."""


def scoring(score: Score, row_ranks: RowRanks) -> StepCall:
    """One of the ranks with the same rows scores each completion, the others are told."""

    def run(step: Step) -> None:
        groups = [group for microbatch in step.groups for group in microbatch]
        count = sum(len(group.completions) for group in groups)
        if row_ranks.is_first:
            found = [score(group.prompt, each.text) for group in groups for each in group.completions]
        else:
            found = [0.0] * count
        rewards = row_ranks.share(torch.tensor(found, dtype=torch.float64, device=row_ranks.rank.device)).cpu().numpy()
        first = 0
        for group in groups:
            group.rewards = rewards[first : first + len(group.completions)]
            first += len(group.completions)

    return run
