"""`log`: the metrics of the step."""

from typing import TYPE_CHECKING, ClassVar

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS, TURN_OF_LOG
from xtrain.lazy_attrs import frozen
from xtrain.plan.graph import ActionNode, ActionPlace

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


@ACTIONS.register()
@frozen
class LogAction(PlannedAction):
    """`log`: write the metrics of the step."""

    kind: ClassVar[str] = "log"
    default_ticks = 100
    turn = TURN_OF_LOG
    records = True

    def node(self, resolved: "Resolved", place: ActionPlace) -> ActionNode:
        return ActionNode("tick.log", {}, "write a record to metrics.jsonl: loss, gradient norm, learning rate, speed")
