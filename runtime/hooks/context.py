"""`RunContext`: what a function of the user's own gets to see of a run."""

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch.optim import Optimizer

from xtrain.planner.plan import Plan
from xtrain.runtime.data.collate.batch import Microbatch
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.state import Rank


@frozen(kw_only=True)
class RunContext:
    """The state of a run where a hook is called.

    place: of the hook. step: number of the step under way, from 1; outside of steps, of the last one that has ended.
    total: how many steps the whole run has. epoch: epochs of data that have been taken. tokens: positions that the
    steps before have seen. phase: name of the phase. rows: the microbatches of this rank, empty outside of a step,
    and on ranks that read none. valid_tokens: of the step on all ranks, 0 before they are counted. loss: mean over
    these, and grad_norm, before clipping: NaN until they have been summed over ranks, behind `after_backward`.
    objective: mean of what was minimised; None until then, and where that is the cross-entropy. lr: of the step, also
    before the optimizer has it. measured: metric → value of the latest evaluations, as `eval/web/loss`.
    model: what this rank holds of the model: `named_parameters()`, with their names in the whole model, and `parts`.
    failure: what has ended the run, `at_failure` alone. status: how it has ended, `at_end` alone.
    resources: name → whatever else the nodes of the plan have made, which may change with the version.
    """

    place: str
    step: int
    total: int
    epoch: float
    tokens: int
    phase: str
    rows: tuple[Microbatch, ...]
    valid_tokens: int
    loss: float
    objective: float | None
    grad_norm: float
    lr: float
    measured: Mapping[str, float]
    model: ModelParts
    optimizer: Optimizer
    rank: Rank
    plan: Plan
    failure: BaseException | None
    status: str
    resources: Mapping[str, Any]

    @property
    def device(self) -> torch.device:
        """That this rank computes on."""
        return self.rank.device
