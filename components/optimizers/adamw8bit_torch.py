"""`setup.optimizer` of adamw8bit: codes, scales and arithmetic as in torchao's AdamW8bit."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from xtrain.components.optimizers.adamw8bit import NAMES, tensors_of
from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress
from xtrain.runtime.nn.axes import local
from xtrain.runtime.nn.optimizer import LocalOptimizer, Storage, decay_cautiously, groups_of, storage_of, wide
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.weights import first_state

LEAST_SCALE = 1e-12
SIGNED = {"exp_avg": True, "exp_avg_sq": False}


class AdamW8bitOptimizer(LocalOptimizer):
    """AdamW with moments stored as codes: a block's scale times the code's value in a fixed map."""

    moments: ClassVar[tuple[str, ...]] = NAMES
    counts: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        names: dict[int, str],
        block: int,
        quantised: Sequence[str],
        storage: Storage | None = None,
        cautious_decay: bool = False,
    ) -> None:
        """Initialize the optimizer. names: parameter names by id."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps}, storage, cautious_decay)
        self._names, self._block, self._quantised = names, block, quantised
        self._numbers = {moment: numbers_of_codes(signed) for moment, signed in SIGNED.items()}

    @property
    def converts(self) -> bool:
        return True

    def begin(self, parameter: Tensor, moment: str) -> None:
        for each in tensors_of(moment, self._block, self._quantised, self._names[id(parameter)]):
            self.state[parameter][each.name] = first_state(parameter, each)

    def load(self, parameter: Tensor, moment: str, rows: slice) -> Tensor:
        scale = self.state[parameter].get(f"{moment}_scale")
        if scale is None:
            return super().load(parameter, moment, rows)
        codes = local(self.state[parameter][moment])[rows]
        return wide(dequantised(codes, local(scale)[rows], self._numbers[moment].to(codes.device)), parameter)

    def store(self, parameter: Tensor, moment: str, rows: slice, value: Tensor) -> None:
        scale = self.state[parameter].get(f"{moment}_scale")
        if scale is None:
            super().store(parameter, moment, rows, value)
            return
        codes, scales = quantised(value, self._block, self._numbers[moment].to(value.device))
        local(self.state[parameter][moment])[rows].copy_(codes)
        local(scale)[rows].copy_(scales)

    def update(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor],
        moments: Sequence[list[Tensor]],
        counts: list[Tensor],
    ) -> None:
        (decay, decay_of_squares), eps = group["betas"], group["eps"]
        for weight, gradient, average, square, count in zip(weights, gradients, *moments, counts, strict=True):
            lr, step = weight.new_full((), group["lr"]), count.to(weight.dtype)
            average.lerp_(gradient, 1 - decay)
            if self._cautious_decay and group["weight_decay"]:
                decay_cautiously(weight, average, group["lr"] * group["weight_decay"])
            else:
                weight.sub_(lr * group["weight_decay"] * weight)
            square.lerp_(gradient.square(), 1 - decay_of_squares)
            root = square.sqrt() / (1 - decay_of_squares**step).sqrt() + eps
            weight.sub_(lr * (average / (1 - decay**step)) / root)


def quantised(value: Tensor, block: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to codes and one fp32 scale (absmax) per `block` elements of a row. value: […, columns], columns
    divisible by `block`. numbers: the values of the codes."""
    blocks = value.unflatten(-1, (-1, block))
    scales = blocks.abs().amax(-1).clip(LEAST_SCALE).float()
    scaled = (blocks / scales[..., None].to(value.dtype)).flatten(-2)
    numbers = numbers.to(value.dtype)
    lower = (torch.bucketize(scaled, numbers, out_int32=True, right=True) - 1).clamp(0, 255)
    upper = (lower + 1).clamp(max=255)
    nearer = scaled - numbers[lower] >= (numbers[upper] - numbers[lower]) * 0.5
    return torch.where(nearer, upper, lower).to(torch.uint8), scales


def dequantised(codes: Tensor, scales: Tensor, numbers: Tensor) -> Tensor:
    """Return the fp32 values of codes and scales. numbers: the values of the codes at scale 1."""
    found = numbers[codes.int()]
    return (found.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)


def numbers_of_codes(signed: bool) -> Tensor:
    """Return the values of the 256 codes at scale 1, ascending (Dettmers 2016, arXiv 1511.04561): seven decades, with
    more values in the higher ones."""
    found = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2**decade + 1 if signed else 2 ** (decade + 1) + 1)
        means = 10 ** (decade - 6) * ((bounds[:-1] + bounds[1:]) / 2.0)
        found += [means, -means] if signed else [means]
    return torch.cat(found).sort().values


@op("setup.optimizer.adamw8bit", gives="optimizer")
def build_adamw8bit(
    plan: Plan,
    model: ModelParts,
    progress: Progress,
    lr: float,
    betas: list[float],
    eps: float,
    weight_decay: float,
    block: int,
    quantised: list[str],
    stochastic_rounding: bool = False,
    cautious_decay: bool = False,
) -> Optimizer:
    """Build the optimizer from this rank's parameter groups; the plan decides weight decay and 8-bit moments per
    parameter."""
    names = {id(parameter): name for name, parameter in model.trained()}
    storage = storage_of(plan, model, progress, "", stochastic_rounding)
    groups = groups_of(plan, model, weight_decay)
    return AdamW8bitOptimizer(groups, lr, (betas[0], betas[1]), eps, names, block, quantised, storage, cautious_decay)
