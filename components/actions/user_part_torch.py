"""`tick.user`: a user-defined action."""

from typing import Any

from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Resources
from xtrain.runtime.loop.hooks import HookCall
from xtrain.runtime.nn.batch import StepCall


@op("tick.user")
def user_action(plan: Plan, user: dict[str, Any], resources: Resources) -> StepCall:
    """Call the user's action with the state of the finished step; `on failure` with the failure."""
    call = HookCall.of("action", plan, user, resources, place="between steps")
    return lambda step: call(step, failure=resources.get("failure"))
