"""What a run is planned for: `cluster`, the machines and what they can do."""

from typing import Literal

from attrs import frozen

from ..quantity import Quantity
from .setting import AUTO, Auto, Role, at_least, positive, setting, share

Preset = Literal["a100", "h100", "h200", "b200", "cpu", "other", "none"]
ACCELERATORS = ("a100", "h100", "h200", "b200")


@frozen
class Cluster:
    """`cluster h100 { … }`: the machines, so that memory and time can be held against them; without it, unknown."""

    preset: Preset
    nodes: int | Auto = setting(
        "number of machines there are; auto: as many as launch uses", default=AUTO, check=at_least(1), role=Role.MESH
    )
    devices: int | Auto = setting(
        "devices of a machine; auto: as many as launch uses", default=AUTO, check=at_least(1), role=Role.MESH
    )
    memory: Quantity | Auto = setting(
        "memory of a device; auto: that of the preset",
        default=AUTO,
        units=("bytes",),
        check=positive,
        role=Role.EXECUTION,
        example="80 GiB",
    )
    flops: float | Auto = setting(
        "operations a second of a device in dense products of the compute format, in the plan and for MFU of the run; "
        "auto: the data sheet of the preset, and in the run that of the device which is there",
        default=AUTO,
        check=positive,
        role=Role.EXECUTION,
        example="989T",
    )
    efficiency: Quantity | Auto = setting(
        "share of these operations that a step reaches while it computes; auto: 40% to 60%, an assumption",
        default=AUTO,
        units=("%",),
        check=share,
        role=Role.EXECUTION,
        example="45%",
    )
    link: Quantity | Auto = setting(
        "bytes a second that a device sends inside its machine; auto: that of the preset",
        default=AUTO,
        units=("bytes",),
        check=positive,
        role=Role.EXECUTION,
        example="419 GiB",
    )
    network: Quantity | Auto = setting(
        "bytes a second that a device sends to other machines; auto: that of the preset",
        default=AUTO,
        units=("bytes",),
        check=positive,
        role=Role.EXECUTION,
        example="46 GiB",
    )
    price: float | None = setting(
        "price of a device for an hour, in the currency you think in; none: no cost is shown",
        default=None,
        check=positive,
        role=Role.EXECUTION,
    )
