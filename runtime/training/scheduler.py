"""`setup.scheduler`: the learning rate of a step; its closed form stands in the planner, which also shows it."""

from typing import Any

from ...dsl.schema.schedules import Rate
from ...planner.schedule.horizon import counted_rate, waits_with
from ...planner.schedule.learning_curve import learning_rate
from ..input.feed import Feed
from ..ops import op

Schedule = Rate


@op("setup.scheduler", gives="schedule")
def build_schedule(
    feed: Feed,
    kind: str,
    lr: float,
    steps: int | None,
    **own: Any,
) -> Schedule:
    """Step index (from 0) → learning rate, with the factor of the phase that the step lies in.

    Lengths in epochs are those of the counted data, and settled once a resumed run knows how far it has come.
    own: what the schedule takes besides.
    """
    args = {"kind": kind, "lr": lr, "steps": steps, **own}
    if steps is not None and (feed.planned is None or not waits_with(feed.planned, args)):
        return learning_rate(args, steps, feed.phases)

    def rate(index: int) -> float:
        known = args if feed.batch is None else counted_rate(args, feed.batch)
        return learning_rate(known, feed.steps, feed.phases)(index)

    return rate
