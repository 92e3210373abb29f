"""What a run is planned for: `cluster`, the machines and what they can do."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from attrs import frozen

from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.component import Component, Registry, named
from xtrain.dsl.schema.setting import AUTO, Auto, Role, at_least, positive, setting, share

CLUSTERS: Final = Registry["Cluster"](
    "cluster",
    "clusters",
    key="preset",
    order=lambda cluster: (cluster.sheet is None, not cluster.device, not cluster.known),
)


@frozen(kw_only=True)
class DeviceSheet:
    """A data sheet. memory: bytes. flops: operations a second by format of products. link, network: bytes a second to
    others of the machine and to other machines, one way. capability: of CUDA, its first number. bandwidth: bytes a
    second from a device's memory; None: not known."""

    memory: int
    flops: Mapping[Any, float]
    link: float
    network: float
    capability: int
    bandwidth: float | None = None


@CLUSTERS.base
@frozen
class Cluster(Component):
    """`cluster h100 { … }`: the machines, to estimate memory, time and cost; without this block these are unknown."""

    preset: str = named("")
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
    mtbf: Quantity | None = setting(
        "mean time between failures of one device, with what belongs to it; none: nothing is said of failures",
        default=None,
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="50000 h",
    )
    restart: Quantity | Auto = setting(
        "time from a failure to the first step behind it; auto: `fault_tolerance.stuck`, after which it is noticed at "
        "the latest, and the planned time of a start; no machine is replaced meanwhile",
        default=AUTO,
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="10 min",
    )
    storage: Quantity | None = setting(
        "bandwidth of the disks that checkpoints are written to, bytes per second by all ranks together; none: saves "
        "take no time in the plan",
        default=None,
        units=("bytes",),
        check=positive,
        role=Role.EXECUTION,
        example="100 GiB",
    )

    programs: Quantity | Auto = setting(
        "time of a rank to load Python, torch and its code; auto: as measured from a local disk",
        default=AUTO,
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="20 s",
        added=True,
    )
    store_rate: float | Auto = setting(
        "requests a second that the process answers in whose store ranks meet; auto: as measured",
        default=AUTO,
        check=positive,
        role=Role.EXECUTION,
        example="200k",
        added=True,
    )
    connect: Quantity | Auto = setting(
        "time to make a communicator of GPUs, for each of its ranks; auto: as published of NCCL",
        default=AUTO,
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="0.001 s",
        added=True,
    )
    compile: Quantity | None = setting(
        "time to compile one kind of block, forward and backward; none: not known",
        default=None,
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="40 s",
        added=True,
    )

    device: ClassVar[str] = ""
    """`cuda` or `cpu`; empty where the preset does not say."""
    sheet: ClassVar[DeviceSheet | None] = None
    """What its devices can do, where the preset says it."""
    known: ClassVar[bool] = True
    """Whether there is a cluster to estimate anything for."""

    @classmethod
    def fits(cls, kind: str, name: str) -> bool:
        """Whether a device may be one of its devices. kind: `cuda` or `cpu`. name: what the driver calls it."""
        return not cls.device or cls.device == kind
