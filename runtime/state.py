"""What ops share while a plan runs: who this rank is, how far the run has come, and the step under way."""

from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from .data.collate.batch import Microbatch

if TYPE_CHECKING:
    # A process that only reads needs no model.
    from .models.batch import RowLosses


@frozen(kw_only=True)
class Rank:
    """This process among all of them."""

    rank: int
    local_rank: int
    world_size: int
    data_rank: int
    data_ranks: int
    device: torch.device
    pipeline_ranks: int
    coordinates: dict[str, int]
    """Its place on every axis of the mesh."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def speaks(self) -> bool:
        """Whether what this rank counts of its positions is to be summed: tensor-parallel peers count the same."""
        return self.coordinates["tp"] == 0


@define
class Progress:
    """How far the run has come. `step` counts optimizer steps that have ended, `tokens` the positions they saw.

    measured: metric → (the step after which it was measured last, its value), as `eval/web/loss`.
    """

    step: int = 0
    tokens: int = 0
    measured: dict[str, tuple[int, float]] = field(factory=dict)


@define(kw_only=True)
class Step:
    """One optimizer step under way. `index` counts from 0; sums are over valid tokens of all ranks once reduced."""

    index: int
    phase: str = ""
    """The name of the phase that it lies in."""
    microbatches: list[Microbatch] = field(factory=list)
    valid_tokens: int = 0
    loss_sum: Tensor | None = None
    row_losses: "list[RowLosses]" = field(factory=list)
    loss: float = float("nan")
    grad_norm: float = float("nan")
    lr: float = 0.0
    began: float = 0.0
    data_seconds: float = 0.0


class Halt(Exception):
    """All ranks have agreed to leave the loop before this step; `event` says why (`sigterm`, `sigint`, …)."""

    def __init__(self, event: str) -> None:
        super().__init__(event)
        self.event = event


class SkipStep(Exception):
    """This step has nothing to learn from; it is counted and the next one follows."""


class NonFinite(Exception):
    """The loss or the gradient norm is not a number, on all ranks alike."""

    agreed = True

    def __init__(self, step: int, loss: float, grad_norm: float) -> None:
        super().__init__(f"step {step}: loss {loss}, gradient norm {grad_norm}")
        self.step, self.loss, self.grad_norm = step, loss, grad_norm


Resources = dict[str, Any]
