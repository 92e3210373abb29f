"""`setup.scheduler`: the learning rate of a step; its closed form stands in the planner, which also shows it."""

from ..planner.learning_curve import Rate, learning_rate
from .feed import Feed
from .ops import op

Schedule = Rate


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
    args = {"kind": kind, "lr": lr, "warmup": warmup, "floor": floor, "decay": decay, "shape": shape}
    return learning_rate(args, steps if steps is not None else feed.steps)
