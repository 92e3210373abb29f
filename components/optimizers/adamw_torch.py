"""`setup.optimizer` of adamw: torch's fused implementation."""

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
from xtrain.runtime.nn.updates import UpdateRule, adam_numbers, adamw, decay_cautiously


class LocalAdamW(LocalOptimizer):
    """AdamW: m ← β₁ m + (1 − β₁) g; v ← β₂ v + (1 − β₂) g²; w ← (1 − lr · decay) w − lr · m̂ / (√v̂ + eps), with m̂ and
    v̂ corrected for their start at 0 (Loshchilov and Hutter 2019)."""

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    counts: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        storage: Storage | None = None,
        cautious_decay: bool = False,
        compiled: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps}, storage, cautious_decay, compiled)

    @property
    def rule(self) -> UpdateRule:
        return adamw(cautious=self._cautious_decay)

    def numbers(self, group: Mapping[str, Any]) -> dict[str, float]:
        return adam_numbers(group)

    def update(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor],
        moments: Sequence[list[Tensor]],
        counts: list[Tensor],
    ) -> None:
        decay = group["weight_decay"]
        if decay and self._cautious_decay:
            for weight, gradient, average in zip(weights, gradients, moments[0], strict=True):
                # The sign is the update's, because the denominator is positive.
                decay_cautiously(weight, torch.lerp(average, gradient, 1 - group["betas"][0]), group["lr"] * decay)
            decay = 0.0
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
            weights,
            gradients,
            moments[0],
            moments[1],
            [],
            counts,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=decay,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


@op("setup.optimizer.adamw", gives="optimizer")
def build_adamw(
    plan: Plan,
    model: ModelParts,
    progress: Progress,
    rank: Rank,
    lr: float,
    betas: list[float],
    eps: float,
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
    compiles = rank.device.type in compiled
    return LocalAdamW(groups, lr, (betas[0], betas[1]), eps, storage, cautious_decay, compiles)
