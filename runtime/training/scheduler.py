"""`setup.scheduler`: the learning rate of a step; its closed form stands in the planner, which also shows it."""

from typing import Any

from xtrain.dsl.schema.schedules import Rate
from xtrain.planner.schedule.arithmetic import Arithmetic
from xtrain.planner.schedule.learning_curve import learning_rate
from xtrain.runtime.input.feed import Feed
from xtrain.runtime.ops import op

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

    Lengths in tokens and epochs count from the checkpoint, once a resumed run has read it.
    own: what the schedule takes besides.
    """
    args = {"kind": kind, "lr": lr, "steps": steps, **own}
    known: list[tuple[Arithmetic, Rate]] = []

    def rate(index: int) -> float:
        assert feed.batch is not None
        if not known or known[0][0] is not feed.batch:
            known[:] = [(feed.batch, learning_rate(args, feed.batch, feed.phases))]
        return known[0][1](index)

    return rate
