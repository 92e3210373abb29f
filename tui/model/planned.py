"""`plan.json` as values, to compare with the records of its run.

The file is read as JSON, without the planner: it may come from another version. Numbers are those of the file, none is
computed again. What is missing, or is of another type, reads as None or empty.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

from attrs import NOTHING, evolve, field, fields, frozen

from xtrain.records.training_events import HorizonEvent, HorizonTick
from xtrain.text.units import number, text

# Order in which a plan names axes (plan.json of a run has sorted keys). Others come last.
AXES = ("pp", "replicate", "fsdp", "ring", "ulysses", "tp", "ep_replicate", "ep_fsdp", "ep")
Json = Mapping[str, Any]
PartT = TypeVar("PartT")


@frozen(kw_only=True)
class PlannedNode:
    """Operation of the plan. kind: `setup`, `collate`, `step`, `tick`, `event` or `shutdown`."""

    id: str
    kind: str
    op: str
    args: Json
    axes: tuple[str, ...]
    does: str


@frozen(kw_only=True)
class PlannedEdge:
    """Dependency between nodes: `after` starts when `before` has ended. data: the values passed on, empty where only
    order matters."""

    before: str
    after: str
    data: str


@frozen(kw_only=True)
class PlannedAxis:
    """Axis of the mesh. stride: distance in rank numbers between neighbors along it."""

    name: str
    size: int
    stride: int


@frozen(kw_only=True)
class PlannedTraffic:
    """Calls of one collective by one rank in one step, for one node. bytes, seconds: totals of all calls."""

    axis: str
    op: str
    node: str
    count: int
    bytes: int
    exposed: bool
    seconds: float | None


@frozen(kw_only=True)
class PlannedClass:
    """Cost of a step on the ranks with one pipeline coordinate `pp`. allocated_bytes: tensors at the peak of a step on
    the fullest of these ranks, comparable to a run's `memory_bytes`."""

    pp: int
    allocated_bytes: int | None
    traffic: tuple[PlannedTraffic, ...]


@frozen(kw_only=True)
class PlannedTimes:
    """Seconds of one step on the slowest rank: `step` is the likely time between `fast` and `slow`. computing: matrix
    products; exposed: communication that does not overlap with computation. mfu: a share. label: relation of
    the time to measured runs, empty without them."""

    computing: float | None = None
    exposed: float | None = None
    step: float | None = None
    fast: float | None = None
    slow: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    label: str = ""


@frozen(kw_only=True)
class PlannedTick:
    """Recurrence of an action: one of `steps`, `tokens`, `seconds` is set, and until the data is counted (`counted`)
    `epochs` or a `fraction` of the budget alone. count: number of occurrences, None where unknown."""

    nodes: tuple[str, ...]
    steps: int | None
    tokens: int | float | None
    seconds: float | None
    count: int | None
    stop: bool
    epochs: float | None = None
    fraction: float | None = None


@frozen(kw_only=True)
class PlannedTrigger:
    """Nodes that run on an event. count: how often in a row it must occur."""

    event: str
    nodes: tuple[str, ...]
    count: int | None


@frozen(kw_only=True)
class PlannedCommand:
    """Command that a running run accepts, and the nodes that execute it."""

    name: str
    nodes: tuple[str, ...]


@frozen(kw_only=True)
class PlannedPhase:
    """Phase of the run. first: index of its first step, from 0, None where it is a `fraction` of unknown steps.

    shares: of rows, empty where the weights are in epochs: `passes` then has the passes over each dataset per epoch.
    """

    name: str
    first: int | None
    fraction: float | None
    shares: Mapping[str, float]
    lr_scale: float = 1.0
    passes: Mapping[str, float] = field(factory=dict)


@frozen(kw_only=True)
class PlannedStretch:
    """Steps with equal token counts, from index `first` on: tokens of each, and of all steps before."""

    first: int
    tokens: int
    tokens_before: int


@frozen
class StepTokens:
    """Token counts of the steps of a run, in stretches of steps with equal counts."""

    stretches: tuple[PlannedStretch, ...]

    @classmethod
    def alike(cls, tokens: int) -> "StepTokens":
        """Return the counts of a run whose steps all have `tokens` tokens."""
        return cls((PlannedStretch(first=0, tokens=tokens, tokens_before=0),))

    def before(self, step: int) -> int:
        """Return the tokens of the steps 0 … step - 1."""
        found = self._of(step)
        return found.tokens_before + (step - found.first) * found.tokens

    def at(self, step: int) -> int:
        """Return the tokens of a step; steps count from 0."""
        return self._of(step).tokens

    def steps_of(self, tokens: float) -> int:
        """Return the smallest number of steps that take `tokens` tokens, a number above 0."""
        place = bisect_left(self.stretches, tokens, key=lambda stretch: stretch.tokens_before)
        found = self.stretches[place - 1]
        return found.first + int(-(-(tokens - found.tokens_before) // found.tokens))

    def _of(self, step: int) -> PlannedStretch:
        return self.stretches[bisect_right(self.stretches, step, key=lambda stretch: stretch.first) - 1]


@frozen(kw_only=True)
class Planned:
    """Plan of a run. `content` is all of plan.json, unchanged."""

    content: Json = field(repr=False)
    id: str
    name: str
    world_size: int
    ranks_per_node: int
    axes: tuple[PlannedAxis, ...]
    """Axes of the mesh, outer to inner."""
    expert_axes: tuple[PlannedAxis, ...]
    """The mesh as experts use it; without experts, every axis but `ep_replicate …` has size 1."""
    nodes: tuple[PlannedNode, ...]
    edges: tuple[PlannedEdge, ...]
    steps: int | None
    """Optimizer steps of the run; None until the data has been counted."""
    tokens: int | None
    phases: tuple[PlannedPhase, ...]
    ticks: tuple[PlannedTick, ...]
    triggers: tuple[PlannedTrigger, ...]
    commands: tuple[PlannedCommand, ...]
    stop_at: int | None
    """The step after which the run stops, resumable later."""
    stop_after: int | None
    """Number of steps that each start trains."""
    tokens_per_step: int | None
    """Tokens of a step after the ramp, if there is one."""
    checkpoint_bytes: int | None
    classes: tuple[PlannedClass, ...]
    """Costs by pipeline coordinate, from 0."""
    times: PlannedTimes | None
    """Step times; None where the cluster is unknown."""
    stretches: tuple[PlannedStretch, ...] = ()
    """Stretches of a ramp; empty without one."""

    @property
    def step_tokens(self) -> StepTokens | None:
        """The tokens of every step."""
        if self.stretches:
            return StepTokens(self.stretches)
        return StepTokens.alike(self.tokens_per_step) if self.tokens_per_step else None

    def node(self, id: str) -> PlannedNode | None:
        """Return the node of that id, if there is one."""
        return next((node for node in self.nodes if node.id == id), None)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of a rank on every axis, outer to inner."""
        return {axis.name: rank // axis.stride % axis.size for axis in self.axes}

    def machine(self, rank: int) -> int:
        """Return the node of the cluster that a rank runs on, from 0."""
        return rank // self.ranks_per_node

    @property
    def memory_bytes(self) -> int | None:
        """Tensor bytes on the fullest rank at the peak of a step, comparable to a run's `memory_bytes`."""
        return max((found.allocated_bytes for found in self.classes if found.allocated_bytes is not None), default=None)


def planned(content: Any) -> Planned | None:
    """Return the plan in a JSON object; None if there is none."""
    if not isinstance(content, dict) or not isinstance(content.get("graph"), dict):
        return None
    mesh, timeline, estimates = (_object(content.get(key)) for key in ("mesh", "timeline", "estimates"))
    allocated: dict[int | None, Any] = {}
    for entry in _objects(_object(content.get("memory")).get("per_rank")):
        allocated.setdefault(whole(entry.get("pp")), entry.get("allocated_bytes"))
    classes = [{**each, "allocated_bytes": allocated.get(whole(each.get("pp")) or 0)}
               for each in _objects(estimates.get("classes"))]  # fmt: skip
    named = {"id": content.get("id"), "name": content.get("name"), "triggers": timeline.get("reactions")}
    # The four objects have no key in common that means two things.
    found = _part(Planned, {**mesh, **content["graph"], **timeline, **estimates, **named, "classes": classes})
    return evolve(
        found,
        content=content,
        world_size=found.world_size or 1,
        ranks_per_node=found.ranks_per_node or 1,
        axes=_axes(mesh, "axes"),
        expert_axes=_axes(mesh, "expert_axes"),
    )


def counted(plan: Planned, horizon: HorizonEvent) -> Planned:
    """Return the plan after the run has counted its data: epochs and shares of them become steps and tokens. A value
    that the event `horizon` does not have, or has in another form, stays as planned."""
    ticks = horizon.ticks
    waiting = [tick for tick in plan.ticks if tick.epochs is not None or tick.fraction is not None]
    known = dict(zip(map(id, waiting), ticks, strict=False)) if len(ticks) == len(waiting) else {}
    return evolve(
        plan,
        steps=plan.steps if horizon.steps is None else horizon.steps,
        phases=tuple(
            phase if (first := horizon.phases.get(phase.name)) is None else evolve(phase, first=first)
            for phase in plan.phases
        ),
        stretches=tuple(
            PlannedStretch(first=each.first, tokens=each.tokens, tokens_before=each.tokens_before)
            for each in horizon.stretches
        )
        or plan.stretches,
        ticks=tuple(_counted_tick(tick, known.get(id(tick), HorizonTick())) for tick in plan.ticks),
        stop_at=plan.stop_at if horizon.stop_at is None else horizon.stop_at,
        stop_after=plan.stop_after if horizon.stop_after is None else horizon.stop_after,
    )


def _counted_tick(tick: PlannedTick, found: HorizonTick) -> PlannedTick:
    steps, tokens = found.steps, found.tokens
    if tick.steps is not None or tick.tokens is not None or (steps is None and tokens is None):
        return tick
    return evolve(tick, steps=steps, tokens=None if tokens is None else int(tokens) if tokens.is_integer() else tokens)


def whole(value: object) -> int | None:
    """Return `value` if it is an integer of any size: the operations of a step exceed the precision of a float."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _object(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> list[Json]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _numbers(value: object) -> dict[str, float]:
    return {name: known for name, item in _object(value).items() if (known := number(item)) is not None}


def _axes(mesh: Json, key: str) -> tuple[PlannedAxis, ...]:
    sizes, strides = _object(mesh.get(key)), _object(mesh.get("strides"))
    names = sorted(sizes, key=lambda name: AXES.index(name) if name in AXES else len(AXES))
    return tuple(
        PlannedAxis(name=name, size=max(1, whole(sizes[name]) or 1), stride=max(1, whole(strides.get(name)) or 1))
        for name in names
    )


# Readers of JSON values, by the type of the field.
_READERS: dict[Any, Callable[[Any], Any]] = {
    str: text,
    bool: lambda value: value is True,
    int: lambda value: whole(value) or 0,
    int | None: whole,
    int | float | None: whole,
    float: number,
    float | None: number,
    Json: _object,
    tuple[str, ...]: lambda value: tuple(map(text, value)) if isinstance(value, list) else (),
    Mapping[str, float]: _numbers,
    PlannedTimes | None: lambda value: _part(PlannedTimes, value) if isinstance(value, dict) else None,
}


def _part(kind: type[PartT], found: Json) -> PartT:
    """Return an object of the file as a class; a field without a value of its type gets its default."""
    values = {name: read(found.get(name)) for name, read, _ in _layout(kind)}
    return kind(**{name: values[name] for name, _, default in _layout(kind) if not default or values[name] is not None})


@cache
def _layout(kind: type) -> tuple[tuple[str, Callable[[Any], Any], bool], ...]:
    """Return name, reader, and presence of a default, for every field."""
    types = get_type_hints(kind)
    return tuple(
        (each.name, _READERS.get(types[each.name]) or _parts(types[each.name]), each.default is not NOTHING)
        for each in fields(kind)
    )


def _parts(type_: Any) -> Callable[[Any], Any]:
    kind = get_args(type_)[0]
    return lambda value: tuple(_part(kind, each) for each in _objects(value))
