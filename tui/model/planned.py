"""What was planned: `plan.json` as values, for whoever compares it with what happens.

The file is read as JSON, without the planner: it may come from another version. Numbers are those of the file, none is
computed anew. What is missing, or is of another type, reads as None or empty.
"""

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from ..words import number, text
from .planned_parts import (
    Json,
    PlannedAxis,
    PlannedCheck,
    PlannedClass,
    PlannedCommand,
    PlannedEdge,
    PlannedNode,
    PlannedPhase,
    PlannedTick,
    PlannedTimes,
    PlannedTraffic,
    PlannedTrigger,
)

# In what order a plan names them; the plan.json of a run has its keys sorted. Others come behind.
AXES = ("pp", "replicate", "fsdp", "ring", "ulysses", "tp", "ep_replicate", "ep_fsdp", "ep")
MEMORY = (
    "parameters", "gradients", "optimizer", "averages", "unsharded", "unreduced", "activations", "loss", "working",
    "reserve",
)  # fmt: skip


@frozen(kw_only=True)
class Planned:
    """A plan. `content` is the whole of plan.json as it stands."""

    content: Json = field(repr=False)
    id: str
    config_id: str
    name: str
    spec: str
    spec_text: str = field(repr=False)
    world_size: int
    ranks_per_node: int
    axes: tuple[PlannedAxis, ...]
    """Outer to inner."""
    expert_axes: tuple[PlannedAxis, ...]
    """The same ranks as experts see them; all of size 1 beside `ep_replicate …` where there are none."""
    nodes: tuple[PlannedNode, ...]
    edges: tuple[PlannedEdge, ...]
    steps: int | None
    """Optimizer steps of the run; None until the data has been counted."""
    tokens: int | None
    epochs: float | None
    phases: tuple[PlannedPhase, ...]
    ticks: tuple[PlannedTick, ...]
    reactions: tuple[PlannedTrigger, ...]
    commands: tuple[PlannedCommand, ...]
    stop_at: int | None
    """The step after which the run stops, to be gone on with later."""
    stop_after: int | None
    """How many steps each start of it trains."""
    tokens_per_step: int | None
    flops_per_token: int | None
    flops_per_step: int | None
    checkpoint_bytes: int | None
    bubble: float | None
    classes: tuple[PlannedClass, ...]
    """By pipeline coordinate, from 0."""
    times: PlannedTimes | None
    """None where the cluster is not known."""
    total_parameters: int | None
    active_parameters: int | None
    checks: tuple[PlannedCheck, ...]

    def node(self, id: str) -> PlannedNode | None:
        """The node of that id, if there is one."""
        return next((node for node in self.nodes if node.id == id), None)

    def of_kind(self, kind: str) -> tuple[PlannedNode, ...]:
        """The nodes of a kind, in the order of the plan."""
        return tuple(node for node in self.nodes if node.kind == kind)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank on every axis, outer to inner."""
        return {axis.name: rank // axis.stride % axis.size for axis in self.axes}

    def machine(self, rank: int) -> int:
        """The node of the cluster that a rank runs on, from 0."""
        return rank // self.ranks_per_node

    def class_of(self, rank: int) -> PlannedClass | None:
        """What a step costs on a rank."""
        pp = self.coordinates(rank).get("pp", 0)
        return next((found for found in self.classes if found.pp == pp), None)

    @property
    def memory_bytes(self) -> int | None:
        """What tensors take on the fullest rank at the peak of a step, as a run's `memory_bytes` has it."""
        return max((found.allocated_bytes for found in self.classes if found.allocated_bytes is not None), default=None)


def planned(content: Any) -> Planned | None:
    """A plan in a JSON object; None if it is none."""
    if not isinstance(content, dict) or not isinstance(content.get("graph"), dict):
        return None
    mesh, timeline, estimates = (_object(content.get(key)) for key in ("mesh", "timeline", "estimates"))
    parameters = _object(content.get("parameters"))
    return Planned(
        content=content,
        id=text(content.get("id")),
        config_id=text(content.get("config_id")),
        name=text(content.get("name")),
        spec=text(content.get("spec")),
        spec_text=text(content.get("spec_text")),
        world_size=whole(mesh.get("world_size")) or 1,
        ranks_per_node=whole(mesh.get("ranks_per_node")) or 1,
        axes=_axes(mesh, "axes"),
        expert_axes=_axes(mesh, "expert_axes"),
        nodes=tuple(map(_node, _objects(content["graph"].get("nodes")))),
        edges=tuple(map(_edge, _objects(content["graph"].get("edges")))),
        steps=whole(timeline.get("steps")),
        tokens=whole(timeline.get("tokens")),
        epochs=number(timeline.get("epochs")),
        phases=tuple(map(_phase, _objects(timeline.get("phases")))),
        ticks=tuple(map(_tick, _objects(timeline.get("ticks")))),
        reactions=tuple(map(_reaction, _objects(timeline.get("reactions")))),
        commands=tuple(map(_command, _objects(timeline.get("commands")))),
        stop_at=whole(timeline.get("stop_at")),
        stop_after=whole(timeline.get("stop_after")),
        tokens_per_step=whole(estimates.get("tokens_per_step")),
        flops_per_token=whole(estimates.get("flops_per_token")),
        flops_per_step=whole(estimates.get("flops_per_step")),
        checkpoint_bytes=whole(estimates.get("checkpoint_bytes")),
        bubble=number(estimates.get("bubble")),
        classes=_classes(content, estimates),
        times=_times(estimates.get("times")),
        total_parameters=whole(parameters.get("total")),
        active_parameters=whole(parameters.get("active")),
        checks=tuple(map(_check, _objects(content.get("checks")))),
    )


def whole(value: object) -> int | None:
    """`value` as it stands if it is an integer, however large: operations of a step are beyond what a float holds."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _object(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> list[Json]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(text, value)) if isinstance(value, list) else ()


def _axes(mesh: Json, key: str) -> tuple[PlannedAxis, ...]:
    strides, crossing = _object(mesh.get("strides")), _texts(mesh.get("crosses_nodes"))
    return tuple(
        PlannedAxis(
            name=name,
            size=max(1, whole(size) or 1),
            stride=max(1, whole(strides.get(name)) or 1),
            crosses_nodes=name in crossing,
        )
        for name, size in _ordered(_object(mesh.get(key)), AXES)
    )


def _ordered(found: Json, names: tuple[str, ...]) -> list[tuple[str, Any]]:
    """The items of an object, those with known names first and in their order."""
    return sorted(found.items(), key=lambda item: names.index(item[0]) if item[0] in names else len(names))


def _node(found: Json) -> PlannedNode:
    return PlannedNode(
        id=text(found.get("id")),
        kind=text(found.get("kind")),
        op=text(found.get("op")),
        args=_object(found.get("args")),
        axes=_texts(found.get("axes")),
        does=text(found.get("does")),
    )


def _edge(found: Json) -> PlannedEdge:
    return PlannedEdge(before=text(found.get("before")), after=text(found.get("after")), data=text(found.get("data")))


def _phase(found: Json) -> PlannedPhase:
    scale = number(found.get("lr_scale"))
    return PlannedPhase(
        name=text(found.get("name")),
        first=whole(found.get("first")),
        fraction=number(found.get("fraction")),
        shares=_numbers(found.get("shares")),
        lr_scale=1.0 if scale is None else scale,
        passes=_numbers(found.get("passes")),
    )


def _numbers(found: object) -> dict[str, float]:
    return {name: known for name, value in _object(found).items() if (known := number(value)) is not None}


def _tick(found: Json) -> PlannedTick:
    return PlannedTick(
        nodes=_texts(found.get("nodes")),
        steps=whole(found.get("steps")),
        tokens=whole(found.get("tokens")),
        seconds=number(found.get("seconds")),
        count=whole(found.get("count")),
        stop=found.get("stop") is True,
        epochs=number(found.get("epochs")),
        fraction=number(found.get("fraction")),
    )


def _reaction(found: Json) -> PlannedTrigger:
    return PlannedTrigger(
        event=text(found.get("event")),
        nodes=_texts(found.get("nodes")),
        stop=found.get("stop") is True,
        count=whole(found.get("count")),
    )


def _command(found: Json) -> PlannedCommand:
    return PlannedCommand(
        name=text(found.get("name")),
        nodes=_texts(found.get("nodes")),
        stop=found.get("stop") is True,
        counts=text(found.get("counts")),
    )


def _check(found: Json) -> PlannedCheck:
    keys = ("id", "status", "evidence", "code", "place")
    return PlannedCheck(**{key: text(found.get(key)) for key in keys})


def _times(found: Any) -> PlannedTimes | None:
    if not isinstance(found, dict):
        return None
    keys = ("computing", "exposed", "step", "fast", "slow", "tokens_per_second", "mfu")
    return PlannedTimes(**{key: number(found.get(key)) for key in keys})


def _classes(content: Json, estimates: Json) -> tuple[PlannedClass, ...]:
    ranks: dict[int | None, Json] = {}
    for entry in _objects(_object(content.get("memory")).get("per_rank")):
        ranks.setdefault(whole(entry.get("pp")), entry)
    return tuple(_class(found, ranks) for found in _objects(estimates.get("classes")))


def _class(found: Json, ranks: Mapping[int | None, Json]) -> PlannedClass:
    memory, pp = _object(found.get("memory")), whole(found.get("pp")) or 0
    rank = ranks.get(pp, {})
    return PlannedClass(
        pp=pp,
        ranks=whole(found.get("ranks")) or 0,
        memory={name: size for name, value in _ordered(memory, MEMORY) if (size := whole(value)) is not None},
        total_bytes=whole(rank.get("total_bytes")),
        allocated_bytes=whole(rank.get("allocated_bytes")),
        offloaded=memory.get("offloaded") is True,
        flops=whole(found.get("flops")) or 0,
        hardware_flops=whole(found.get("hardware_flops")) or 0,
        traffic=tuple(map(_traffic, _objects(found.get("traffic")))),
    )


def _traffic(found: Json) -> PlannedTraffic:
    return PlannedTraffic(
        axis=text(found.get("axis")),
        op=text(found.get("op")),
        node=text(found.get("node")),
        count=whole(found.get("count")) or 0,
        bytes=whole(found.get("bytes")) or 0,
        exposed=found.get("exposed") is True,
        seconds=number(found.get("seconds")),
    )
