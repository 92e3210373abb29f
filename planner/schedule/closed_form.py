"""Closed forms of the step that schedules of the learning rate are made of: a resumed run needs no state of them.

With W warm-up steps, T steps in all and floor r, step i (from 0) uses factor f(i + 1):
warm-up f(s) = s / W; after it p = (s − W) / (T − W) goes to 1 at the last step, and
cosine r + ½(1 − r)(1 + cos πp), linear 1 − (1 − r)p, sqrt r + (1 − r)√(1 − p).
Counting from s = 1, the first step is not lost to a learning rate of 0 and the last one uses the floor. Steps, warm-up
and total are full steps of the present batch (`learning_curve.py`), and need not be whole numbers.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.schedules import Curve, Scheduler

SHAPES: dict[str, Callable[[float, float], float]] = {
    "cosine": lambda p, r: r + 0.5 * (1 - r) * (1 + math.cos(math.pi * p)),
    "linear": lambda p, r: 1 - (1 - r) * p,
    "sqrt": lambda p, r: r + (1 - r) * math.sqrt(1 - p),
}


def warmup_and_decay(args: Mapping[str, Any], total: float, shape: str, decay: float | None = None) -> Curve:
    """The curve of a schedule by the arguments of its node. decay: steps at the end; None: all after the warm-up."""
    warmup = length_in_steps(args["warmup"], total)
    return closed_form(
        args["lr"], total, warmup, total - warmup if decay is None else decay, args["floor"], SHAPES[shape]
    )


def closed_form(
    lr: float, total: float, warmup: float, decay: float, floor: float, shape: Callable[[float, float], float]
) -> Curve:
    """Rise over `warmup` steps, stay, fall over the last `decay` of `total` steps to `floor` · lr."""
    begin = max(warmup, total - decay)

    def rate(index: float) -> float:
        s = index + 1
        if s <= warmup:
            return lr * s / warmup
        if s <= begin:
            return lr
        left = total - begin
        return lr * shape(min(1.0, (s - begin) / left) if left > 0 else 1.0, floor)

    return rate


def length_in_steps(length: Mapping[str, float], total: float) -> float:
    """`{"steps": n}` or `{"fraction": f}` of `total`, rounded to steps."""
    return length["steps"] if "steps" in length else round(length["fraction"] * total)


def idle_floor(warmup: Quantity, *others: str) -> dict[str, str]:
    """That `floor` and settings like it change nothing where there is no step behind the warm-up."""
    if warmup == Quantity(100, "%"):
        return dict.fromkeys(("floor", *others), "the warm-up takes the whole budget")
    return {}


class DecayingScheduler(Scheduler):
    """A schedule that falls by a shape from the end of the warm-up to the floor at the last step."""

    floor: Quantity
    shape: ClassVar[str]

    def idle(self) -> dict[str, str]:
        return idle_floor(self.warmup)

    def falls(self, peak: float) -> bool:
        return self.floor.fraction < 1

    def args(self) -> dict[str, Any]:
        return {"floor": self.floor.fraction}

    @classmethod
    def rate(cls, args: Mapping[str, Any], total: float) -> Curve:
        return warmup_and_decay(args, total, cls.shape)

    @classmethod
    def shown(cls, args: Mapping[str, Any], length: Callable[[str], str]) -> list[str]:
        return [decay_text(args, cls.shape)]


def decay_text(args: Mapping[str, Any], shape: str) -> str:
    """`cosine to 3e-05 at step 600`."""
    steps = args["steps"]
    return f"{shape} to {args['floor'] * args['lr']:.3g} at {'the end' if steps is None else f'step {steps:,}'}"
