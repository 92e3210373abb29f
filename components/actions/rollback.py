"""`rollback { times = 3 }`: return to a checkpoint and skip the data on which the run failed."""

from typing import TYPE_CHECKING, ClassVar

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS
from xtrain.dsl.schema.setting import at_least, execution_setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.graph import ActionNode, ActionPlace
from xtrain.text.units import plural

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


@ACTIONS.register()
@frozen
class Rollback(PlannedAction):
    """`rollback { times = 3 }`: go back to the last good checkpoint, and continue with the data after the failure."""

    kind: ClassVar[str] = "rollback"
    example = "on nan {}"
    lasting = True
    only_nan = True
    nan_limit = 1
    goes_back = True

    times: int = execution_setting(
        "maximum number of rollbacks of a run, after which the run fails", default=3, check=at_least(1)
    )

    def node(self, resolved: "Resolved", place: ActionPlace) -> ActionNode:
        often = f"at most {plural(self.times, 'time')}"
        does = f"go back to the last good checkpoint and continue with the data after the failure, {often}"
        return ActionNode("event.rollback", {"times": self.times}, does)
