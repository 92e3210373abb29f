"""Checks of this machine before ranks are started, so that one process reports a fault instead of all ranks."""

import os
from pathlib import Path

from attrs import frozen

from xtrain.dsl.schema.cluster import CLUSTERS
from xtrain.plan.graph import groups_node
from xtrain.plan.hardware import BLOCK_MASKS, FLASH
from xtrain.plan.plan import Plan
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.limits import check_limits
from xtrain.runtime.base.packages import check_packages
from xtrain.runtime.base.process import is_worker, rank_variables
from xtrain.runtime.feed.documents import DocumentEncoder
from xtrain.runtime.feed.prepared import source_of
from xtrain.runtime.feed.tokenizers import load_tokenizer
from xtrain.text.units import bytes_text, plural

# Drivers report slightly less memory than the data sheet, which plans use.
REPORTED = 0.97


@frozen(kw_only=True)
class Devices:
    """Devices of the ranks on this machine: `name` of a device, `memory` bytes for each rank."""

    kind: str
    name: str
    memory: int


def check_machine(plan: Plan, local_ranks: int) -> list[str]:
    """Raise EnvironmentFault or DataError if the plan cannot run here: packages, devices, tokenizer, data files.

    Returns other differences from the plan's assumptions, in words.
    """
    check_packages(plan)
    devices = find_devices(plan, local_ranks)
    check_limits(plan, devices.kind, local_ranks)
    remarks = check_devices(plan, devices)
    tokenizer = load_tokenizer(plan.node("setup.tokenizer").args["source"], Path.cwd())
    for node in plan.nodes:
        if node.op == "setup.data":
            source_of(plan, node, tokenizer).num_files  # noqa: B018  lists objects of stores
            DocumentEncoder(tokenizer, node.args["reads"])  # reads the chat template
    return remarks


def find_devices(plan: Plan, local_ranks: int) -> Devices:
    """Return the devices for the ranks of this machine. Raises EnvironmentFault if there are too few."""
    import torch

    asked = plan.launch["device"]
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        name = f"this machine, shared by {plural(local_ranks, 'rank')},"
        return Devices(kind="cpu", name=name, memory=memory // local_ranks)
    count = torch.cuda.device_count()
    if count < local_ranks:
        needed = plural(local_ranks, "CUDA device")
        message = f"this run needs {needed}; this machine has {count or 'none'}"
        fewer = f"use --world {count}, or " if count else "use "
        raise EnvironmentFault("X702", f"{message}; {fewer}launch.device = cpu")
    devices = [torch.cuda.get_device_properties(index) for index in range(local_ranks)]
    least = min(devices, key=lambda device: device.total_memory)
    return Devices(kind="cuda", name=least.name, memory=least.total_memory)


def device_of(plan: Plan) -> str:
    """Return `cpu` or `cuda`, as the ranks of this machine choose it."""
    import torch

    asked = plan.launch["device"]
    return "cuda" if asked == "cuda" or (asked == "auto" and torch.cuda.is_available()) else "cpu"


def check_devices(plan: Plan, here: Devices) -> list[str]:
    """Raise EnvironmentFault if a device has less memory than the plan assumes, or than its rank's states take.

    Returns other differences from the plan's machines, in words.
    """
    cluster, has = plan.cluster, f"{here.name} has {bytes_text(here.memory)}"
    if cluster.memory_bytes is not None and here.memory < REPORTED * cluster.memory_bytes:
        message = f"the plan assumes {bytes_text(cluster.memory_bytes)} of memory for a rank, but {has}"
        hint = f"plan for this machine, with --set cluster.memory='{here.memory >> 20} MiB'"
        raise EnvironmentFault("X712", f"{message}; {hint}")
    fullest = max((ranks.memory for ranks in plan.estimates.classes), key=lambda memory: memory.total_bytes)
    states = max(0 if ranks.memory.offloaded else ranks.memory.states for ranks in plan.estimates.classes)
    if states > here.memory:
        message = f"parameters, gradients and optimizer state take {bytes_text(states)} on a rank, but {has}"
        raise EnvironmentFault("X712", f"{message}; spread them over more ranks")
    remarks = []
    if cluster.memory_bytes is None and fullest.total_bytes > here.memory:
        remarks.append(f"the planned memory of a rank is {bytes_text(fullest.total_bytes)}, but {has}")
    if not CLUSTERS[cluster.preset].fits(here.kind, here.name):
        name = here.name.partition(",")[0]
        remarks.append(f"the plan is for {cluster.preset}, and the device is {name}: the predicted times do not apply")
    return remarks


def check_one_machine(plan: Plan) -> None:
    """Raise EnvironmentFault if the plan is for several machines: this command starts the ranks of one."""
    nodes = plan.launch["nodes"]
    if nodes > 1:
        raise EnvironmentFault(
            "X703",
            f"the plan is for {nodes} nodes, and `xtrain run` starts ranks on one node; start it on each node, with "
            f"`--node 0` to `--node {nodes - 1}` and the same `--meet HOST:PORT`, or with `xtrain launch`; or set "
            "launch.nodes=1",
        )


def check_groups(plan: Plan) -> None:
    """Raise EnvironmentFault if the plan has replica groups, for ranks that another launcher has started."""
    if groups_node(plan) is not None:
        message = "replica groups are started and restarted by `xtrain run` itself, not by another launcher"
        raise EnvironmentFault("X703", f"{message}; start it once on this machine, or use stack parallel")


def check_device(plan: Plan, device: str) -> None:
    """Raise EnvironmentFault if the plan needs cuda and `device` is another, for example from `launch.device =
    auto`."""
    if device == "cuda":
        return
    build = plan.node("setup.build_model").args
    wants = [f"attention {kernel}" for kernel in (*BLOCK_MASKS, *FLASH) if build["attention"].get(device) == kernel]
    wants += ["fsdp offload"] if plan.node("setup.weights").args["offload"] else []
    if wants:
        raise EnvironmentFault("X702", f"{' and '.join(wants)} needs cuda, but the device of this rank is {device}")


def check_world(plan: Plan, started: int, here: int | None = None) -> None:
    """Raise EnvironmentFault if the number of ranks, in all or on this machine (`here`), differs from the plan.

    The placement of ranks decides which axes leave a machine, and so the time of a step.
    """
    planned = plan.mesh.world_size
    if started != planned:
        by = f", by {rank_variables()} in the environment" if is_worker() else ""
        message = (
            f"the plan is for {plural(planned, 'rank')}, but {started} {'was' if started == 1 else 'were'} started"
        )
        do = f"start {planned}, or plan for {started} with --world {started}"
        if by and "LOCAL_RANK" not in os.environ:
            do += ", or unset these variables if no launcher has set them"
        raise EnvironmentFault("X703", f"{message}{by}; {do}")
    planned_here = plan.mesh.ranks_per_node
    if here is not None and here != planned_here:
        message = f"the plan puts {plural(planned_here, 'rank')} on a machine, but {here} were started on this one"
        raise EnvironmentFault("X703", f"{message}; start {planned_here}, or plan with launch.ranks_per_node = {here}")
