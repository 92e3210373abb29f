"""`setup.optimizer` of lion, which torch does not have."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from ...planner.plan import Plan
from ...runtime.models.parts import ModelParts
from ...runtime.ops import op
from ...runtime.parallel.tensor import local
from ...runtime.training.optimizer import groups_of


class LionOptimizer(Optimizer):
    """u = sign(β₁ m + (1 − β₁) g); w ← (1 − lr · decay) w − lr · u; m ← β₂ m + (1 − β₂) g.

    Every element by itself, so a rank updates its own pieces and nothing is sent.
    """

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. closure: not used."""
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not used:
                continue
            for parameter in used:
                if "exp_avg" not in self.state[parameter]:
                    zeros = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                    self.state[parameter]["exp_avg"] = zeros
            weights, gradients = [local(p) for p in used], [local(p.grad) for p in used]
            averages = [local(self.state[p]["exp_avg"]) for p in used]
            (stays, stays_next), lr = group["betas"], group["lr"]
            for weight, gradient, average in zip(weights, gradients, averages, strict=True):
                update = torch.lerp(average, gradient, 1 - stays).sign_()
                if group["weight_decay"]:
                    weight.mul_(1 - lr * group["weight_decay"])
                weight.add_(update, alpha=-lr)
                average.lerp_(gradient, 1 - stays_next)


@op("setup.optimizer.lion", gives="optimizer")
def build_lion(plan: Plan, model: ModelParts, lr: float, betas: list[float], weight_decay: float) -> Optimizer:
    """The plan says of every parameter whether it decays."""
    return LionOptimizer(groups_of(plan, model, weight_decay), lr=lr, betas=(betas[0], betas[1]))
