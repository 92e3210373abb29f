"""`setup.optimizer` of sgd: torch's implementation over lists of tensors."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress
from xtrain.runtime.nn.optimizer import LocalOptimizer, Storage, groups_of, storage_of
from xtrain.runtime.nn.transformer import ModelParts


class LocalSGD(LocalOptimizer):
    """SGD: g ← g + decay · w; m ← μ m + g; w ← w − lr · m, or with Nesterov's momentum w − lr · (g + μ m)."""

    def __init__(self, params: Any, lr: float, momentum: float, nesterov: bool, storage: Storage | None = None) -> None:
        super().__init__(params, {"lr": lr}, storage)
        self.moments = ("momentum_buffer",) if momentum else ()  # type: ignore[misc]
        self._momentum, self._nesterov = momentum, nesterov

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
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    states: str = "",
    stochastic_rounding: bool = False,
) -> Optimizer:
    """Build the optimizer from this rank's parameter groups; the plan decides weight decay per parameter."""
    storage = storage_of(plan, model, progress, states, stochastic_rounding)
    return LocalSGD(groups_of(plan, model, weight_decay), lr, momentum, nesterov and momentum > 0, storage)
