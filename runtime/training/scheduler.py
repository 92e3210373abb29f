"""`setup.scheduler`: the learning rate of a step; its closed form stands in the planner, which also shows it."""

from ...planner.schedule.horizon import counted_rate, waits_with
from ...planner.schedule.learning_curve import Rate, learning_rate
from ..input.feed import Feed
from ..ops import op

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

    Lengths in epochs are those of the counted data, and settled once a resumed run knows how far it has come.
    """
    args = {"kind": kind, "lr": lr, "warmup": warmup, "floor": floor, "decay": decay, "shape": shape}
    if steps is not None and (feed.planned is None or not waits_with(feed.planned, args)):
        return learning_rate(args, steps, feed.phases)

    def rate(index: int) -> float:
        known = args if feed.batch is None else counted_rate(args, feed.batch)
        return learning_rate(known, feed.steps, feed.phases)(index)

    return rate
