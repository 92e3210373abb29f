"""What a run does about ranks that fail and steps that teach nothing: `fault_tolerance`."""

from attrs import frozen

from xtrain.dsl.interval import Interval
from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.setting import Role, at_least, not_negative, positive, setting


@frozen
class FaultTolerance:
    """`fault_tolerance { … }`: when ranks count as stuck, when a run counts as failed, and how it is restarted."""

    stuck: Quantity | None = setting(
        "time without progress after which stuck ranks are reported and the run is ended; none: never",
        default=Quantity(600, "seconds"),
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="10 min",
    )
    empty_steps: int = setting(
        "steps in a row without a valid token after which the run fails",
        default=10,
        check=at_least(1),
        role=Role.EXECUTION,
    )
    restarts: int = setting(
        "how often `xtrain run` restarts all ranks from the last checkpoint after a rank has failed",
        default=0,
        check=not_negative,
        role=Role.EXECUTION,
        example="3",
    )
    elastic: Interval | None = setting(
        "range of world sizes on which the run may continue if ranks or devices are lost, with the same global batch",
        default=None,
        check=at_least(1),
        role=Role.MESH,
        example="2..4",
    )
