"""`scheduler`: the learning rate of every step."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.setting import (
    setting,
    share,
)

SCHEDULERS: Final = Registry["Scheduler"]("scheduler", "schedules")


def warm_up() -> Any:
    """The setting `warmup` that every schedule has."""
    return setting(
        "length of the linear warm-up",
        default=Quantity(0, "steps"),
        units=("steps", "tokens", "epochs", "%"),
        check=share,
    )


def floor_of_peak() -> Any:
    """The setting `floor` of schedules that fall."""
    return setting("learning rate at the end, as a share of `lr`", default=Quantity(0, "%"), units=("%",), check=share)


Rate = Callable[[int], float]
"""Index of a step, from 0 → learning rate."""
Curve = Callable[[float], float]
"""The same between steps: where the batch has changed, what was trained on need not be a whole number of steps."""


@SCHEDULERS.base
class Scheduler(Component):
    """`scheduler NAME { … }`: the learning-rate schedule; without this block the rate is constant."""

    warmup: Quantity

    def lengths(self) -> dict[str, Quantity]:
        """The settings that are lengths, which have to fit into the budget together."""
        return {"warmup": self.warmup}

    at_end: ClassVar[tuple[str, ...]] = ()
    """Those of them that are counted back from the end of the run, not from its beginning."""

    def idle(self) -> dict[str, str]:
        """The settings that change nothing beside the others, whatever the budget, and why."""
        return {}

    def args(self) -> dict[str, Any]:
        """The JSON arguments of its node beside `kind`, `lr`, `steps` and those that `lengths` names."""
        return {}

    def falls(self, peak: float) -> bool:
        """Whether rates get smaller on the way. peak: the learning rate of the optimizer."""
        return True

    computed: ClassVar[bool] = True
    """Whether its rates can be computed without a run."""

    @classmethod
    def rate(cls, args: Mapping[str, Any], total: float) -> Curve:
        """The learning rate of every step of `total`. args: of its node, with lengths in steps, which need not be whole
        numbers after a resume with another batch."""
        raise NotImplementedError

    @classmethod
    def in_steps(cls, args: Mapping[str, Any]) -> bool:
        """Whether the rate depends on the number of steps even where the budget is in tokens or epochs."""
        return False

    @classmethod
    def shown(cls, args: Mapping[str, Any], length: Callable[[str], str]) -> list[str]:
        """Where the rate turns, behind the warm-up, in words. length: an amount among the arguments in words."""
        raise NotImplementedError
