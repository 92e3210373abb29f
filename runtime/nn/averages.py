"""Running averages of the weights (`setup.ema`, `step.ema`)."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from attrs import define, frozen
from torch import Tensor

from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.nn.axes import local
from xtrain.runtime.nn.batch import Step, StepCall
from xtrain.runtime.nn.build import DTYPES
from xtrain.runtime.nn.parallelize import reshard
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.weights import model_tensors, saved_tensors

Which = Literal["trained", "averaged"]


class CopiesState(Protocol):
    """A saver of checkpoints that copies the state of the model while training continues."""

    def await_copy(self) -> None:
        """Wait until the state may change again."""
        ...


@define(kw_only=True, eq=False)
class WeightAverages:
    """Averages of the model's whole state, sharded like it.

    averages: by name. every: optimizer steps between two updates; updates: how many there have been. evaluates:
    evaluations use the averages; publishes: exported weights are the averages.
    """

    model: ModelParts
    decay: float
    every: int
    evaluates: bool
    publishes: bool
    averages: dict[str, Tensor]
    updates: int = 0

    def tensors(self, prefix: str = "ema") -> dict[str, Tensor]:
        """Return `<prefix>.<name>` → average."""
        return {f"{prefix}.{name}": average for name, average in self.averages.items()}

    def described(self) -> dict[str, Any]:
        """Return the averages' settings for a checkpoint, as JSON."""
        return {
            "decay": self.decay,
            "every": self.every,
            "eval": self.evaluates,
            "publish": self.publishes,
            "updates": self.updates,
        }

    @torch.no_grad()
    def restart(self) -> None:
        """Start from the current weights."""
        self.updates = 0
        for average, weight in self._pairs(frozen=True):
            average.copy_(weight)

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the averages. Nothing waits for a device."""
        self.updates += 1
        share = share_of(self.updates, self.decay)
        pairs = list(self._pairs())
        if not pairs:  # of a stage without trained weights
            return
        if all(average.dtype == weight.dtype for average, weight in pairs):
            averages, weights = [average for average, _ in pairs], [weight for _, weight in pairs]
            torch._foreach_lerp_(averages, weights, share)  # pyright: ignore[reportPrivateImportUsage]
            return
        for average, weight in pairs:  # one by one: each needs a temporary copy in the finer format
            average.lerp_(weight.to(average.dtype), share)

    @torch.no_grad()
    def trade(self, *, back: bool) -> None:
        """Exchange averages and weights, tensor by tensor, so that there is never a third copy of all of them.

        With `back` the original state returns bit for bit.
        """
        reshard(self.model)  # drops the weights that FSDP has gathered
        for average, weight in self._pairs():
            if average.dtype == weight.dtype:
                before = weight.clone()
                weight.copy_(average)
                average.copy_(before)
            else:
                trade_halves(average, weight, back=back)

    def _pairs(self, *, frozen: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (average, weight), the shards of this rank; looked up each time, because FSDP may have replaced them.

        frozen: also frozen weights, whose average is the weight itself.
        """
        weights = model_tensors(self.model, "")
        still = set() if frozen else {name for name, p in self.model.named_parameters() if not p.requires_grad}
        for name, average in self.averages.items():
            if name in still:
                continue
            yield local(average), local(weights[name])


@frozen(kw_only=True, eq=False)
class Weights:
    """Weights to evaluate a model with: the trained ones, or the averages of `ema`."""

    ema: WeightAverages | None
    saver: "CopiesState | None"

    @contextmanager
    def in_place(self) -> Iterator[Which]:
        """Use these weights within the block and restore the trained ones after it. Without averages yet, the trained
        ones."""
        if self.ema is None or not self.ema.updates:
            yield "trained"
            return
        if self.saver is not None:
            self.saver.await_copy()  # a state that is being saved must not change
        self.ema.trade(back=False)
        try:
            yield "averaged"
        finally:
            self.ema.trade(back=True)


def share_of(update: int, decay: float) -> float:
    """Return the share of the newest weights in the average after `update` updates, counted from 1."""
    return (1.0 - decay) / -math.expm1(update * math.log(decay)) if decay else 1.0


def trade_halves(average: Tensor, weight: Tensor, *, back: bool) -> None:
    """Exchange an average in fp32 with a weight in bf16, in place.

    bf16 is the upper half of fp32: the weight becomes the rounded average, and is stored in its upper half. The lower
    half tells how that was rounded, so that the way back is exact.
    """
    assert average.dtype == torch.float32 and weight.dtype == torch.bfloat16
    halves = average.view(torch.int16)
    lower, upper = halves[..., 0::2], halves[..., 1::2]  # little-endian, as all devices of torch are
    bits, rounded_up = weight.view(torch.int16), (lower < 0).to(torch.int16)
    before = bits.clone()
    if back:
        bits.copy_(upper)
        upper.copy_(before - rounded_up)
    else:
        bits.copy_(upper + rounded_up)
        upper.copy_(before)


@op("setup.ema", gives="ema")
def keep_average(
    plan: Plan, model: ModelParts, decay: float, every: int, format: str, eval: bool, publish: bool
) -> WeightAverages:
    """Start averages of the current weights. format: of the averages; bf16 would round a small share of new weights
    away.

    Frozen weights keep their format; weights that no checkpoint holds have no average.
    """
    still = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    averages = {
        name: value.to(value.dtype if name in still else torch.promote_types(value.dtype, torch.float32), copy=True)
        for name, value in saved_tensors(model, plan, "").items()
    }
    assert all(averages[name].dtype == DTYPES[format] for name, _ in model.named_parameters() if name not in still)
    return WeightAverages(model=model, decay=decay, every=every, evaluates=eval, publishes=publish, averages=averages)


@op("step.ema")
def average(ema: WeightAverages) -> StepCall:
    """Add the weights to the average after every n-th step."""

    def update_average(step: Step) -> None:
        if (step.index + 1) % ema.every == 0:
            ema.update()

    return update_average
