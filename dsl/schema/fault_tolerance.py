"""What a run does about ranks that fail: `fault_tolerance`."""

from attrs import frozen

from ..quantity import Quantity
from .setting import Role, positive, setting


@frozen
class FaultTolerance:
    """`fault_tolerance { … }`: when a rank counts as lost, and what happens then."""

    stuck: Quantity | None = setting(
        "time without progress after which ranks are named and the run is ended; none: ranks wait for each other",
        default=Quantity(600, "seconds"),
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="10 min",
    )
