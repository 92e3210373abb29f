"""A link that is a function of the user's own."""

from typing import Any

from attrs import frozen

from xtrain.dsl.schema.collators import LINKS, Link
from xtrain.dsl.schema.component import UserComponent


@LINKS.user
@frozen
class UserCollator(UserComponent, Link):
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

    def args(self, run: Any) -> dict[str, Any]:
        return {**self.call(), "takes": self.takes, "gives": self.gives}

    def does(self, run: Any) -> str:
        return self.purpose.removesuffix(".") or f"{self.function} of {self.module}, row by row"

    def identity(self, align: int) -> list[Any]:
        return ["UserCall", {"call": self.identified()}]  # which identities of experiments have always called it
