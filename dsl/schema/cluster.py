"""Machines: `cluster`, `launcher`, `fault_tolerance`, and the training server (`serve`)."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal

from xtrain.dsl.schema.component import Component, Registry, named
from xtrain.dsl.schema.setting import (
    AUTO,
    Auto,
    Range,
    Role,
    at_least,
    file_path,
    host_name,
    not_negative,
    positive,
    setting,
    share,
    some_text,
    variable_name,
    web_origin,
)
from xtrain.dsl.values import Interval, Quantity
from xtrain.lazy_attrs import frozen

CLUSTERS: Final = Registry["Cluster"](
    "cluster",
    "clusters",
    key="preset",
    order=lambda cluster: (cluster.sheet is None, not cluster.device, not cluster.known),
)


@frozen(kw_only=True)
class DeviceSheet:
    """Data sheet of a device. memory: bytes. flops: operations per second by number format. link, network: bytes per
    second to devices of the same machine and of other machines, one way. capability: major CUDA compute capability.
    bandwidth: bytes per second from device memory; None: unknown. shared: the ranks of a machine share it, as a CPU."""

    memory: int
    flops: Mapping[Any, float]
    link: float
    network: float
    capability: int
    bandwidth: float | None = None
    shared: bool = False


@frozen(kw_only=True)
class MeasuredMachine:
    """Machine as it was measured. device: `cuda` or `cpu`. name: of the device. devices: number of GPUs; 1 for a CPU.
    reached: share of `sheet.flops` that blocks of a model reached; None: not measured. at: UTC, to the minute."""

    device: str
    name: str
    devices: int
    sheet: DeviceSheet
    reached: float | None
    at: str


class Unmeasured(Exception):
    """Machine that could not be measured."""


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
        "memory of a device; auto: from the preset",
        default=AUTO,
        units=("bytes",),
        check=positive,
        role=Role.EXECUTION,
        example="80 GiB",
    )
    flops: float | Auto = setting(
        "peak dense FLOP/s of a device in the compute format, for the plan and the MFU of the run; auto: from the "
        "preset's data sheet, in the run from the device's",
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
    calibration: str | None = setting(
        "file with measured step times, written by `xtrain calibrate`, from which step times are predicted; none: from "
        "`efficiency` and data sheets",
        default=None,
        check=file_path,
        role=Role.EXECUTION,
        example='"calibration.json"',
        added=True,
    )
    link: Quantity | Auto = setting(
        "bandwidth of a device inside its node, bytes per second; auto: from the preset",
        default=AUTO,
        units=("bytes",),
        check=positive,
        role=Role.EXECUTION,
        example="419 GiB",
    )
    network: Quantity | Auto = setting(
        "bandwidth of a device to other nodes, bytes per second; auto: from the preset",
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
        "mean time between failures of one device including its share of the machine; none: failures are not estimated",
        default=None,
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="50000 h",
    )
    restart: Quantity | Auto = setting(
        "time from a failure to the first step after it; auto: `fault_tolerance.stuck`, the latest time of "
        "detection, plus the planned start-up time; replacing a machine is not included",
        default=AUTO,
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="10 min",
    )
    storage: Quantity | None = setting(
        "bandwidth of the checkpoint disks, bytes per second for all ranks together; none: saves take no time in "
        "the plan",
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
        "requests per second that the rendezvous store answers; auto: as measured",
        default=AUTO,
        check=positive,
        role=Role.EXECUTION,
        example="200k",
        added=True,
    )
    connect: Quantity | Auto = setting(
        "time per rank to create a GPU communicator; auto: as published for NCCL",
        default=AUTO,
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="0.001 s",
        added=True,
    )
    compile: Quantity | None = setting(
        "time to compile one kind of block, forward and backward; none: unknown",
        default=None,
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="40 s",
        added=True,
    )

    device: ClassVar[str] = ""
    """`cuda` or `cpu`; empty if the preset does not define it."""
    sheet: ClassVar[DeviceSheet | None] = None
    """Data sheet of its devices, if the preset defines one."""
    known: ClassVar[bool] = True
    """True if the cluster allows estimates."""

    def machine(self) -> MeasuredMachine | None:
        """Return the machine that the cluster is, if it is measured. Raises Unmeasured."""
        return None

    def measured(self) -> MeasuredMachine | None:
        """Return the machine; None if the preset is not a measured one, or if the machine could not be measured."""
        try:
            return self.machine()
        except Unmeasured:
            return None

    def data_sheet(self) -> DeviceSheet | None:
        """Return the data sheet of the preset's devices, or of the measured ones; None: unknown."""
        machine = self.measured()
        return self.sheet if machine is None else machine.sheet

    def device_kind(self) -> str:
        """Return `cuda` or `cpu`; empty if the cluster does not define it."""
        machine = self.measured()
        return self.device if machine is None else machine.device

    @classmethod
    def fits(cls, kind: str, name: str) -> bool:
        """Return True if a device can belong to the cluster. kind: `cuda` or `cpu`. name: the driver's name of the
        device."""
        return not cls.device or cls.device == kind


LAUNCHERS: Final = Registry["Launcher"]("launcher", "launchers", contract="xtrain.contracts.actions.PlannedLauncher")


@LAUNCHERS.base
@frozen
class Launcher(Component):
    """`launcher NAME { … }`: where `xtrain launch` gets the machines of a run; without this block, from `--on`.

    `_run.py` next to a launcher defines an object `LAUNCHER`, a `JobLauncher` (`runtime/jobs/submitted.py`), which
    writes the files of a job, submits them, and queries its state.
    """

    alone: ClassVar[bool] = False
    """True if the launcher has only one machine."""
    obeys_restarts: ClassVar[bool] = False
    """True if the launcher restarts all machines after a failure, as often as `fault_tolerance.restarts` says."""

    def says(self) -> str:
        """Return the text that follows its name on the plan page."""
        return ""

    def own_restarts(self) -> tuple[str, int] | None:
        """Return its own setting for the number of restarts, and the value; None if it has none."""
        return None

    def idle(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that another setting makes ineffective, each with the reason."""
        return iter(())


@frozen
class FaultTolerance:
    """`fault_tolerance { … }`: when ranks count as stuck, when a run counts as failed, and how it is restarted."""

    stuck: Quantity | None = setting(
        "time without progress after which stuck ranks are reported and the run stops; none: never",
        default=Quantity(600, "seconds"),
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="10 min",
    )
    empty_steps: int = setting(
        "consecutive steps without a valid token after which the run fails",
        default=10,
        check=at_least(1),
        role=Role.EXECUTION,
    )
    restarts: int = setting(
        "how often `xtrain run` restarts all ranks from the last checkpoint after a failure",
        default=0,
        check=not_negative,
        role=Role.EXECUTION,
        example="3",
    )
    elastic: Interval | None = setting(
        "range of world sizes on which the run may continue with the same global batch if ranks or devices are lost",
        default=None,
        check=at_least(1),
        role=Role.MESH,
        example="2..4",
    )


KEY_VARIABLE: Final = "XTRAIN_KEY"  # keys of a server whose spec names no variable


@frozen
class Serve:
    """`serve { … }`: a server that trains adapters, or the model itself, step by step as clients request; `adapter`
    limits the size of an adapter."""

    model: str | None = setting(
        "name of the model for clients; none: the name of the experiment",
        default=None,
        check=some_text,
        role=Role.EXECUTION,
        example='"Qwen/Qwen3-8B"',
    )
    mode: Literal["adapters", "full"] = setting(
        "adapters: each client trains its own adapter, many of them in memory; full: one client at a time trains "
        "the whole model",
        default="adapters",
        role=Role.EXECUTION,
    )
    adapters: int = setting(
        "number of adapters in memory at the same time", default=16, check=Range(low=1, high=999), role=Role.EXECUTION
    )
    max_tokens: int = setting(
        "maximum tokens of a text that a client sends or generates",
        default=2048,
        check=at_least(2),
        role=Role.EXECUTION,
    )
    rows: int = setting(
        "texts that a data rank computes together", default=1, check=at_least(1), role=Role.MESH, example="4"
    )
    host: str = setting(
        "address that the server listens on; any address beyond this machine requires `key`",
        default="127.0.0.1",
        check=some_text,
        role=Role.EXECUTION,
    )
    port: int = setting(
        "port that the server listens on", default=8000, check=Range(low=1, high=65535), role=Role.EXECUTION
    )
    key: str | None = setting(
        "name of the environment variable with the key that clients must send, or with `NAME=KEY` for each of "
        "several isolated owners; none: XTRAIN_KEY, and if that is unset a key that the server generates at its "
        "first start, prints, and keeps in its directory",
        default=None,
        check=variable_name,
        role=Role.EXECUTION,
        example='"SUPPORT_KEY"',
    )
    hosts: tuple[str, ...] = setting(
        "additional names by which clients connect, which protects against DNS rebinding; `host`, the address a "
        "client has connected to, and localhost are always accepted",
        default=(),
        check=host_name,
        role=Role.EXECUTION,
        example='["gpu1.lab"]',
    )
    origins: tuple[str, ...] = setting(
        "origins of web pages that may call the server with a key; other pages are refused",
        default=(),
        check=web_origin,
        role=Role.EXECUTION,
        example='["https://lab.example"]',
    )
    certificate: str | None = setting(
        "file (PEM) with the certificate chain of the server, relative to the working folder; none: no TLS",
        default=None,
        check=file_path,
        role=Role.EXECUTION,
        example='"tls/server.pem"',
    )
    private_key: str | None = setting(
        "file (PEM) with the private key of `certificate`, without a passphrase",
        default=None,
        check=file_path,
        role=Role.EXECUTION,
        example='"tls/server.key"',
    )
    queue: int = setting(
        "maximum waiting requests; clients retry further ones later",
        default=256,
        check=at_least(1),
        role=Role.EXECUTION,
    )
    idle: Quantity = setting(
        "time without a request from a client after which its adapters are saved and leave memory",
        default=Quantity(1800, "seconds"),
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="30 min",
    )

    @property
    def key_variable(self) -> str:
        """Environment variable with the keys."""
        return self.key or KEY_VARIABLE

    @property
    def places(self) -> int:
        """Models that clients may keep in memory at once."""
        return 1 if self.mode == "full" else self.adapters
