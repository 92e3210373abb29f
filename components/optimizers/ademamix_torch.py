"""`setup.optimizer` of ademamix, which is missing in torch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.nn.optimizer import LocalOptimizer, Storage, groups_of, storage_of
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.updates import UpdateRule, adam_numbers, add_scaled, decay

OF_LOGARITHM: Final = 1e-8  # added to a decay in the half-life, as the authors' code does


def half_life(decay: float) -> float:
    """Return the number of updates in which the weight of a gradient in an average halves."""
    return math.log(0.5) / math.log(decay + OF_LOGARITHM)


class AdEMAMixOptimizer(LocalOptimizer):
    """AdEMAMix: m ← β₁ m + (1 − β₁) g; s ← β₃ s + (1 − β₃) g; v ← β₂ v + (1 − β₂) g²; w ← (1 − lr · decay) w −
    lr · (m̂ + α s) / (√v̂ + eps), with m̂ and v̂ corrected for their start at 0 (Pagliardini et al. 2024)."""

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_slow", "exp_avg_sq")
    counts: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        beta3: float,
        alpha: float,
        alpha_warmup: int | None,
        beta3_warmup: int | None,
        eps: float,
        storage: Storage | None = None,
        cautious_decay: bool = False,
        compiled: bool = False,
    ) -> None:
        """Initialize the optimizer. alpha_warmup, beta3_warmup: numbers of updates; None: no warm-up."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps}, storage, cautious_decay, compiled)
        self._beta3, self._beta3_warmup = beta3, beta3_warmup
        self._alpha, self._alpha_warmup = alpha, alpha_warmup
        self._first_half_life, self._last_half_life = half_life(betas[0]), half_life(beta3)

    @property
    def rule(self) -> UpdateRule:
        cautious = self._cautious_decay

        def rule(weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], count: Tensor | None, by: Any) -> None:
            assert count is not None
            count = count.to(weight.dtype)
            average, slow, square = moments
            average.lerp_(gradient, by["share"])
            slow.lerp_(gradient, 1 - self._slow_decay(count))
            square.mul_(1 - by["share_of_squares"]).add_(by["share_of_squares"] * gradient * gradient)
            first, second = -torch.expm1(count * by["log"]), -torch.expm1(count * by["log_of_squares"])
            update = (average / first + self._weight(count) * slow) / (square.sqrt() / second.sqrt() + by["eps"])
            decay(weight, update, by, cautious=cautious)
            add_scaled(weight, update, -by["lr"])

        return rule

    def _weight(self, count: Tensor) -> Tensor | float:
        """Return the weight of the slow average at an update."""
        return self._alpha * (count / self._alpha_warmup).clamp(max=1) if self._alpha_warmup else self._alpha

    def _slow_decay(self, count: Tensor) -> Tensor:
        """Return the decay of the slow average at an update: half-lives are interpolated linearly."""
        final = torch.full_like(count, self._beta3)
        if not self._beta3_warmup:
            return final
        done = count / self._beta3_warmup
        half_lives = torch.lerp(
            torch.full_like(count, self._first_half_life), torch.full_like(count, self._last_half_life), done
        )
        return torch.where(done < 1, torch.exp2(-1 / half_lives), final)

    def numbers(self, group: Mapping[str, Any]) -> dict[str, float]:
        return adam_numbers(group)


@op("setup.optimizer.ademamix", gives="optimizer")
def build_ademamix(
    plan: Plan,
    model: ModelParts,
    progress: Progress,
    rank: Rank,
    lr: float,
    betas: list[float],
    beta3: float,
    alpha: float,
    eps: float,
    weight_decay: float,
    alpha_warmup: int | None = None,
    beta3_warmup: int | None = None,
    states: str = "",
    stochastic_rounding: bool = False,
    cautious_decay: bool = False,
    compiled: Sequence[str] = (),
) -> Optimizer:
    """Build the optimizer from this rank's parameter groups; the plan decides weight decay per parameter. compiled:
    kinds of devices on which the update of a tensor is compiled."""
    return AdEMAMixOptimizer(
        groups_of(plan, model, weight_decay),
        lr=lr,
        betas=(betas[0], betas[1]),
        beta3=beta3,
        alpha=alpha,
        alpha_warmup=alpha_warmup,
        beta3_warmup=beta3_warmup,
        eps=eps,
        storage=storage_of(plan, model, progress, states, stochastic_rounding),
        cautious_decay=cautious_decay,
        compiled=rank.device.type in compiled,
    )
