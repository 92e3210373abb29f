"""How much of a disk the checkpoints of a run take: those that are kept, the best, weights alone, one being written."""

import json
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, Final

from attrs import evolve, frozen

from xtrain.planner.architecture import ParameterSpec
from xtrain.planner.graph.averaging import average_args
from xtrain.planner.graph.checkpoint_fit import checkpoint_contents, saved_parameters
from xtrain.planner.mesh.placement import base_of_plan
from xtrain.planner.model.groups import ParameterGroups
from xtrain.planner.model.inventory import weight_bytes
from xtrain.planner.plan import Plan
from xtrain.planner.units import BYTES

# Bytes beside the numbers themselves, measured with torch 2.13 and rounded up. `dcp` writes every piece of a tensor as
# an archive of its own (1.6 KB) and names it in `.metadata`; `file` has one archive of all tensors.
OF_A_PIECE: Final = {"dcp": 1856, "file": 384}
# A rank's streams of random numbers: three of 5 KB, and on a GPU one more.
OF_STREAMS: Final = 16 * 1024
STREAMS: Final = 4
# Counters, versions and the place in the data in `state.json`, and what it says of each file.
OF_COUNTERS: Final = 4096
OF_A_FILE: Final = 128


@frozen(kw_only=True)
class DiskUse:
    """Bytes in `checkpoints/` of a run that is not stopped in between.

    full, weights: of one full checkpoint, and of the weights alone, 0 where none are saved. rest: when nothing is being
    written, at the end; most: at any moment, also of a run that goes on behind its end.
    """

    full: int
    weights: int
    rest: int
    most: int


def disk_of(plan: Plan, saves: int | None) -> DiskUse | None:
    """saves: how many full checkpoints are written in all, None where nobody knows. None where nothing is saved, or
    nobody knows how much."""
    saving = next((node.args for node in plan.nodes if node.op == "setup.checkpoint"), None)
    if saving is None or (saves is None and saving["keep"] is None):
        return None
    contents = checkpoint_contents(plan)
    sidecar = _sidecar(plan, contents)
    full = sidecar + _full(plan, contents, saving["backend"])
    weights = _weights(plan, contents, saving["backend"])
    weights += sidecar if weights else 0
    stays = saves if saving["keep"] is None else saving["keep"] + (saving["best"] is not None)
    assert stays is not None
    most = stays + (saving["keep"] is not None)
    if saves is not None:
        stays, most = min(stays, saves), min(most, saves)
    return DiskUse(full=full, weights=weights, rest=stays * full + weights, most=most * full + weights)


def _full(plan: Plan, contents: Mapping[str, Any], backend: str) -> int:
    averages = average_args(plan)
    groups = ParameterGroups.of(plan)
    trained = [tensor for tensor in plan.parameters.tensors if tensor.trained]
    counters = sum(len(groups.scalars(tensor.name)) for tensor in trained)
    moments = (tensor for tensor in trained for _ in groups.state(tensor.name))
    weights = _pieces(plan, saved_parameters(plan)) + len(contents["buffers"])
    pieces = (1 + (averages is not None)) * weights + _pieces(plan, moments) + counters
    streams = plan.mesh.world_size * (OF_STREAMS + STREAMS * OF_A_PIECE[backend])
    buffers = (1 + (averages is not None)) * _buffer_bytes(contents)
    numbers = plan.estimates.checkpoint_bytes + buffers + BYTES["fp32"] * counters
    return numbers + pieces * OF_A_PIECE[backend] + streams


def _weights(plan: Plan, contents: Mapping[str, Any], backend: str) -> int:
    if not any(plan.node(node).op == "tick.model" for trigger in plan.timeline.triggers for node in trigger.nodes):
        return 0
    averages = average_args(plan)
    form = averages["format"] if averages and averages["publish"] else plan.node("setup.build_model").args["params"]
    frozen = next((node.args["format"] for node in plan.nodes if node.op == "setup.freeze"), "")
    saved = saved_parameters(plan)
    kept = evolve(plan.parameters, total=sum(each.size for each in saved), tensors=saved)
    numbers = weight_bytes(kept, form, frozen, base_of_plan(plan)) + _buffer_bytes(contents)
    pieces = _pieces(plan, saved) + len(contents["buffers"])
    return numbers + pieces * OF_A_PIECE[backend]


def _pieces(plan: Plan, tensors: Iterable[ParameterSpec]) -> int:
    """Into how many pieces the ranks cut weights: one that is whole on several of them is written once."""
    axes = {axis.name: axis.size for axis in (*plan.mesh.axes, *plan.mesh.expert_axes)}
    shards = prod(axes[axis] for axis in plan.node("setup.mesh").args["shard_axes"])
    experts = axes["ep"] * axes["ep_fsdp"]
    return sum(
        experts if tensor.expert else shards * (axes["tp"] if len(tensor.shape) > 1 else 1) for tensor in tensors
    )


def _buffer_bytes(contents: Mapping[str, Any]) -> int:
    return sum(BYTES["fp32"] * prod(shape) for shape in contents["buffers"].values())


def _sidecar(plan: Plan, contents: Mapping[str, Any]) -> int:
    return len(json.dumps(contents, indent=1)) + OF_COUNTERS + plan.mesh.world_size * OF_A_FILE
