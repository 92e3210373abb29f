"""`every … NAME { … }` with user code: a function with `@action` in a module named by `use`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS, OF_USERS
from xtrain.dsl.schema.component import UserComponent
from xtrain.lazy_attrs import frozen
from xtrain.plan.graph import ActionNode, ActionPlace

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


@ACTIONS.user
@frozen
class UserAction(UserComponent, PlannedAction):
    """`every … NAME { … }`, `on … NAME`: a function of your own, called between steps on all ranks."""

    kind: ClassVar[str] = ""  # type: ignore[misc]
    reads_parameters = True
    records = True
    alone = True
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {
        "action/NAME/KEY": ("value that your own action NAME returned under KEY, on the first rank", "")
    }

    def node(self, resolved: "Resolved", place: ActionPlace) -> ActionNode:
        purpose = self.purpose.removesuffix(".")
        does = f"{self.function} of {self.module}{f': {purpose}' if purpose else ''}"
        return ActionNode(OF_USERS, {"user": self.call()}, does, name=f"tick.{self.function}")

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        return args["user"]["function"]
