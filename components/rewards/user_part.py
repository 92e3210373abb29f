"""`reward NAME { … }` with user code: a function with `@reward` in a module named by `use`."""

from typing import Any

from xtrain.dsl.schema.component import UserComponent, named
from xtrain.dsl.schema.policy import REWARDS, Reward
from xtrain.lazy_attrs import frozen


@REWARDS.user
@frozen
class UserReward(UserComponent, Reward):
    """`reward NAME { … }`: a function of your own, from a prompt, a completion and the record to a number."""

    kind: str = named("")

    def args(self) -> dict[str, Any]:
        return {"user": self.call()}

    def does(self) -> str:
        return f"reward by {self.kind} of {self.module}"
