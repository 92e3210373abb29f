"""`cluster` of a spec → `Hardware`: what the machines can do, from the spec or the data sheet of a preset."""

from typing import Final

from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.cluster import CLUSTERS
from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.planner.findings import Findings
from xtrain.planner.mesh.hardware_specs import FP8, FP8_SPEED, product_format
from xtrain.planner.plan import Hardware

RANGE: Final = (0.40, 0.60)  # an assumption: docs/accuracy.md counts how many published runs lie within it


def device_kind(spec: Spec) -> str:
    """`cpu`, `cuda`, or `auto`: cuda where there is one."""
    if spec.launch.device != "auto":
        return spec.launch.device
    return spec.cluster.device or "auto"


def resolve_cluster(spec: Spec, compute: str, nodes: int, ranks_per_node: int) -> Hardware:
    """What the machines can do, with `compute` as the format of products; None where nobody knows."""
    given, sheet = spec.cluster, spec.cluster.sheet
    product = product_format(compute, spec.precision.matmul)
    flops = sheet and sheet.flops[product] if isinstance(given.flops, Auto) else given.flops
    fp8 = None
    if spec.precision.scaled is not None:
        fp8 = sheet.flops.get(FP8) if sheet and isinstance(given.flops, Auto) else flops and FP8_SPEED * flops
    low, high = (given.efficiency.fraction,) * 2 if isinstance(given.efficiency, Quantity) else RANGE
    return Hardware(
        preset=given.preset,
        nodes=nodes if isinstance(given.nodes, Auto) else given.nodes,
        devices=ranks_per_node if isinstance(given.devices, Auto) else given.devices,
        memory_bytes=int(given.memory.value) if isinstance(given.memory, Quantity) else sheet and sheet.memory,
        flops=flops,
        efficiency=(low, high),
        link=float(given.link.value) if isinstance(given.link, Quantity) else sheet and sheet.link,
        network=float(given.network.value) if isinstance(given.network, Quantity) else sheet and sheet.network,
        price=given.price,
        mtbf_seconds=given.mtbf and given.mtbf.value,
        restart_seconds=_seconds(given.restart),
        storage=given.storage and given.storage.value,
        fp8_flops=fp8,
        programs_seconds=_seconds(given.programs),
        store_rate=None if isinstance(given.store_rate, Auto) else given.store_rate,
        connect_seconds=_seconds(given.connect),
        compile_seconds=_seconds(given.compile),
    )


def _seconds(given: Quantity | Auto | None) -> float | None:
    return given.value if isinstance(given, Quantity) else None


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
    kind = cluster.device
    if kind and spec.launch.device not in ("auto", kind):
        message = f"launch.device is {spec.launch.device}, but cluster {cluster.preset} has {kind} devices"
        hint = f"leave launch.device auto, or write `cluster {_of_device(spec.launch.device)}`"
        found.fail("cluster.device", "X422", "launch.device", message, hint)


def _of_device(device: str) -> str:
    """The preset of a kind of devices without a data sheet, or that of any devices."""
    plain = [name for name, cluster in CLUSTERS.items() if cluster.sheet is None and cluster.known]
    return next((name for name in plain if CLUSTERS[name].device == device), plain[-1])
