"""`setup.scheduler` of the user's own: the function, asked for the factor of each step."""

from math import isfinite
from typing import Any

from ...planner.plan import Plan
from ...planner.schedule.learning_curve import scaled
from ...runtime.data.user_parts import failures_of, part_of, spec_folder
from ...runtime.input.feed import Feed
from ...runtime.ops import op
from ...runtime.training.scheduler import Schedule


@op("setup.scheduler.user", gives="schedule")
def build_user_schedule(plan: Plan, feed: Feed, lr: float, steps: int | None, user: dict[str, Any]) -> Schedule:
    """Step index (from 0) → learning rate: `lr` times what the function gives, times the factor of the phase.

    steps: of the run, None where only the data tells. Raises PartFailed for what is no factor.
    """
    part = part_of("schedule", user, spec_folder(plan.spec))
    function = part.load()

    def rate(index: int) -> float:
        total = steps if steps is not None else feed.steps
        with failures_of(part):
            factor = function(index, total, **part.arguments)
        try:
            number = float(factor)
        except (TypeError, ValueError):
            raise part.failed(f"gave {factor!r} for step {index} of {total}, and a factor is a number") from None
        if not isfinite(number) or number < 0:
            raise part.failed(f"gave {number:g} for step {index} of {total}, and a factor is finite and not negative")
        return scaled(lambda _: lr * number, total, feed.phases)(index)

    return rate
