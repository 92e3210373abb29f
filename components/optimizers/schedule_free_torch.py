"""`setup.optimizer` of schedule_free. Between steps the weights are the average, so that every reader sees the
average."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from xtrain.components.optimizers.schedule_free import ScheduleFree
from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.nn.axes import local
from xtrain.runtime.nn.optimizer import groups_of
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.updates import Numbers, add_scaled, compiled_update, row_ranges, tensors_of
from xtrain.runtime.nn.weights import first_state

LEAST: Final = 1e-30  # minimum of a divisor; a rate may be 0


class ScheduleFreeOptimizer(Optimizer):
    """Schedule-free AdamW: y = β₁ x + (1 − β₁) z, where gradients g are taken; v ← β₂ v + (1 − β₂) g²; z ← z − lr · (g
    / (√v̂ + eps) + decay · y); x ← (1 − c) x + c z, c = L² / Σ L², L: the largest rate so far.

    Parameters are x between steps, and y from `to_training_point` to `step`.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, compiled: bool = False) -> None:
        """Initialize the optimizer. compiled: the update of a tensor is compiled."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._compiled = compiled_update(_update) if compiled else None

    @torch.no_grad()
    def to_training_point(self) -> None:
        """Move the weights from x to y."""
        self._move(lambda decay: 1 - decay, lambda parameter: True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient, and move to x. closure: not used."""
        self._move(lambda decay: 1 - 1 / decay, lambda parameter: parameter.grad is None)
        for group in self.param_groups:
            numbers = _numbers(group)
            by = tensors_of(numbers, group["params"][0]) if self._compiled and group["params"] else numbers
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter, by)

    def _move(self, share: Callable[[float], float], which: Callable[[Tensor], bool]) -> None:
        """Move weights toward z by a share that depends on β₁."""
        for group in self.param_groups:
            moved = [each for each in group["params"] if self.state[each] and which(each)]
            if moved:
                ends = [local(self.state[each]["z"]) for each in moved]
                torch._foreach_lerp_(  # pyright: ignore[reportPrivateImportUsage]
                    [local(each) for each in moved], ends, share(group["betas"][0])
                )

    def _update(self, group: dict[str, Any], parameter: Tensor, by: Numbers) -> None:
        state, lr, (_, decay) = self.state[parameter], group["lr"], group["betas"]
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
        if self._compiled is not None:
            self._compiled(weights, gradients, newer, squares, correction, newest, by)
            return
        for rows in row_ranges(weights):
            _update(weights[rows], gradients[rows], newer[rows], squares[rows], correction, newest, by)


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that an update takes from a parameter group."""
    (share, stays), decay = group["betas"], group["weight_decay"]
    shares = {"stays": stays, "share_of_squares": 1 - stays, "to_average": 1 - 1 / share}
    return {"factor": -group["lr"], "decay": decay, "eps": group["eps"], **shares}


def _update(
    point: Tensor, gradient: Tensor, z: Tensor, square: Tensor, correction: Tensor, newest: Tensor, by: Any
) -> None:
    """Update rows of a tensor in place, from y to x. correction: of squares that began at 0. newest: the share c."""
    square.mul_(by["stays"])
    if isinstance(by["stays"], Tensor):
        square.add_(by["share_of_squares"] * gradient * gradient)
    else:
        square.addcmul_(gradient, gradient, value=by["share_of_squares"])
    update = gradient / ((square / correction).sqrt_() + by["eps"])
    add_scaled(update, point, by["decay"])
    point.lerp_(z, by["to_average"])
    add_scaled(z, update, by["factor"])
    point.lerp_(z, newest)


@op("setup.optimizer.schedule_free", gives="optimizer")
def build_schedule_free(
    plan: Plan,
    model: ModelParts,
    rank: Rank,
    lr: float,
    betas: list[float],
    eps: float,
    weight_decay: float,
    compiled: Sequence[str] = (),
) -> Optimizer:
    """Build the optimizer from this rank's parameter groups; the plan decides weight decay per parameter. compiled:
    kinds of devices on which the update of a tensor is compiled."""
    groups, compiles = groups_of(plan, model, weight_decay), rank.device.type in compiled
    return ScheduleFreeOptimizer(groups, lr, (betas[0], betas[1]), eps, compiles)
