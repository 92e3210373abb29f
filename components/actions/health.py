"""`health { limit = 60 s }`: check that all ranks respond, and how fast."""

from typing import TYPE_CHECKING, ClassVar

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS
from xtrain.dsl.schema.setting import execution_setting, positive
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.plan.graph import ActionNode, ActionPlace
from xtrain.text.units import seconds_text

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


@ACTIONS.register()
@frozen
class Health(PlannedAction):
    """`health { limit = 60 s }`: a timed all-reduce that reports which rank came last, and which did not respond."""

    kind: ClassVar[str] = "health"
    lasting = False  # it has a limit of its own

    limit: Quantity = execution_setting(
        "time after which ranks that have not responded are reported and the run is ended",
        default=Quantity(60, "seconds"),
        units=("seconds",),
        check=positive,
    )

    def node(self, resolved: "Resolved", place: ActionPlace) -> ActionNode:
        seconds = self.limit.value
        does = f"timed all-reduce over all ranks; name the ranks that do not join within {seconds_text(seconds)}"
        return ActionNode("tick.health", {"limit_seconds": seconds}, does)

    def idle(self, spec: Spec, ranks: int) -> dict[str, tuple[str, str]]:
        if ranks > 1 or spec.fault_tolerance.elastic is not None:
            return {}
        return {"limit": ("one rank waits for no other", "remove it")}
