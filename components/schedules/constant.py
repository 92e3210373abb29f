"""`scheduler constant { … }`: the peak, from the warm-up to the end."""

from collections.abc import Callable, Mapping
from typing import Any

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.optimizers import SCHEDULERS, Curve, Scheduler, warm_up
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.plan.learning_rate import length_in_steps


@SCHEDULERS.register()
@frozen
class Constant(Scheduler):
    """`scheduler constant { … }`: the peak, from the warm-up to the end."""

    kind: str = named("constant")
    warmup: Quantity = warm_up()

    def falls(self, peak: float) -> bool:
        return False

    @classmethod
    def rate(cls, args: Mapping[str, Any], total: float) -> Curve:
        lr, warmup = args["lr"], length_in_steps(args["warmup"], total)
        return lambda index: lr * min(1.0, (index + 1) / warmup) if warmup else lr

    @classmethod
    def shown(cls, args: Mapping[str, Any], length: Callable[[str], str]) -> list[str]:
        return ["constant"]
