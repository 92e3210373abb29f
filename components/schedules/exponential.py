"""`scheduler exponential { … }`: the rate changes by the same factor in every step (Smith 2015, arXiv 1506.01186, in
geometric steps)."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.optimizers import SCHEDULERS, Curve, Scheduler
from xtrain.dsl.schema.setting import positive, setting
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen


@SCHEDULERS.register()
@frozen
class Exponential(Scheduler):
    """`scheduler exponential { … }`: from `start` in the first step to `lr` in the last one, by equal factors.

    start · (lr / start)^(i / (T − 1)) in step i of T, from 0.
    """

    kind: str = named("exponential")
    searches: ClassVar[bool] = True

    start: float = setting("learning rate of the first step", default=1e-7, check=positive)

    def lengths(self) -> dict[str, Quantity]:
        return {}

    def falls(self, peak: float) -> bool:
        return peak < self.start

    def args(self) -> dict[str, Any]:
        return {"start": self.start}

    @classmethod
    def rate(cls, args: Mapping[str, Any], total: float) -> Curve:
        start, end = args["start"], args["lr"]
        return lambda index: start * (end / start) ** min(1.0, index / max(1, total - 1))

    @classmethod
    def shown(cls, args: Mapping[str, Any], length: Callable[[str], str]) -> list[str]:
        return [f"from {args['start']:g} by equal factors to {args['lr']:g} at the end"]
