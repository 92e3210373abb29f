"""The learning rate of a step as a closed form, so that a resumed run needs no state of it.

With W warm-up steps, T steps in all and floor r, step i (from 0) uses factor f(i + 1):
warm-up f(s) = s / W; after it p = (s − W) / (T − W) goes to 1 at the last step, and
cosine r + ½(1 − r)(1 + cos πp), linear 1 − (1 − r)p, sqrt r + (1 − r)√(1 − p), constant 1.
Counting from s = 1, the first step is not lost to a learning rate of 0 and the last one uses the floor.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..plan import PlanPhase
from .phases import phase_at

Rate = Callable[[int], float]

SHAPES: dict[str, Callable[[float, float], float]] = {
    "cosine": lambda p, r: r + 0.5 * (1 - r) * (1 + math.cos(math.pi * p)),
    "linear": lambda p, r: 1 - (1 - r) * p,
    "sqrt": lambda p, r: r + (1 - r) * math.sqrt(1 - p),
}


def learning_rate(args: dict[str, Any], total: int, phases: Sequence[PlanPhase] = ()) -> Rate:
    """Step index (from 0) → learning rate, by the arguments of `setup.scheduler`, over `total` steps.

    phases: of the timeline; the rate is multiplied by the `lr_scale` of the phase that a step lies in.
    """
    rate = _scheduled(args, total)
    if all(phase.lr_scale == 1 for phase in phases):
        return rate
    return lambda index: rate(index) * phase_at(phases, index, total).lr_scale


def _scheduled(args: dict[str, Any], total: int) -> Rate:
    kind, lr = args["kind"], args["lr"]
    rise = length_in_steps(args["warmup"], total)
    if kind == "constant":
        return lambda index: lr * min(1.0, (index + 1) / rise) if rise else lr
    decay = args.get("decay")
    fall = total - rise if decay is None else length_in_steps(decay, total)
    return closed_form(lr, total, rise, fall, args["floor"], SHAPES[args["shape"] if kind == "wsd" else kind])


def closed_form(
    lr: float, total: int, rise: int, fall: int, floor: float, shape: Callable[[float, float], float]
) -> Rate:
    """Rise over `rise` steps, stay, fall over the last `fall` of `total` steps to `floor` · lr."""
    begin = max(rise, total - fall)

    def rate(index: int) -> float:
        s = index + 1
        if s <= rise:
            return lr * s / rise
        if s <= begin:
            return lr
        return lr * shape(min(1.0, (s - begin) / max(1, total - begin)), floor)

    return rate


def length_in_steps(length: dict[str, float], total: int) -> int:
    """`{"steps": n}` or `{"fraction": f}` of `total`, rounded to steps."""
    return int(length["steps"]) if "steps" in length else round(length["fraction"] * total)
