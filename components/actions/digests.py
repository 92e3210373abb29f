"""`digests`: digests of parameters and gradients, for `xtrain bisect`."""

from typing import TYPE_CHECKING, ClassVar

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS
from xtrain.lazy_attrs import frozen
from xtrain.plan.graph import ActionNode, ActionPlace
from xtrain.text.units import bytes_text, plural

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


@ACTIONS.register()
@frozen
class DigestsAction(PlannedAction):
    """`digests`: digests of all parameters and their gradients by name, as an event, for `xtrain bisect`."""

    kind: ClassVar[str] = "digests"
    records = True
    reads_parameters = True
    records_digests = True

    @property
    def reads_gradients(self) -> bool:
        return True

    def node(self, resolved: "Resolved", place: ActionPlace) -> ActionNode:
        read = 2 * max(resolved.state_bytes(own) for own in resolved.parameters_by_pp)
        tensors = plural(len(resolved.inventory.tensors), "parameter")
        does = f"digests of {tensors} and their gradients, {bytes_text(read)} to read on a rank, with one all-reduce"
        return ActionNode("tick.digests", {}, does)
