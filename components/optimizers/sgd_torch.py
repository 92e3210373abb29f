"""`setup.optimizer` of sgd: torch's implementation over lists of tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.nn.optimizer import LocalOptimizer, Storage, groups_of, storage_of
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.updates import UpdateRule


class LocalSGD(LocalOptimizer):
    """SGD: g ← g + decay · w; m ← μ m + g; w ← w − lr · m, or with Nesterov's momentum w − lr · (g + μ m)."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float,
        nesterov: bool,
        storage: Storage | None = None,
        compiled: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr}, storage, compiled=compiled)
        self.moments = ("momentum_buffer",) if momentum else ()  # type: ignore[misc]
        self._momentum, self._nesterov = momentum, nesterov

    @property
    def rule(self) -> UpdateRule:
        nesterov = self._nesterov

        def rule(weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], count: Tensor | None, by: Any) -> None:
            step = gradient + by["decay"] * weight
            for average in moments:
                average.mul_(by["momentum"]).add_(step)
                step = step + by["momentum"] * average if nesterov else average
            weight.sub_(by["lr"] * step)

        return rule

    def numbers(self, group: Mapping[str, Any]) -> dict[str, float]:
        return {"lr": group["lr"], "decay": group["weight_decay"], "momentum": self._momentum}

    def update(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor],
        moments: Sequence[list[Tensor]],
        counts: list[Tensor],
    ) -> None:
        sgd(
            weights,
            gradients,
            [*moments[0]] if moments else [None] * len(weights),
            foreach=True,
            weight_decay=group["weight_decay"],
            momentum=self._momentum,
            lr=group["lr"],
            dampening=0.0,
            nesterov=self._nesterov,
            maximize=False,
        )


@op("setup.optimizer.sgd", gives="optimizer")
def build_sgd(
    plan: Plan,
    model: ModelParts,
    progress: Progress,
    rank: Rank,
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    states: str = "",
    stochastic_rounding: bool = False,
    compiled: Sequence[str] = (),
) -> Optimizer:
    """Build the optimizer from this rank's parameter groups; the plan decides weight decay per parameter. compiled:
    kinds of devices on which the update of a tensor is compiled."""
    groups = groups_of(plan, model, weight_decay)
    storage = storage_of(plan, model, progress, states, stochastic_rounding)
    return LocalSGD(groups, lr, momentum, nesterov and momentum > 0, storage, rank.device.type in compiled)
