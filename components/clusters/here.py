"""`cluster here`: this machine, measured once."""

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from xtrain.dsl.schema.cluster import CLUSTERS, Cluster, DeviceSheet, MeasuredMachine, Unmeasured
from xtrain.dsl.schema.component import named
from xtrain.lazy_attrs import frozen

MEASUREMENT = 2  # changes with what the child process measures
ABOUT = "cluster here: measuring matrix products and memory of this machine once, about ten seconds …"


@CLUSTERS.register()
@frozen
class Here(Cluster):
    """`cluster here { … }`: the machine on which the plan is made; its memory and speed are measured once."""

    preset: str = named("here")

    def machine(self) -> MeasuredMachine:
        return machine_here()


@cache
def machine_here() -> MeasuredMachine:
    """Return this machine, from the cache if it has been measured, otherwise measured by a child process, because
    planning has no torch. Raises Unmeasured."""
    from xtrain.dsl.checking.inspections import ChildFailed, inspected, place_of

    content, torch = json.dumps({"measurement": MEASUREMENT, **facts()}), _torch()
    try:
        found = inspected("machine_speed", content, ABOUT, (torch,))
    except ChildFailed as problem:
        raise Unmeasured(str(problem)) from None
    if "problem" in found:
        raise Unmeasured(found["problem"])
    busy = found["busy"]
    if busy:  # the next plan measures again
        place_of("machine_speed", content, torch).unlink(missing_ok=True)
    fields = {name: value for name, value in found.items() if name != "busy"}
    at = found["at"] + (", while the machine was busy" if busy else "")
    return MeasuredMachine(**{**fields, "at": at, "sheet": DeviceSheet(**found["sheet"])})


def facts(root: Path = Path("/")) -> dict[str, Any]:
    """Return what this machine is: a machine with other facts is measured again. root: of the file system."""
    import platform

    models = re.findall(r"^(?:model name|CPU part)\s*:\s*(.*)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    memory = re.search(r"^MemTotal: +(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    gpus = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    return {
        "host": platform.node(),
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": int(memory[1]) if memory else None,
        "gpus": [" ".join(re.findall(r"^Model:\s*(.*)$", _text(gpu), re.MULTILINE)) for gpu in gpus],
        "visible": [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")],
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _torch() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
