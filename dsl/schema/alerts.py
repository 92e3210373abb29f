"""What a run tells of before anybody looks: `alerts`."""

from attrs import frozen

from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.setting import AUTO, Auto, Range, Role, positive, setting, share


@frozen
class Alerts:
    """`alerts { … }`: thresholds of alerts; `on … notify("command")` forwards an alert.

    Each is raised once and taken back when it is over. A loss or gradient norm that is not a number always is one.
    """

    loss_spike: float | None = setting(
        "raised if the loss of a step is so many robust standard deviations above the median of 100 steps",
        default=6.0,
        check=positive,
        role=Role.CADENCE,
    )
    slow: float | None = setting(
        "raised if five steps in a row take so many times the median of the last 100 steps",
        default=2.0,
        check=Range(above=1),
        role=Role.CADENCE,
    )
    starvation: Quantity | None = setting(
        "raised if this share of the step time is spent waiting for data",
        default=Quantity(30, "%"),
        units=("%",),
        check=Range(low=1, high=100, percent=True),
        role=Role.CADENCE,
    )
    memory: Quantity | None = setting(
        "raised if a rank uses this share of its planned memory; on GPUs only",
        default=Quantity(105, "%"),
        units=("%",),
        check=positive,
        role=Role.CADENCE,
    )
    disk: Quantity | None = setting(
        "raised if less of the run's file system is free, or if a checkpoint would not fit; a share means at most "
        "the size of 10 checkpoints, or 100 GiB if that is more",
        default=Quantity(5, "%"),
        units=("%", "bytes"),
        check=share,
        role=Role.CADENCE,
        example="50 GiB",
    )
    stalled: Quantity | Auto | None = setting(
        "raised after this time without progress; auto: 60 s, or half of `fault_tolerance.stuck` if shorter",
        default=AUTO,
        units=("seconds",),
        check=positive,
        role=Role.CADENCE,
        example="60 s",
    )
