"""`tick.user`: a user-defined action."""

from typing import Any

from xtrain.planner.plan import Plan
from xtrain.runtime.hooks.calls import HookCall
from xtrain.runtime.ops import op
from xtrain.runtime.state import Resources


@op("tick.user")
def user_action(plan: Plan, user: dict[str, Any], resources: Resources) -> HookCall:
    """Call the user's action with the state of the finished step."""
    return HookCall.of("action", plan, user, resources, place="between steps")
