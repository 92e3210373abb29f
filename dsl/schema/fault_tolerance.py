"""What a run does about ranks that fail and steps that teach nothing: `fault_tolerance`."""

from attrs import frozen

from ..interval import Interval
from ..quantity import Quantity
from .setting import Role, at_least, not_negative, positive, setting


@frozen
class FaultTolerance:
    """`fault_tolerance { … }`: when a rank counts as lost, or a run as learning nothing, and what happens then."""

    stuck: Quantity | None = setting(
        "time without progress after which ranks are named and the run is ended; none: ranks wait for each other",
        default=Quantity(600, "seconds"),
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="10 min",
    )
    empty_steps: int = setting(
        "steps in a row without a token to learn from, after which the run ends as failed",
        default=10,
        check=at_least(1),
        role=Role.EXECUTION,
    )
    restarts: int = setting(
        "how often `xtrain run` starts all ranks again, from the last checkpoint, after one of them has failed",
        default=0,
        check=not_negative,
        role=Role.EXECUTION,
        example="3",
    )
    elastic: Interval | None = setting(
        "numbers of ranks the run may go on with, at the same rows a step, where ranks or devices stay away",
        default=None,
        check=at_least(1),
        role=Role.MESH,
        example="2..4",
    )
