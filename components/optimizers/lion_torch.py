"""`setup.optimizer` of lion, which is missing in torch."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.nn.optimizer import LocalOptimizer, Storage, groups_of, storage_of
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.updates import UpdateRule, add_scaled, decay


class LionOptimizer(LocalOptimizer):
    """Lion: u = sign(β₁ m + (1 − β₁) g); w ← (1 − lr · decay) w − lr · u; m ← β₂ m + (1 − β₂) g."""

    moments: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        storage: Storage | None = None,
        cautious_decay: bool = False,
        compiled: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas}, storage, cautious_decay, compiled)

    @property
    def rule(self) -> UpdateRule:
        cautious = self._cautious_decay

        def rule(weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], count: Tensor | None, by: Any) -> None:
            (average,) = moments
            update = torch.lerp(average, gradient, by["share"]).sign_()
            decay(weight, update, by, cautious=cautious)
            add_scaled(weight, update, by["factor"])
            average.lerp_(gradient, by["next_share"])

        return rule

    def numbers(self, group: Mapping[str, Any]) -> dict[str, float]:
        (stays, stays_next), share = group["betas"], group["lr"] * group["weight_decay"]
        shares = {"share": 1 - stays, "next_share": 1 - stays_next}
        return {"factor": -group["lr"], "decay": share, "keep": 1 - share, **shares}


@op("setup.optimizer.lion", gives="optimizer")
def build_lion(
    plan: Plan,
    model: ModelParts,
    progress: Progress,
    rank: Rank,
    lr: float,
    betas: list[float],
    weight_decay: float,
    states: str = "",
    stochastic_rounding: bool = False,
    cautious_decay: bool = False,
    compiled: Sequence[str] = (),
) -> Optimizer:
    """Build the optimizer from this rank's parameter groups; the plan decides weight decay per parameter. compiled:
    kinds of devices on which the update of a tensor is compiled."""
    groups = groups_of(plan, model, weight_decay)
    storage = storage_of(plan, model, progress, states, stochastic_rounding)
    return LionOptimizer(groups, lr, (betas[0], betas[1]), storage, cautious_decay, rank.device.type in compiled)
