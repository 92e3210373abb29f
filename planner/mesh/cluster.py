"""`cluster` of a spec → `Hardware`: what the machines can do, from the spec or the data sheet of a preset.

Sources: NVIDIA's data sheets of A100 SXM 80 GB, H100 SXM, H200 SXM and HGX B200 (products as in `hardware_specs.py`;
half of NVLink's figure, which counts both directions; one ConnectX of 200 or 400 Gb/s a device).
"""

from typing import Final

from attrs import frozen

from ...dsl.quantity import Quantity
from ...dsl.schema.cluster import ACCELERATORS
from ...dsl.schema.setting import Auto
from ...dsl.spec import Spec
from ..findings import Findings
from ..plan import Hardware
from .hardware_specs import PEAKS, Peaks, product_format


@frozen(kw_only=True)
class DeviceSheet:
    """A data sheet: bytes, operations a second by format, bytes a second one way."""

    memory: int
    flops: Peaks
    link: float
    network: float


GB: Final = 1e9
SHEETS: Final[dict[str, DeviceSheet]] = {
    "a100": DeviceSheet(memory=80 * 2**30, flops=PEAKS["A100"], link=300 * GB, network=25 * GB),
    "h100": DeviceSheet(memory=80 * 2**30, flops=PEAKS["H100 SXM"], link=450 * GB, network=50 * GB),
    "h200": DeviceSheet(memory=140 * 2**30, flops=PEAKS["H200 SXM"], link=450 * GB, network=50 * GB),
    "b200": DeviceSheet(memory=179 * 2**30, flops=PEAKS["B200"], link=900 * GB, network=50 * GB),
}
RANGE: Final = (0.40, 0.60)  # an assumption: docs/accuracy.md counts how many published runs lie within it


def device_kind(spec: Spec) -> str:
    """`cpu`, `cuda`, or `auto`: cuda where there is one."""
    if spec.launch.device != "auto":
        return spec.launch.device
    if spec.cluster.preset in ACCELERATORS:
        return "cuda"
    return "cpu" if spec.cluster.preset == "cpu" else "auto"


def resolve_cluster(spec: Spec, compute: str, nodes: int, ranks_per_node: int) -> Hardware:
    """What the machines can do, with `compute` as the format of products; None where nobody knows."""
    given, sheet = spec.cluster, SHEETS.get(spec.cluster.preset)
    product = product_format(compute, spec.precision.matmul)
    low, high = (given.efficiency.fraction,) * 2 if isinstance(given.efficiency, Quantity) else RANGE
    return Hardware(
        preset=given.preset,
        nodes=nodes if isinstance(given.nodes, Auto) else given.nodes,
        devices=ranks_per_node if isinstance(given.devices, Auto) else given.devices,
        memory_bytes=int(given.memory.value) if isinstance(given.memory, Quantity) else sheet and sheet.memory,
        flops=sheet and sheet.flops[product] if isinstance(given.flops, Auto) else given.flops,
        efficiency=(low, high),
        link=float(given.link.value) if isinstance(given.link, Quantity) else sheet and sheet.link,
        network=float(given.network.value) if isinstance(given.network, Quantity) else sheet and sheet.network,
        price=given.price,
    )


def check_cluster(spec: Spec, nodes: int, ranks_per_node: int, found: Findings) -> None:
    """The run has to fit on the machines that there are, and compute on the devices they have."""
    cluster = spec.cluster
    for name, asked, there in (("nodes", nodes, cluster.nodes), ("devices", ranks_per_node, cluster.devices)):
        if isinstance(there, Auto):
            continue
        what = {"nodes": "machines", "devices": "devices of a machine"}[name]
        if asked > there:
            message = f"the run needs {asked} {what}, and the cluster has {there}"
            found.fail(f"cluster.{name}", "X421", f"cluster.{name}", message, f"use {name} {asked}, or fewer ranks")
        else:
            found.passed(f"cluster.{name}", f"{asked} of {there} {what} are used")
    kind = {"cpu": "cpu", **dict.fromkeys(ACCELERATORS, "cuda")}.get(cluster.preset)
    if kind is not None and spec.launch.device not in ("auto", kind):
        message = f"launch.device is {spec.launch.device}, but cluster {cluster.preset} has {kind} devices"
        hint = f"leave launch.device auto, or write `cluster {'cpu' if kind == 'cuda' else 'other'}`"
        found.fail("cluster.device", "X422", "launch.device", message, hint)
