"""`setup.optimizer` of schedule_free. Between steps the weights are the average, so that every reader sees the
average."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from xtrain.components.optimizers.schedule_free import ScheduleFree
from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.nn.axes import local
from xtrain.runtime.nn.optimizer import groups_of, row_ranges
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.weights import first_state

LEAST: Final = 1e-30  # minimum of a divisor; a rate may be 0


class ScheduleFreeOptimizer(Optimizer):
    """Schedule-free AdamW: y = β₁ x + (1 − β₁) z, where gradients g are taken; v ← β₂ v + (1 − β₂) g²; z ← z − lr · (g
    / (√v̂ + eps) + decay · y); x ← (1 − c) x + c z, c = L² / Σ L², L: the largest rate so far.

    Parameters are x between steps, and y from `to_training_point` to `step`.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def to_training_point(self) -> None:
        """Move the weights from x to y."""
        self._move(lambda decay: 1 - decay, lambda parameter: True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient, and move to x. closure: not used."""
        self._move(lambda decay: 1 - 1 / decay, lambda parameter: parameter.grad is None)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter)

    def _move(self, share: Callable[[float], float], which: Callable[[Tensor], bool]) -> None:
        """Move weights toward z by a share that depends on β₁."""
        for group in self.param_groups:
            moved = [each for each in group["params"] if self.state[each] and which(each)]
            if moved:
                ends = [local(self.state[each]["z"]) for each in moved]
                torch._foreach_lerp_(  # pyright: ignore[reportPrivateImportUsage]
                    [local(each) for each in moved], ends, share(group["betas"][0])
                )

    def _update(self, group: dict[str, Any], parameter: Tensor) -> None:
        state, lr, (share, decay) = self.state[parameter], group["lr"], group["betas"]
        if not state:
            for name in ScheduleFree.scalars({}, ""):
                state[name] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for tensor in ScheduleFree.state({}, ""):
                state[tensor.name] = first_state(parameter, tensor)
        state["step"] += 1
        # Σ L² in units of the newest L², so that integers stay exact.
        before = state["largest_lr"].clone()
        state["largest_lr"].clamp_(min=lr)
        state["weight_sum"].mul_((before / state["largest_lr"].clamp(min=LEAST)).square()).add_(1)
        newest = 1 / state["weight_sum"].to(parameter.dtype)
        correction = 1 - decay ** state["step"].to(parameter.dtype)
        weights, gradients = local(parameter), local(parameter.grad)  # pyright: ignore[reportArgumentType]
        newer, squares = local(state["z"]), local(state["exp_avg_sq"])
        for rows in row_ranges(weights):
            point, gradient, z, square = weights[rows], gradients[rows], newer[rows], squares[rows]
            square.mul_(decay).addcmul_(gradient, gradient, value=1 - decay)
            update = gradient / ((square / correction).sqrt_() + group["eps"])
            update.add_(point, alpha=group["weight_decay"])
            point.lerp_(z, 1 - 1 / share)
            z.sub_(update, alpha=lr)
            point.lerp_(z, newest)


@op("setup.optimizer.schedule_free", gives="optimizer")
def build_schedule_free(
    plan: Plan, model: ModelParts, lr: float, betas: list[float], eps: float, weight_decay: float
) -> Optimizer:
    """Build the optimizer from this rank's parameter groups; the plan decides weight decay per parameter."""
    return ScheduleFreeOptimizer(groups_of(plan, model, weight_decay), lr, (betas[0], betas[1]), eps)
