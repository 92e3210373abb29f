"""`setup.optimizer` of adamw8bit: codes, scales and arithmetic as in torchao's AdamW8bit."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from xtrain.components.optimizers.adamw8bit import NAMES, tensors_of
from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.nn.axes import local
from xtrain.runtime.nn.optimizer import LocalOptimizer, Storage, groups_of, storage_of
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.updates import MomentFormat, UpdateRule, decay_cautiously, wide
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
        compiled: bool = False,
    ) -> None:
        """Initialize the optimizer. names: parameter names by id. compiled: the whole update of a tensor is
        compiled."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps}, storage, cautious_decay, compiled)
        self._names, self._block, self._quantised = names, block, quantised
        self._formats_of: dict[tuple[str, torch.device], MomentFormat] = {}

    @property
    def converts(self) -> bool:
        return True

    def begin(self, parameter: Tensor, moment: str) -> None:
        for each in tensors_of(moment, self._block, self._quantised, self._names[id(parameter)]):
            self.state[parameter][each.name] = first_state(parameter, each)

    def stored(self, parameter: Tensor, moment: str) -> tuple[MomentFormat, list[Tensor]]:
        scale = self.state[parameter].get(f"{moment}_scale")
        if scale is None:
            return super().stored(parameter, moment)
        codes, key = local(self.state[parameter][moment]), (moment, parameter.device)
        if key not in self._formats_of:
            numbers = numbers_of_codes(SIGNED[moment]).to(parameter.device)
            self._formats_of[key] = format_of(numbers, self._block)
        return self._formats_of[key], [codes, local(scale)]

    @property
    def rule(self) -> UpdateRule:
        cautious = self._cautious_decay

        def rule(weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], count: Tensor | None, by: Any) -> None:
            assert count is not None
            average, square = moments
            step = count.to(weight.dtype)
            average.lerp_(gradient, by["share"])
            if cautious:
                decay_cautiously(weight, average, by["share_of_weight"])
            else:
                weight.sub_(by["lr"] * by["weight_decay"] * weight)
            square.lerp_(gradient.square(), by["share_of_squares"])
            root = square.sqrt() / (1 - by["stays_of_squares"] ** step).sqrt() + by["eps"]
            weight.sub_(by["lr"] * (average / (1 - by["stays"] ** step)) / root)

        return rule

    def numbers(self, group: Mapping[str, Any]) -> dict[str, float]:
        (stays, stays_of_squares), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        shares = {"share": 1 - stays, "share_of_squares": 1 - stays_of_squares, "share_of_weight": lr * decay}
        return {
            "lr": lr, "weight_decay": decay, "eps": group["eps"], "stays": stays, "stays_of_squares": stays_of_squares,
            **shares,
        }  # fmt: skip

    def update(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor],
        moments: Sequence[list[Tensor]],
        counts: list[Tensor],
    ) -> None:
        rule, numbers = self.rule, self.numbers(group)
        for weight, gradient, average, square, count in zip(weights, gradients, *moments, counts, strict=True):
            rule(weight, gradient, [average, square], count, {**numbers, "lr": weight.new_full((), group["lr"])})


def format_of(numbers: Tensor, block: int) -> MomentFormat:
    """Return the format of a moment in codes with scales. numbers: the values of the codes."""

    def load(stored: Sequence[Tensor], weight: Tensor) -> Tensor:
        codes, scales = stored
        return wide(dequantised(codes, scales, numbers), weight)

    def store(stored: Sequence[Tensor], value: Tensor) -> None:
        codes, scales = quantised(value, block, numbers)
        stored[0].copy_(codes)
        stored[1].copy_(scales)

    return MomentFormat(load, store)


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
    rank: Rank,
    lr: float,
    betas: list[float],
    eps: float,
    weight_decay: float,
    block: int,
    quantised: list[str],
    stochastic_rounding: bool = False,
    cautious_decay: bool = False,
    compiled: Sequence[str] = (),
) -> Optimizer:
    """Build the optimizer from this rank's parameter groups; the plan decides weight decay and 8-bit moments per
    parameter. compiled: kinds of devices on which the update of a tensor is compiled."""
    names = {id(parameter): name for name, parameter in model.trained()}
    storage = storage_of(plan, model, progress, "", stochastic_rounding)
    groups = groups_of(plan, model, weight_decay)
    return AdamW8bitOptimizer(
        groups, lr, (betas[0], betas[1]), eps, names, block, quantised, storage, cautious_decay,
        rank.device.type in compiled,
    )  # fmt: skip
