"""What differs between two plans, node by node and figure by figure."""

from typing import Any

from attrs import frozen

from xtrain.planner.compare.resumable_phases import phase_text
from xtrain.planner.costs.headroom import headroom
from xtrain.planner.plan import Node, Plan
from xtrain.planner.report.render_head import launcher_text
from xtrain.planner.schedule.horizon import known_timeline
from xtrain.planner.units import bytes_text, count_text, flops_text, plural, rate_text, seconds_text


@frozen(kw_only=True)
class Changed:
    """A node that both plans have: the arguments that differ, with both values; empty if only its numbers do."""

    id: str
    args: dict[str, tuple[Any, Any]]


@frozen(kw_only=True)
class PlanChanges:
    """From one plan to another. figures: name → text before and after; renamed: whether it is another experiment."""

    gone: tuple[str, ...]
    new: tuple[str, ...]
    changed: tuple[Changed, ...]
    figures: dict[str, tuple[str, str]]
    renamed: bool

    @property
    def empty(self) -> bool:
        return not (self.gone or self.new or self.changed or self.figures or self.renamed)


def changes(before: Plan, after: Plan) -> PlanChanges:
    """Everything that is done or estimated otherwise."""
    old, new = ({node.id: node for node in plan.nodes} for plan in (before, after))
    return PlanChanges(
        gone=tuple(id for id in old if id not in new),
        new=tuple(id for id in new if id not in old),
        changed=tuple(_changed(old[id], new[id]) for id in old if id in new and old[id] != new[id]),
        figures={
            name: pair for name, pair in (*_figures(before, after), *_phases(before, after)) if pair[0] != pair[1]
        },
        renamed=before.config_id != after.config_id,
    )


def _changed(old: Node, new: Node) -> Changed:
    differing: dict[str, tuple[Any, Any]] = {}
    if old.op != new.op:
        differing["op"] = (old.op, new.op)
    if old.axes != new.axes:
        differing["axes"] = (" · ".join(old.axes) or "none", " · ".join(new.axes) or "none")
    for name in dict.fromkeys((*old.args, *new.args)):
        pair = (old.args.get(name), new.args.get(name))
        if pair[0] != pair[1]:
            differing.update(_inner(name, *pair))
    return Changed(id=old.id, args=differing)


def _inner(name: str, old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Of an object, and of a list of names with sizes, only what differs in it."""
    old_part, new_part = _named(old), _named(new)
    if old_part is None or new_part is None:
        return {name: (old, new)}
    keys = dict.fromkeys((*old_part, *new_part))
    return {
        f"{name}.{key}": (old_part.get(key), new_part.get(key))
        for key in keys
        if old_part.get(key) != new_part.get(key)
    }


def _named(value: Any) -> dict[str, Any] | None:
    if isinstance(value, dict):
        return value
    pairs = isinstance(value, list) and all(
        isinstance(i, list) and len(i) == 2 and isinstance(i[0], str) for i in value
    )
    return dict(value) if pairs else None


def _figures(before: Plan, after: Plan) -> list[tuple[str, tuple[str, str]]]:
    found = zip(_texts(before), _texts(after), strict=True)
    return [(name, (old, new)) for (name, old), (_, new) in found]


def _phases(before: Plan, after: Plan) -> list[tuple[str, tuple[str, str]]]:
    """What each phase trains on, where there is more than one dataset for all of the run."""
    if all(len(plan.timeline.phases) == len(plan.timeline.phases[0].amounts) == 1 for plan in (before, after)):
        return []
    old, new = ({phase.name: phase_text(phase, plan) for phase in plan.timeline.phases} for plan in (before, after))
    return [(f"phase {name}", (old.get(name, "none"), new.get(name, "none"))) for name in {**old, **new}]


def _texts(plan: Plan) -> list[tuple[str, str]]:
    estimates, times, timeline, cluster = plan.estimates, plan.estimates.times, known_timeline(plan), plan.cluster
    axes = " · ".join(f"{axis.name} {axis.size}" for axis in plan.mesh.axes if axis.size > 1) or "one rank"
    sent = max(sum(each.bytes for each in one.traffic) for one in estimates.classes)
    return [
        ("mesh", axes),
        ("machines", f"{plural(plan.launch['nodes'], 'node')}, {plan.launch['device']}"),
        ("parameters", count_text(plan.parameters.total)),
        ("memory of the fullest rank", bytes_text(headroom(plan).worst.memory.total_bytes)),
        ("sent by a rank in a step", bytes_text(sent)),
        ("a step takes", "unknown" if times is None else seconds_text(times.step)),
        ("compute of a step", flops_text(estimates.flops_per_step)),
        ("tokens of a step", f"{estimates.tokens_per_step:,}"),
        ("steps", "unknown" if timeline.steps is None else f"{timeline.steps:,}"),
        ("ticks fire", ", ".join("?" if tick.count is None else f"{tick.count:,}" for tick in timeline.ticks)),
        ("runs are written to", "/".join(str(plan.workspace[key]) for key in ("root", "lineage", "run"))),
        ("launcher", launcher_text(plan)),
        ("threads of a rank", str(plan.launch["threads"])),
        ("time to stop", seconds_text(plan.launch["stop_deadline_seconds"])),
        ("restarts", f"{plan.launch['restarts']}"),
        ("device memory", "unknown" if cluster.memory_bytes is None else bytes_text(cluster.memory_bytes)),
        ("device speed", "unknown" if cluster.flops is None else rate_text(cluster.flops, "FLOP/s")),
        ("efficiency", f"{cluster.efficiency[0]:.0%} to {cluster.efficiency[1]:.0%}"),
        ("link", "unknown" if cluster.link is None else rate_text(cluster.link, "B/s")),
        ("network", "unknown" if cluster.network is None else rate_text(cluster.network, "B/s")),
        ("price", "unknown" if cluster.price is None else f"{cluster.price:g} a device-hour"),
    ]
