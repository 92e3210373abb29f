"""A link that is a function of the user's own."""

from typing import Any

from attrs import field, frozen

from ...dsl.schema.calls import UserCall
from ...dsl.schema.collators import LINKS, Link


@LINKS.user
@frozen
class UserCollator(UserCall, Link):
    """`NAME`: a function of your own, called row by row."""

    takes: str = field(kw_only=True)
    gives: str = field(kw_only=True)

    kind = "user"

    @property
    def name(self) -> str:
        return self.function

    def args(self, run: Any) -> dict[str, Any]:
        return {**self.called(), "takes": self.takes, "gives": self.gives}

    def does(self, run: Any) -> str:
        return self.summary.removesuffix(".") or f"{self.function} of {self.module}, row by row"

    def identity(self, align: int) -> list[Any]:
        return ["UserCall", {"call": self.identified()}]
