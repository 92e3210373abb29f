"""`setup.scheduler`: the learning rate of a step as a closed form, so a resumed run needs no state of it.

With W warm-up steps, T steps in all and floor r, step i (from 0) uses factor f(i + 1):
warm-up f(s) = s / W; after it p = (s − W) / (T − W) goes to 1 at the last step, and
cosine r + ½(1 − r)(1 + cos πp), linear 1 − (1 − r)p, sqrt r + (1 − r)√(1 − p), constant 1.
Counting from s = 1, the first step is not lost to a learning rate of 0 and the last one uses the floor.
"""

import math
from collections.abc import Callable

from .feed import Feed
from .ops import op

Schedule = Callable[[int], float]

SHAPES: dict[str, Callable[[float, float], float]] = {
    "cosine": lambda p, r: r + 0.5 * (1 - r) * (1 + math.cos(math.pi * p)),
    "linear": lambda p, r: 1 - (1 - r) * p,
    "sqrt": lambda p, r: r + (1 - r) * math.sqrt(1 - p),
}


@op("setup.scheduler", gives="schedule")
def build_schedule(
    feed: Feed,
    kind: str,
    lr: float,
    steps: int | None,
    warmup: dict[str, float],
    floor: float = 1.0,
    decay: dict[str, float] | None = None,
    shape: str = "linear",
) -> Schedule:
    """Step index (from 0) → learning rate. `steps` None: the number that the counted data gives."""
    total = steps if steps is not None else feed.steps
    rise = _steps(warmup, total)
    if kind == "constant":
        return lambda index: lr * min(1.0, (index + 1) / rise) if rise else lr
    fall = _steps(decay, total) if decay is not None else total - rise
    return closed_form(lr, total, rise, fall, floor, SHAPES[shape if kind == "wsd" else kind])


def closed_form(
    lr: float, total: int, rise: int, fall: int, floor: float, shape: Callable[[float, float], float]
) -> Schedule:
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


def _steps(length: dict[str, float], total: int) -> int:
    return int(length["steps"]) if "steps" in length else round(length["fraction"] * total)
