"""Difference of two plans as data and as a page: resuming, values, nodes, memory, traffic and FLOPs."""

from collections.abc import Callable
from typing import Any, Final

from attrs import asdict, fields

from xtrain.lazy_attrs import frozen
from xtrain.plan.estimates import Memory, RankClass
from xtrain.plan.plan import Plan, Provenance
from xtrain.plan.step_sizes import StepSizes
from xtrain.plan.timeline import known_timeline
from xtrain.plan.views import GROUPS, ValueChange, changed_values
from xtrain.planner.review.resumable import Verdict, resumable
from xtrain.text.page import Page, clip
from xtrain.text.units import WIDTH, bytes_text, count_text, flops_text, plural, seconds_text

# Parts of a rank's memory, in the order of the plan, and their sum.
CATEGORIES: Final = (*(field.name for field in fields(Memory) if field.type is int), "total_bytes")


@frozen(kw_only=True)
class NodeChange:
    """Node that is on one side only (then `before` or `after` is None), or has other arguments or axes."""

    id: str
    does: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None

    @property
    def arguments(self) -> dict[str, tuple[Any, Any]]:
        """Arguments that differ, by key inside dicts; `over` are the axes of the node, `op` is its op."""
        return _different(self.before or {}, self.after or {})

    @property
    def moved(self) -> bool:
        """True if the node does the same over other axes."""
        return self.before is not None and self.after is not None and self.arguments.keys() == {"over"}


@frozen(kw_only=True)
class Amount:
    """Number on both sides; None if unknown."""

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
    """Differences of plan `b` from plan `a`."""

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
        """True for different plans; spec texts that give the same plan, and their paths, do not count."""
        return self.a.id != self.b.id


def compare_plans(a: Plan, b: Plan, step: int | None = None, past: StepSizes | None = None) -> PlanDifference:
    """Return all differences. step: of the checkpoint of `a`, if known; past: the rows of the steps before it."""
    return PlanDifference(
        a=a,
        b=b,
        verdict=resumable(a, b, step, past),
        values=changed_values(a, b),
        nodes=node_changes(a, b),
        memory=_memory(a, b),
        traffic=_traffic(a, b),
        amounts=_amounts(a, b),
    )


def node_changes(a: Plan, b: Plan) -> tuple[NodeChange, ...]:
    """Return changed nodes in the order of the second plan, followed by removed nodes."""
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
    """Return pairs of a name and a number, such as axes with their sizes, as a dict."""
    pairs = isinstance(value, list) and value and all(isinstance(each, list) and len(each) == 2 for each in value)
    return dict(value) if pairs and all(isinstance(each[0], str) for each in value) else value


def _memory(a: Plan, b: Plan) -> tuple[ClassMemory, ...]:
    """Return the fullest ranks of each side; with pipelines, also each coordinate."""
    sides = [plan.estimates.classes for plan in (a, b)]
    found = [ClassMemory(name="fullest rank", before=_bytes(a.estimates.fullest), after=_bytes(b.estimates.fullest))]
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
    """Return (axis, op) → (calls, bytes) of the rank class with the most bytes there."""
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
    """Return the totals of a run."""
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
    """Return the difference as a JSON object; the caller, who knows the files, adds the sides and the command that
    resumes."""
    return {
        "differ": found.differ,
        "same_experiment": found.a.config_id == found.b.config_id,
        "verdict": {**asdict(found.verdict), "certain": found.verdict.certain},
        "values": [asdict(change) for change in found.values],
        "nodes": [
            {
                "id": change.id,
                "change": "added" if change.before is None else "removed" if change.after is None else "changed",
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


EFFECT_STYLES: Final = {"same": "green", "safe": "green", "resharded": "yellow", "incompatible": "red"}
SAYS: Final = {
    "same": "a checkpoint of A resumed under B trains as under A, bit for bit",
    "safe": "a checkpoint of A can be resumed under B",
    "resharded": "a checkpoint of A can be resumed under B, on ranks with other shards of it",
    "incompatible": "a checkpoint of A is refused under B",
}
EFFECTS: Final = {
    "none": "The result equals a run under B from the start, bit for bit.",
    "rounding": "The result equals a run under B from the start, up to rounding.",
    "learning": "The result differs from a run under B from the start.",
}
MOST_NODES: Final = 16
MOST_CLASSES: Final = 8
MOST_OF_A_VALUE: Final = 23  # columns; narrow enough for two values, a path and a place in one line


def render_diff(
    found: PlanDifference,
    names: tuple[str, str],
    going_on: tuple[str, ...] = (),
    *,
    steps: tuple[int | None, int | None] = (None, None),
    color: bool = False,
) -> str:
    """Render the whole page. names: of A and B. going_on: lines with the command to type. steps: of latest
    checkpoints."""
    page = Page(color=color)
    for letter, name, plan, step in zip("AB", names, (found.a, found.b), steps, strict=True):
        _side(page, letter, name, plan, step)
    _verdict(page, found.verdict, going_on)
    if not found.differ:
        page.heading("SAME PLAN", f"{found.a.id}: both do the same")
        _values(page, found.values)
        return str(page)
    _values(page, found.values)
    _node_lines(page, found.nodes)
    _memory_lines(page, found.memory)
    _traffic_lines(page, found)
    _amount_lines(page, found.amounts)
    return str(page)


def _side(page: Page, letter: str, name: str, plan: Plan, step: int | None) -> None:
    page.line(clip(f"{letter}  {name}", WIDTH), "bold")
    done = "" if step is None else f" · checkpoint of step {step:,}"
    page.line(clip(f"   {plan.name} · plan {plan.id} · experiment {plan.config_id}{done}", WIDTH), "dim")


def _verdict(page: Page, verdict: Verdict, going_on: tuple[str, ...]) -> None:
    page.heading("RESUME")
    condition = "" if verdict.certain else ", unless the data is in fact the same"
    style = EFFECT_STYLES[verdict.kind]
    page.wrapped(f"{verdict.kind}: {SAYS[verdict.kind]}{condition}", style=style)
    shown = [reason for reason in verdict.reasons if verdict.kind != "incompatible" or reason.kind == verdict.kind]
    width = min(max((len(reason.path) for reason in shown), default=0), 32)
    for reason in shown:
        first = f"  {reason.path.ljust(width)}  "
        page.wrapped(reason.text, first=first, rest=" " * (width + 4))
    if left := len(verdict.reasons) - len(shown):
        page.line(f"  ({left} more allowed differences: --json)", "dim")
    if verdict.kind in ("safe", "resharded"):
        page.wrapped(EFFECTS[verdict.effect])
    for line in going_on:
        page.line(f"  {line}")


def _values(page: Page, changes: tuple[ValueChange, ...]) -> None:
    page.heading("VALUES", "" if changes else "none differ")
    for group in GROUPS:
        own = [change for change in changes if change.group == group]
        if not own:
            continue
        page.line(f"  {group}", "dim")
        rows = [(f"  {clip(c.path, 34)}", f"{_value(c.before)} → {_value(c.after)}", _origin(c)) for c in own]
        page.table(rows, styles=("", "cyan", "dim"))


def _value(entry: Provenance | None) -> str:
    return "–" if entry is None else clip(entry.value, MOST_OF_A_VALUE)


def _origin(change: ValueChange) -> str:
    """Return the origin of B's value, or of A's if B has none."""
    entry = change.after or change.before
    if entry is None or not entry.origin:
        return ""
    return f"= {entry.how}" if entry.how else f"{entry.origin} {entry.place}".strip()


def _node_lines(page: Page, changes: tuple[NodeChange, ...]) -> None:
    kinds = {"+": [c for c in changes if c.before is None], "-": [c for c in changes if c.after is None]}
    kinds["~"] = [c for c in changes if c.before is not None and c.after is not None]
    counts = [(len(kinds["+"]), "added"), (len(kinds["-"]), "removed"), (len(kinds["~"]), "changed")]
    page.heading("GRAPH", ", ".join(f"{count} {word}" for count, word in counts if count) or "the same nodes")
    rows = [
        (f"{sign} {change.id}", change.does if sign != "~" else _arguments(change))
        for sign in "+-~"
        for change in kinds[sign]
        if not change.moved
    ]
    page.table(rows[:MOST_NODES], styles=("", "dim"))
    if len(rows) > MOST_NODES:
        page.line(f"  and {len(rows) - MOST_NODES} more nodes: --json", "dim")
    if moved := sum(change.moved for change in changes):
        page.line(f"  and {plural(moved, 'node')} over other axes", "dim")


def _arguments(change: NodeChange) -> str:
    return ", ".join(f"{name} {_short(old)} → {_short(new)}" for name, (old, new) in change.arguments.items())


def _short(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = " · ".join(value) or "none"
    text = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    return "none" if value is None else clip(text.replace("'", ""), 24)


def _memory_lines(page: Page, classes: tuple[ClassMemory, ...]) -> None:
    """Show the fullest rank by category; with pipelines, also the sums of every coordinate."""
    page.heading("MEMORY", "the fullest rank, at the peak of a step")
    fullest = classes[0]
    assert fullest.before is not None and fullest.after is not None
    rows = [("", "A", "B", "")]
    for name, before, after in zip(CATEGORIES, fullest.before, fullest.after, strict=True):
        if before or after:
            label = "in all" if name == "total_bytes" else name
            rows.append((label, bytes_text(before), bytes_text(after), _change(before, after, bytes_text)))
    for each in classes[1 : MOST_CLASSES + 1]:
        before, after = (side[-1] if side else None for side in (each.before, each.after))
        shown = ["–" if total is None else bytes_text(total) for total in (before, after)]
        rows.append((each.name, shown[0], shown[1], _change(before, after, bytes_text)))
    page.table(rows, align="<>><", styles=("", "", "", "cyan"))
    if len(classes) > MOST_CLASSES + 1:
        page.line(f"  and {len(classes) - MOST_CLASSES - 1} more pipeline coordinates: --json", "dim")


def _traffic_lines(page: Page, found: PlanDifference) -> None:
    if not found.traffic:
        return
    page.heading("TRAFFIC", "a rank, a step: calls and bytes")
    rows = [("", "", "A", "", "B", "", "")]
    for each in found.traffic:
        (count_a, bytes_a), (count_b, bytes_b) = each.before, each.after
        numbers = (f"{count_a:,}", bytes_text(bytes_a), f"{count_b:,}", bytes_text(bytes_b))
        rows.append((each.axis, each.op, *numbers, _change(bytes_a, bytes_b, bytes_text)))
    page.table(rows, align="<<>>>><", styles=("", "", "", "", "", "", "cyan"))


_SPELL: Final[dict[str, Callable[[float], str]]] = {
    "count": lambda value: f"{value:,.0f}" if value < 1e7 else count_text(value),
    "flops": flops_text,
    "seconds": seconds_text,
    "bytes": bytes_text,
    "share": lambda value: f"{value:.1%}",
    "nats": lambda value: f"{value:.4f}",
}


def amount_row(each: Amount) -> tuple[str, str, str, str]:
    """Return the name of an amount, its values as text, and the change."""
    words = _SPELL[each.unit]
    change = _change(each.before, each.after, words)
    return (each.name, _known(each.before, words), _known(each.after, words), change)


def _amount_lines(page: Page, amounts: tuple[Amount, ...]) -> None:
    page.heading("RUN")
    rows = [amount_row(each) for each in amounts if each.before is not None or each.after is not None]
    page.table([("", "A", "B", ""), *rows], align="<>><", styles=("", "", "", "cyan"))


def _known(value: float | None, words: Callable[[float], str]) -> str:
    return "unknown" if value is None else words(value)


def _change(before: float | None, after: float | None, words: Callable[[float], str]) -> str:
    """Return a change as text: `+1.50 GiB (×1.25)`; empty if equal, or if a side is unknown."""
    if before is None or after is None or before == after:
        return ""
    sign = "+" if after > before else "−"
    factor = f"{after / before:.3g}" if before * after > 0 else "1"
    return f"{sign}{words(abs(after - before))}" + (f" (×{factor})" if factor != "1" else "")
