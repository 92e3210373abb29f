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
    """Step index (from 0) → learning rate, with the factor of the phase that the step lies in.

    `steps` None: the number that the counted data gives, which is settled once a resumed run knows how far it has come.
    """
    args = {"kind": kind, "lr": lr, "warmup": warmup, "floor": floor, "decay": decay, "shape": shape}
    if steps is not None:
        return learning_rate(args, steps, feed.phases)
    return lambda index: learning_rate(args, feed.steps, feed.phases)(index)
