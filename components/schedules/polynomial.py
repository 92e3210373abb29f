"""`scheduler polynomial { … }`: a power of the remaining share of the run."""

from collections.abc import Callable, Mapping
from typing import Any

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.optimizers import SCHEDULERS, Curve, Scheduler, floor_of_peak, warm_up
from xtrain.dsl.schema.setting import positive, setting
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.plan.learning_rate import closed_form, decay_text, idle_floor, length_in_steps


@SCHEDULERS.register()
@frozen
class Polynomial(Scheduler):
    """`scheduler polynomial { … }`: from the peak down to the floor r with a power of the remaining share.

    r + (1 − r)(1 − p)^power at the share p of the steps after the warm-up.
    """

    kind: str = named("polynomial")
    warmup: Quantity = warm_up()
    floor: Quantity = floor_of_peak()
    power: float = setting("exponent; 1: a straight line", default=2.0, check=positive)

    def idle(self) -> dict[str, str]:
        return idle_floor(self.warmup, "power")

    def falls(self, peak: float) -> bool:
        return self.floor.fraction < 1

    def args(self) -> dict[str, Any]:
        return {"floor": self.floor.fraction, "power": self.power}

    @classmethod
    def rate(cls, args: Mapping[str, Any], total: float) -> Curve:
        warmup, power = length_in_steps(args["warmup"], total), args["power"]
        shape = lambda p, r: r + (1 - r) * (1 - p) ** power  # noqa: E731
        return closed_form(args["lr"], total, warmup, total - warmup, args["floor"], shape)

    @classmethod
    def shown(cls, args: Mapping[str, Any], length: Callable[[str], str]) -> list[str]:
        return [decay_text(args, f"power {args['power']:g}")]
