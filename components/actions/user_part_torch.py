"""`tick.user`: an action of the user's own."""

from typing import Any

from torch.optim import Optimizer

from ...dsl.user_parts.places import NOTHING
from ...planner.plan import Plan
from ...runtime.data.user_parts import part_of, spec_folder
from ...runtime.hooks.calls import HookCall
from ...runtime.input.feed import Feed
from ...runtime.models.parts import ModelParts
from ...runtime.ops import op
from ...runtime.reporting.records import Records
from ...runtime.state import Progress, Rank, Resources


@op("tick.user")
def user_action(
    plan: Plan,
    user: dict[str, Any],
    model: ModelParts,
    optimizer: Optimizer,
    feed: Feed,
    rank: Rank,
    records: Records,
    progress: Progress,
    resources: Resources,
) -> HookCall:
    """Call it with what is known of the step that has ended."""
    part = part_of("action", user, spec_folder(plan.spec))
    return HookCall(
        metrics=f"action/{part.function}",
        part=part,
        function=part.load(),
        place="between steps",
        changes=NOTHING,
        plan=plan,
        model=model,
        optimizer=optimizer,
        feed=feed,
        rank=rank,
        records=records,
        progress=progress,
        resources=resources,
    )
