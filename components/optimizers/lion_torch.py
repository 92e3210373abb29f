"""`setup.optimizer` of lion, which is missing in torch."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress
from xtrain.runtime.nn.optimizer import LocalOptimizer, Storage, decay_cautiously, groups_of, storage_of
from xtrain.runtime.nn.transformer import ModelParts


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
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas}, storage, cautious_decay)

    def update(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor],
        moments: Sequence[list[Tensor]],
        counts: list[Tensor],
    ) -> None:
        (stays, stays_next), lr = group["betas"], group["lr"]
        for weight, gradient, average in zip(weights, gradients, moments[0], strict=True):
            update = torch.lerp(average, gradient, 1 - stays).sign_()
            if group["weight_decay"] and self._cautious_decay:
                decay_cautiously(weight, update, lr * group["weight_decay"])
            elif group["weight_decay"]:
                weight.mul_(1 - lr * group["weight_decay"])
            weight.add_(update, alpha=-lr)
            average.lerp_(gradient, 1 - stays_next)


@op("setup.optimizer.lion", gives="optimizer")
def build_lion(
    plan: Plan,
    model: ModelParts,
    progress: Progress,
    lr: float,
    betas: list[float],
    weight_decay: float,
    states: str = "",
    stochastic_rounding: bool = False,
    cautious_decay: bool = False,
) -> Optimizer:
    """Build the optimizer from this rank's parameter groups; the plan decides weight decay per parameter."""
    storage = storage_of(plan, model, progress, states, stochastic_rounding)
    return LionOptimizer(groups_of(plan, model, weight_decay), lr, (betas[0], betas[1]), storage, cautious_decay)
