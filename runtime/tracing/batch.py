"""Rows for a trace: each is one document that fills it, and every position of it is predicted."""

import torch
from attrs import evolve, frozen

from ...planner.plan import Plan
from ..data.collate.batch import Microbatch
from ..data.collate.collators import CollateChain


@frozen(kw_only=True, eq=False)
class FullRows:
    """Stands for the loader of a run: the same full rows in every step. whole, local: all positions, and a rank's."""

    whole: Microbatch
    local: Microbatch
    accumulate: int

    @classmethod
    def of(cls, plan: Plan, collate: CollateChain) -> "FullRows":
        args = plan.node("setup.loader").args
        whole = full_rows(args["micro"], args["sequence"], several=len(args["datasets"]) > 1)
        return cls(whole=whole, local=collate.local_part(whole), accumulate=args["accumulate"])

    def microbatches(self, step: int) -> list[Microbatch]:
        return [evolve(self.local) for _ in range(self.accumulate)]


def full_rows(rows: int, sequence: int, *, several: bool = False) -> Microbatch:
    """Whole rows, before context parallelism takes its part of them; `several`: datasets are to be told apart."""
    positions_BS = torch.arange(sequence).repeat(rows, 1)
    return Microbatch(
        input_ids_BS=torch.zeros_like(positions_BS),
        labels_BS=torch.zeros_like(positions_BS),
        positions_BS=positions_BS,
        real_BS=torch.ones_like(positions_BS, dtype=torch.bool),
        cumulative_lengths=torch.arange(0, rows * sequence + 1, sequence, dtype=torch.int32),
        real_lengths=torch.full((rows,), sequence, dtype=torch.int32),
        dataset_B=torch.zeros(rows, dtype=torch.int64) if several else None,
        num_valid=rows * sequence,
    )
