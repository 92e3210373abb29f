"""`log { NAME { … } }` with user code: a class with `@tracker` in a module named by `use`."""

from collections.abc import Mapping
from typing import Any, ClassVar

from xtrain.contracts.actions import PlannedTracker
from xtrain.dsl.schema.component import UserComponent
from xtrain.dsl.schema.run import TRACKERS
from xtrain.lazy_attrs import frozen


@TRACKERS.user
@frozen
class UserTracker(UserComponent, PlannedTracker):
    """`log { NAME { … } }`: a class of your own that receives the records of a run."""

    kind: ClassVar[str] = "user"  # type: ignore[misc]
    title = "a tracker of your own"

    def args(self) -> dict[str, Any]:
        return {"user": self.call()}

    def does(self) -> str:
        purpose = self.purpose.removesuffix(".")
        return f"passes records to {self.function} of {self.module}{f' ({purpose})' if purpose else ''}"

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        return f"{args['user']['function']} of {args['user']['module']}"
