"""`scheduler linear { … }`: a straight line from the peak down to the floor."""

from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.optimizers import SCHEDULERS, floor_of_peak, warm_up
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.plan.learning_rate import DecayingScheduler


@SCHEDULERS.register()
@frozen
class LinearDecay(DecayingScheduler):
    """`scheduler linear { … }`: a straight line from the peak down to the floor."""

    shape = "linear"

    kind: str = named("linear")
    warmup: Quantity = warm_up()
    floor: Quantity = floor_of_peak()
