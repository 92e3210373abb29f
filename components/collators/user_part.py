"""A link that is a user-defined function."""

from typing import TYPE_CHECKING, Any

from xtrain.contracts.data import PlannedLink
from xtrain.dsl.schema.component import UserComponent
from xtrain.dsl.schema.data_components import LINKS
from xtrain.lazy_attrs import frozen

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


@LINKS.user
@frozen
class UserCollator(UserComponent, PlannedLink):
    """`NAME`: a function of your own, called row by row."""

    kind = "user"

    @property
    def takes(self) -> str:  # type: ignore[override]
        return self.declared["takes"]

    @property
    def gives(self) -> str:  # type: ignore[override]
        return self.declared["gives"]

    @property
    def name(self) -> str:
        return self.function

    def args(self, resolved: "Resolved") -> dict[str, Any]:
        return {**self.call(), "takes": self.takes, "gives": self.gives}

    def does(self, resolved: "Resolved") -> str:
        return self.purpose.removesuffix(".") or f"{self.function} of {self.module}, row by row"

    def identity(self, align: int) -> list[Any]:
        # the kind that identities of experiments have always contained
        return ["UserCall", {"call": self.identified()}]
