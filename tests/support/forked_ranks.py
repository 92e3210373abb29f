"""Runs plans on several ranks of this machine, fast: jobs of forked ranks, with faults and further packages.

    with ForkedRanks() as ranks:
        outcome = ranks.run(plan, folder, name="tp2")

Does not import torch itself.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xtrain.plan.plan import Plan
from xtrain.runtime.inspect.rank_jobs import TIMEOUT, Outcome, RankForks, RanksFailed, saved_tensors

__all__ = ["TIMEOUT", "ForkedRanks", "Mutation", "Outcome", "RanksFailed", "saved_tensors"]


class Mutation:
    """A fault of `rank_mutations.py` by name, and what it is called with."""

    def __init__(self, name: str, **arguments: Any) -> None:
        self.name, self.arguments = name, arguments

    def __str__(self) -> str:
        return " ".join((self.name, *(f"{name}={value}" for name, value in self.arguments.items())))


OTHER_PACKAGES = [str(Path(__file__).with_name(name)) for name in ("other_package", "package_with_stacks")]


class ForkedRanks(RankForks):
    """Has a process that ranks are forked from, for as long as it is open; `OTHER_PACKAGES` are installed there."""

    def forker(self) -> tuple[list[str], list[str]]:
        return [sys.executable, str(Path(__file__).with_name("rank_forker.py"))], OTHER_PACKAGES

    def run(
        self,
        plan: Plan,
        folder: Path,
        *,
        name: str,
        timeout: float = TIMEOUT,
        more: Mapping[str, Any] | None = None,
        mutation: Mutation | None = None,
        saves: bool = True,
    ) -> Outcome:
        """saves: whether checkpoints are written, which is a third of what a small job costs."""
        job = {
            "entry": "forked_rank:run",
            "saves": saves,
            "mutation": mutation.name if mutation else "",
            "mutation_arguments": mutation.arguments if mutation else {},
            **(more or {}),
        }
        return super().run(plan, folder, name=name, timeout=timeout, more=job)
