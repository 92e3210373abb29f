"""What a run is planned for: `cluster`, the machines and what they can do."""

from typing import Literal

from attrs import frozen

from ..quantity import Quantity
from .setting import AUTO, Auto, Role, at_least, positive, setting, share

Preset = Literal["a100", "h100", "h200", "b200", "cpu", "other", "none"]
ACCELERATORS = ("a100", "h100", "h200", "b200")


@frozen
class Cluster:
    """`cluster h100 { … }`: the machines, to estimate memory, time and cost; without this block these are unknown."""

    preset: Preset
    nodes: int | Auto = setting(
        "number of available nodes; auto: as many as `launch` uses", default=AUTO, check=at_least(1), role=Role.MESH
    )
    devices: int | Auto = setting(
        "devices per node; auto: as many as `launch` uses", default=AUTO, check=at_least(1), role=Role.MESH
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
        "peak dense FLOP/s of a device in the compute format, for the plan and for the MFU of the run; "
        "auto: the data sheet of the preset, and in the run that of the device which is there",
        default=AUTO,
        check=positive,
        role=Role.EXECUTION,
        example="989T",
    )
    efficiency: Quantity | Auto = setting(
        "share of the peak FLOP/s that a step reaches while it computes; auto: 40% to 60%, an assumption",
        default=AUTO,
        units=("%",),
        check=share,
        role=Role.EXECUTION,
        example="45%",
    )
    link: Quantity | Auto = setting(
        "bandwidth of a device inside its node, bytes per second; auto: that of the preset",
        default=AUTO,
        units=("bytes",),
        check=positive,
        role=Role.EXECUTION,
        example="419 GiB",
    )
    network: Quantity | Auto = setting(
        "bandwidth of a device to other nodes, bytes per second; auto: that of the preset",
        default=AUTO,
        units=("bytes",),
        check=positive,
        role=Role.EXECUTION,
        example="46 GiB",
    )
    price: float | None = setting(
        "price of a device per hour, in any currency; none: no cost is shown",
        default=None,
        check=positive,
        role=Role.EXECUTION,
    )
