"""`request.optim_step`: Adam for one adapter, with the numbers of the request."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.ops import op
from xtrain.runtime.parallel.tensor import local
from xtrain.runtime.parallelize.gradients import clip_factor, local_gradient, squares_of
from xtrain.runtime.serving.messages import RankMessage
from xtrain.runtime.serving.passes import Handle
from xtrain.runtime.serving.slots import MOMENTS, AdapterSlot, Slots
from xtrain.runtime.state import Rank


@op("request.optim_step")
def optim_step(rank: Rank, slots: Slots, model: ModelParts) -> Handle:
    """Gradients are summed over ranks that have a summand each, measured, clipped, used and released.

    values of the answer: `grad_norm`, before clipping, and `finite`: whether there was a step. A gradient that is not
    finite is released, and all else stays as it was.
    """

    @torch.no_grad()
    def run(message: RankMessage) -> RankMessage:
        slot, adam = slots.of_model[message.values["model"]], message.values["adam"]
        names = [name for name, parameter in slot.parameters.items() if parameter.grad is not None]
        own = [slot.parameters[name] for name in names]
        for parameter in own:
            _sum_partial(parameter)
        if own and adam["divisor"] != 1:
            torch._foreach_div_([local_gradient(each.grad) for each in own], adam["divisor"])  # pyright: ignore[reportPrivateImportUsage]
        norm = _norm(own, [1.0 / slots.copies[name] for name in names], rank)
        if math.isfinite(norm):
            limit = adam["clip"] or math.inf
            _update(slot, adam, clip_factor(norm, limit))
        slot.drop_gradients()
        return RankMessage(name=message.name, values={"grad_norm": norm, "finite": math.isfinite(norm)})

    return run


def _sum_partial(parameter: Tensor) -> None:
    """Every tensor-parallel rank may have a summand of a gradient; fsdp, where it is, has added them."""
    grad = parameter.grad
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)


def _norm(parameters: list[Any], weights: list[float], rank: Rank) -> float:
    """Over all ranks, every element once. Collective."""
    weights_P = torch.tensor(weights, dtype=torch.float64, device=rank.device)
    square = (squares_of([local_gradient(p.grad) for p in parameters], weights_P) * weights_P).sum()[None]
    if rank.world_size > 1:
        dist.all_reduce(square)
    found = square.item()
    return math.sqrt(found) if found >= 0 else math.nan


def _update(slot: AdapterSlot, adam: dict[str, Any], factor: float) -> None:
    """m ← β₁ m + (1 − β₁) g; v ← β₂ v + (1 − β₂) g²; w ← (1 − lr · decay) w − lr · m̂ / (√v̂ + eps), m̂ and v̂
    corrected for their start at 0 by the adapter's own steps (arXiv 1711.05101). A parameter without a gradient has one
    of zero. Norms and embeddings do not decay."""
    slot.begin_moments()
    slot.step += 1
    for decays in (True, False):
        names = [name for name, spec in slot.specs.items() if spec.decays is decays]
        _update_all(slot, names, adam, factor, adam["weight_decay"] if decays else 0.0)


def _update_all(slot: AdapterSlot, names: list[str], adam: dict[str, Any], factor: float, decay: float) -> None:
    weights, gradients, moments = [], [], [[], []]
    for name in names:
        parameter = slot.parameters[name]
        weights.append(local(parameter))
        grad = parameter.grad
        own = torch.zeros_like(weights[-1]) if grad is None else local_gradient(grad)
        gradients.append(own if factor == 1 else own * factor)
        for place, moment in enumerate(MOMENTS):
            moments[place].append(local(slot.moments[name][moment]))
    if not weights:
        return
    device = weights[0].device
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
        weights,
        gradients,
        moments[0],
        moments[1],
        [],
        [torch.tensor(float(slot.step), device=device) for _ in weights],
        lr=adam["rate"],
        beta1=adam["beta1"],
        beta2=adam["beta2"],
        weight_decay=decay,
        eps=adam["eps"],
        amsgrad=False,
        maximize=False,
    )
