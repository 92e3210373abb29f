"""What a run tells of before anybody looks: `alerts`."""

from attrs import frozen

from ..quantity import Quantity
from .setting import AUTO, Auto, Range, Role, positive, setting, share


@frozen
class Alerts:
    """`alerts { … }`: what a run raises an alert about, and from when on; `on … notify("command")` sends it somewhere.

    Each is raised once and taken back when it is over. A loss or gradient norm that is not a number always is one.
    """

    loss_spike: float | None = setting(
        "robust standard deviations that a step's loss lies above the median of the last 100 steps",
        default=6.0,
        check=positive,
        role=Role.CADENCE,
    )
    slow: float | None = setting(
        "times the median of the last 100 steps that five steps in a row take",
        default=2.0,
        check=Range(above=1),
        role=Role.CADENCE,
    )
    starvation: Quantity | None = setting(
        "share of the time of steps that is spent waiting for rows",
        default=Quantity(30, "%"),
        units=("%",),
        check=Range(low=1, high=100, percent=True),
        role=Role.CADENCE,
    )
    memory: Quantity | None = setting(
        "share of the memory that a rank is planned to hold; of GPUs only",
        default=Quantity(105, "%"),
        units=("%",),
        check=positive,
        role=Role.CADENCE,
    )
    disk: Quantity | None = setting(
        "least of the run's file system that is to be free, also if a checkpoint would not fit; a share asks for no "
        "more than 10 checkpoints take, or 100 GiB if that is more",
        default=Quantity(5, "%"),
        units=("%", "bytes"),
        check=share,
        role=Role.CADENCE,
        example="50 GiB",
    )
    stalled: Quantity | Auto | None = setting(
        "time without progress after which ranks are named; auto: 60 s, or half of `fault_tolerance.stuck` if shorter",
        default=AUTO,
        units=("seconds",),
        check=positive,
        role=Role.CADENCE,
        example="60 s",
    )
