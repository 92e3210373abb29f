"""`scheduler NAME { … }` with user code: a function with `@schedule` in a module named by `use`."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from xtrain.dsl.schema.component import UserComponent, named
from xtrain.dsl.schema.optimizers import SCHEDULERS, Scheduler
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen


@SCHEDULERS.user
@frozen
class UserSchedule(UserComponent, Scheduler):
    """`scheduler NAME { … }`: a function of your own that returns a step's rate as a factor of the peak."""

    kind: str = named("")

    computed: ClassVar[bool] = False

    def falls(self, peak: float) -> bool:
        return False  # unknown before the run

    def lengths(self) -> dict[str, Quantity]:
        return {}

    def args(self) -> dict[str, Any]:
        return {"user": self.call()}

    @classmethod
    def shown(cls, args: Mapping[str, Any], length: Callable[[str], str]) -> list[str]:
        return [f"by {args['kind']} of {args['user']['module']}, step by step in the run"]
