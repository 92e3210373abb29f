"""`scheduler cosine { … }`: half a cosine from the peak down to the floor."""

from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from ...dsl.quantity import Quantity
from ...dsl.schema.component import named
from ...dsl.schema.training import SCHEDULERS, Rate, Scheduler, floor_of_peak, warm_up
from ...planner.schedule.closed_form import idle_floor, rise_and_fall, shown_fall


@SCHEDULERS.register()
@frozen
class Cosine(Scheduler):
    """`scheduler cosine { … }`: half a cosine from the peak down to the floor."""

    kind: str = named("cosine")
    warmup: Quantity = warm_up()
    floor: Quantity = floor_of_peak()

    def idle(self) -> dict[str, str]:
        return idle_floor(self.warmup)

    def args(self) -> dict[str, Any]:
        return {"floor": self.floor.fraction}

    @classmethod
    def rate(cls, args: Mapping[str, Any], total: int) -> Rate:
        return rise_and_fall(args, total, "cosine")

    @classmethod
    def shown(cls, args: Mapping[str, Any], length: Callable[[str], str]) -> list[str]:
        return [shown_fall(args, "cosine")]
