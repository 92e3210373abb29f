"""`scheduler linear { … }`: a straight line from the peak down to the floor."""

from attrs import frozen

from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.schedules import SCHEDULERS, floor_of_peak, warm_up
from xtrain.planner.schedule.closed_form import DecayingScheduler


@SCHEDULERS.register()
@frozen
class LinearDecay(DecayingScheduler):
    """`scheduler linear { … }`: a straight line from the peak down to the floor."""

    shape = "linear"

    kind: str = named("linear")
    warmup: Quantity = warm_up()
    floor: Quantity = floor_of_peak()
