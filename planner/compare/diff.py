"""What differs between two plans: values, nodes of the graph, memory, traffic, arithmetic, and whether a run of the
first can go on under the second."""

from typing import Any, Final

from attrs import asdict, fields, frozen

from xtrain.planner.compare.diff_values import ValueChange, changed_values
from xtrain.planner.compare.resumable import Verdict, resumable
from xtrain.planner.plan import Memory, Plan, RankClass
from xtrain.planner.schedule.horizon import known_timeline
from xtrain.planner.schedule.step_sizes import StepSizes

# Parts of a rank's memory, in the order of the plan, and their sum.
CATEGORIES: Final = (*(field.name for field in fields(Memory) if field.type is int), "total_bytes")


@frozen(kw_only=True)
class NodeChange:
    """A node that is on one side only (then `before` or `after` is None), or has other arguments or axes."""

    id: str
    does: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None

    @property
    def arguments(self) -> dict[str, tuple[Any, Any]]:
        """What differs, of a dict by its own keys; `over` are the axes of the node, `op` is its op."""
        return _different(self.before or {}, self.after or {})

    @property
    def moved(self) -> bool:
        """Whether it does the same over other axes."""
        return self.before is not None and self.after is not None and self.arguments.keys() == {"over"}


@frozen(kw_only=True)
class Amount:
    """A number on both sides; None where it is not known."""

    name: str
    unit: str
    before: float | None
    after: float | None


@frozen(kw_only=True)
class ClassMemory:
    """Bytes on the ranks of a pipeline coordinate, in the order of CATEGORIES; None on a side without them."""

    name: str
    before: tuple[int, ...] | None
    after: tuple[int, ...] | None


@frozen(kw_only=True)
class TrafficChange:
    """Calls and bytes of a step over an axis by one rank, of the rank class that sends the most there."""

    axis: str
    op: str
    before: tuple[int, int]
    after: tuple[int, int]


@frozen(kw_only=True)
class PlanDifference:
    """What there is to say of plan `b` against plan `a`."""

    a: Plan
    b: Plan
    verdict: Verdict
    values: tuple[ValueChange, ...]
    nodes: tuple[NodeChange, ...]
    memory: tuple[ClassMemory, ...]
    traffic: tuple[TrafficChange, ...]
    amounts: tuple[Amount, ...]

    @property
    def differ(self) -> bool:
        """Whether these are two plans; texts that plan alike, and where they lie, do not count."""
        return self.a.id != self.b.id


def compare_plans(a: Plan, b: Plan, step: int | None = None, past: StepSizes | None = None) -> PlanDifference:
    """Everything that differs; `step` is that of the checkpoint of `a`, if it is known, `past` the rows of the steps
    before it."""
    return PlanDifference(
        a=a,
        b=b,
        verdict=resumable(a, b, step, past),
        values=changed_values(a, b),
        nodes=_nodes(a, b),
        memory=_memory(a, b),
        traffic=_traffic(a, b),
        amounts=_amounts(a, b),
    )


def _nodes(a: Plan, b: Plan) -> tuple[NodeChange, ...]:
    """In the order of the second plan, what it no longer has at the end."""
    before, after = ({node.id: node for node in plan.nodes} for plan in (a, b))
    found = []
    for id in {**after, **before}:
        one, other = before.get(id), after.get(id)
        if one is not None and other is not None and (one.op, one.args, one.axes) == (other.op, other.args, other.axes):
            continue
        sides = [node and {**node.args, "over": list(node.axes), "op": node.op} for node in (one, other)]
        does = (other or one).does  # type: ignore[union-attr]
        found.append(NodeChange(id=id, does=does, before=sides[0], after=sides[1]))
    return tuple(found)


def _different(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for key in {**before, **after}:
        one, other = (_by_name(side.get(key)) for side in (before, after))
        if isinstance(one, dict) and isinstance(other, dict):
            found |= _different(one, other, f"{prefix}{key}.")
        elif one != other:
            found[prefix + key] = (one, other)
    return found


def _by_name(value: Any) -> Any:
    """Pairs of a name and a number, as axes with their sizes, as a dict."""
    pairs = isinstance(value, list) and value and all(isinstance(each, list) and len(each) == 2 for each in value)
    return dict(value) if pairs and all(isinstance(each[0], str) for each in value) else value


def _memory(a: Plan, b: Plan) -> tuple[ClassMemory, ...]:
    """The fullest ranks of each side; then, where there are pipelines, coordinate by coordinate."""
    sides = [plan.estimates.classes for plan in (a, b)]
    worst = [max(classes, key=lambda each: each.memory.total_bytes) for classes in sides]
    found = [ClassMemory(name="fullest rank", before=_bytes(worst[0]), after=_bytes(worst[1]))]
    count = max(map(len, sides))
    if count > 1:
        coordinates = [{each.pp: each for each in classes} for classes in sides]
        for pp in range(count):
            one, other = (_bytes(side[pp]) if pp in side else None for side in coordinates)
            found.append(ClassMemory(name=f"pp {pp}", before=one, after=other))
    return tuple(found)


def _bytes(ranks: RankClass) -> tuple[int, ...]:
    return tuple(getattr(ranks.memory, name) for name in CATEGORIES)


def _traffic(a: Plan, b: Plan) -> tuple[TrafficChange, ...]:
    before, after = _sent(a), _sent(b)
    return tuple(
        TrafficChange(axis=axis, op=op, before=before.get((axis, op), (0, 0)), after=after.get((axis, op), (0, 0)))
        for axis, op in {**before, **after}
    )


def _sent(plan: Plan) -> dict[tuple[str, str], tuple[int, int]]:
    """(axis, op) → (calls, bytes) of the rank class with the most bytes there."""
    most: dict[tuple[str, str], tuple[int, int]] = {}
    for ranks in plan.estimates.classes:
        sums: dict[tuple[str, str], tuple[int, int]] = {}
        for each in ranks.traffic:
            count, size = sums.get((each.axis, each.op), (0, 0))
            sums[each.axis, each.op] = (count + each.count, size + each.bytes)
        for key, (count, size) in sums.items():
            known = most.get(key, (0, -1))
            most[key] = (count, size) if (size, count) > (known[1], known[0]) else known
    return most


def _amounts(a: Plan, b: Plan) -> tuple[Amount, ...]:
    """What a run takes as a whole."""
    rows = [(_amount_rows(plan)) for plan in (a, b)]
    return tuple(
        Amount(name=name, unit=unit, before=before, after=after)
        for (name, unit, before), (_, _, after) in zip(*rows, strict=True)
    )


def _amount_rows(plan: Plan) -> list[tuple[str, str, float | None]]:
    estimates, timeline, times = plan.estimates, known_timeline(plan), plan.estimates.times
    world, price = plan.mesh.world_size, plan.cluster.price
    full = timeline.full_steps
    seconds = times.step * full if times is not None and full is not None else None
    hours = None if seconds is None else seconds * world / 3600
    compute = None if full is None else estimates.flops_per_step * full
    return [
        ("ranks", "count", world),
        ("parameters", "count", plan.parameters.total),
        ("steps", "count", timeline.steps),
        ("tokens a step", "count", estimates.tokens_per_step),
        ("tokens", "count", timeline.tokens),
        ("compute", "flops", compute),
        ("time of a step", "seconds", times.step if times else None),
        ("tokens a second", "count", times.tokens_per_second if times else None),
        ("time", "seconds", seconds),
        ("device-hours", "count", hours),
        ("cost", "count", None if hours is None or price is None else hours * price),
        ("checkpoint", "bytes", estimates.checkpoint_bytes),
    ]


def to_json(found: PlanDifference) -> dict[str, Any]:
    """The difference as a JSON object; the sides and the command that goes on are added by who knows the files."""
    return {
        "differ": found.differ,
        "same_experiment": found.a.config_id == found.b.config_id,
        "verdict": {**asdict(found.verdict), "certain": found.verdict.certain},
        "values": [asdict(change) for change in found.values],
        "nodes": [
            {
                "id": change.id,
                "change": _kind(change),
                "arguments": {key: list(pair) for key, pair in change.arguments.items()},
            }
            for change in found.nodes
        ],
        "memory": [
            {
                "ranks": each.name,
                "before": each.before and dict(zip(CATEGORIES, each.before, strict=True)),
                "after": each.after and dict(zip(CATEGORIES, each.after, strict=True)),
            }
            for each in found.memory
        ],
        "traffic": [
            {
                "axis": each.axis,
                "op": each.op,
                "before": dict(zip(("count", "bytes"), each.before, strict=True)),
                "after": dict(zip(("count", "bytes"), each.after, strict=True)),
            }
            for each in found.traffic
        ],
        "amounts": [asdict(each) for each in found.amounts],
    }


def _kind(change: NodeChange) -> str:
    return "added" if change.before is None else "removed" if change.after is None else "changed"
