"""`tick.user`: an action of the user's own."""

from typing import Any

from ...planner.plan import Plan
from ...runtime.hooks.calls import HookCall
from ...runtime.ops import op
from ...runtime.state import Resources


@op("tick.user")
def user_action(plan: Plan, user: dict[str, Any], resources: Resources) -> HookCall:
    """Call it with what is known of the step that has ended."""
    return HookCall.of("action", plan, user, resources, place="between steps")
