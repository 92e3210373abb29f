"""`setup.scheduler` with user code: the function returns each step's factor."""

from math import isfinite
from typing import Any

from xtrain.plan.learning_rate import scaled, schedule_clock
from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.user_parts import failures_of, part_of, spec_folder
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.nn.optimizer import Schedule


@op("setup.scheduler.user", gives="schedule", traced=False)
def build_user_schedule(plan: Plan, feed: Feed, lr: float, steps: int | None, user: dict[str, Any]) -> Schedule:
    """Map a step index (from 0) to the learning rate: `lr` times the function's factor times the factor of the phase.

    After a change of the batch, step and steps are those of a run with the present batch that has trained on as much
    data: a function of step / steps is continuous. Raises PartFailed for an invalid factor.
    """
    part = part_of("schedule", user, spec_folder(plan.spec))
    function = part.load()

    def rate(index: int) -> float:
        step, total = index, feed.steps
        if feed.batch is not None and feed.batch.past is not None:
            clock = schedule_clock({"user": user}, feed.batch)
            step, total = round(clock.at(index + 1)) - 1, round(clock.total)
        with failures_of(part):
            factor = function(step, total, **part.arguments)
        try:
            number = float(factor)
        except (TypeError, ValueError):
            raise part.failed(f"gave {factor!r} for step {step} of {total}, and a factor is a number") from None
        if not isfinite(number) or number < 0:
            raise part.failed(f"gave {number:g} for step {step} of {total}, and a factor is finite and not negative")
        return scaled(lambda _: lr * number, feed.steps, feed.phases)(index)

    return rate
