"""`xtrain plan --show NODE`: what a plan says of a node, or of all that a pattern means."""

import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, Final

from xtrain.dsl.diagnostics.suggest import closest
from xtrain.dsl.overrides.addresses import Addresses, Done
from xtrain.planner.costs.headroom import headroom, ranks_text
from xtrain.planner.plan import Node, Plan
from xtrain.planner.report.render_mesh import crosses_nodes, link_text
from xtrain.planner.report.render_order import matches
from xtrain.planner.report.render_traffic import busiest, gather
from xtrain.planner.report.text import Page, clip
from xtrain.planner.schedule.horizon import known_timeline
from xtrain.planner.units import bytes_text, plural, seconds_text, times_text

MOST = 6  # nodes that are shown one by one; more are listed
# Which node is the reason for which bytes on a rank.
HOLDS: Final[dict[str, tuple[str, ...]]] = {
    "setup.build_model": ("parameters",),
    "setup.parallel.fsdp": ("unsharded", "unreduced"),
    "setup.parallel.expert_fsdp": ("unsharded", "unreduced"),
    "setup.parallel.root_fsdp": ("unsharded", "unreduced"),
    "setup.optimizer": ("optimizer",),
    "setup.ema": ("averages",),
    "step.body": ("gradients", "activations", "loss", "working"),
    "step.forward_backward": ("gradients", "activations", "loss", "working"),
}


class NoSuchNode(Exception):
    """The plan has no node of that name, and none that the pattern means."""


def show_nodes(plan: Plan, name: str, *, color: bool = False) -> str:
    """A page about a node: its id, the beginning of ids up to a dot, or a pattern with `*`. Raises NoSuchNode."""
    nodes = find_nodes(plan, name)
    page = Page(color=color)
    if len(nodes) > MOST:
        page.heading(name, plural(len(nodes), "node"))
        page.described([(node.id, node.does) for node in nodes])
    else:
        for node in nodes:
            _node(page, plan, node)
    return str(page).lstrip("\n")


def find_nodes(plan: Plan, name: str) -> list[Node]:
    """The node with that id; else those whose ids begin with it, as they are or without their kind; end with it; or
    match it as a pattern."""
    for fits in (_is, _begins, _ends, _matches):
        if found := [node for node in plan.nodes if fits(node, name)]:
            return found
    ids = [node.id for node in plan.nodes]
    # A part of an id is enough to be understood: `fspd` is compared with `fsdp`, `parallel.fsdp` and the whole.
    parts = {part: id for id in reversed(ids) for part in (id.rpartition(".")[2], id.partition(".")[2], id)}
    near = closest(name, parts)
    hint = f"did you mean `{parts[near]}`?" if near else "`xtrain plan SPEC --full` lists them"
    raise NoSuchNode(f"the plan has no node `{name}`; {hint}")


def _names(node: Node) -> tuple[str, str]:
    return node.id, node.id.partition(".")[2]


def _is(node: Node, name: str) -> bool:
    return node.id == name


def _begins(node: Node, name: str) -> bool:
    return any(each == name or each.startswith(f"{name}.") for each in _names(node))


def _ends(node: Node, name: str) -> bool:
    return node.id.endswith(f".{name}")


def _matches(node: Node, name: str) -> bool:
    return any(fnmatchcase(each, name) for each in _names(node))


def _node(page: Page, plan: Plan, node: Node) -> None:
    page.heading(node.id, node.kind)
    page.wrapped(node.does)
    rows = [("op", node.op)] if node.op != node.id else []
    if node.axes:
        rows.append(("axes", ", ".join(f"{name} {_size(plan, name)}" for name in node.axes)))
    found = matches(node)
    if found is not None:
        rows.append(("matches", f"{plural(found, 'module')} of the whole model{_by_stage(node)}"))
    rows += [(f"  {name}", text) for name, text in _arguments(node.args)]
    rows += [("after", _edge(edge.before, edge.data)) for edge in plan.edges if edge.after == node.id]
    rows += [("before", _edge(edge.after, edge.data)) for edge in plan.edges if edge.before == node.id]
    rows += _runs(plan, node)
    rows += _memory(plan, node)
    rows += _traffic(plan, node)
    page.described(rows)


def _size(plan: Plan, axis: str) -> int:
    return next(each.size for each in (*plan.mesh.axes, *plan.mesh.expert_axes) if each.name == axis)


def _by_stage(node: Node) -> str:
    """How the matches of a single rule are spread over pipeline coordinates."""
    counts = node.args.get("matches", [])
    return f"; by pp {', '.join(map(str, counts[:16]))}" if len(counts) > 1 else ""


def _arguments(args: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """Arguments as JSON; of lists of objects one entry a line."""
    for name, value in args.items():
        if name == "matches":
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for entry in value:
                shown = {key: sum(item) if key == "matches" else item for key, item in entry.items()}
                yield name, ", ".join(f"{key} {_plain(item)}" for key, item in shown.items())
        elif isinstance(value, dict):
            yield name, ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
        else:
            yield name, _plain(value)


def _plain(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return clip(text, 200)


def _edge(node: str, data: str) -> str:
    return f"{node}: {data}" if data else node


def _runs(plan: Plan, node: Node) -> list[tuple[str, str]]:
    """When a tick or trigger runs it."""
    ticks = [tick for tick in known_timeline(plan).ticks if node.id in tick.nodes]
    found = []
    for tick in ticks:
        count = "" if tick.count is None else f", {times_text(tick.count)}"
        found.append(("every", tick.period + count))
    if ticks:
        found.append(("--set", ", ".join(_addresses(plan, node.id))))
    found += [("on", each.name) for each in plan.timeline.triggers if node.id in each.nodes]
    return found + [("on request", each.name) for each in plan.timeline.commands if node.id in each.nodes]


def _addresses(plan: Plan, node: str) -> list[str]:
    """The paths by which `--set` gives the ticks of a node another period."""
    places = [(number, tick.nodes.index(node)) for number, tick in enumerate(plan.timeline.ticks) if node in tick.nodes]
    addresses = Addresses([[_done(plan.node(each)) for each in tick.nodes] for tick in plan.timeline.ticks])
    return sorted(f"every.{addresses.name(*place)}" for place in places)


def _done(node: Node) -> Done:
    return node.op.partition(".")[2], node.args.get("dataset", "")


def _memory(plan: Plan, node: Node) -> list[tuple[str, str]]:
    """Bytes of the fullest rank that are there because of this node."""
    worst = headroom(plan).worst
    sizes = [(name, getattr(worst.memory, name)) for name in HOLDS.get(node.id, ()) if getattr(worst.memory, name)]
    if not sizes:
        return []
    total = worst.memory.total_bytes or 1
    parts = ", ".join(f"{bytes_text(size)} of {name} ({size / total:.0%})" for name, size in sizes)
    units = [
        each.id for each in plan.nodes if each.id in HOLDS and HOLDS[each.id] == HOLDS[node.id] and each is not node
    ]
    shared = f", together with {' and '.join(units)}" if units else ""
    return [("memory", f"{parts}, on {ranks_text(plan, worst.pp)}{shared}")]


def _traffic(plan: Plan, node: Node) -> list[tuple[str, str]]:
    """What one rank sends in a step because of this node, and its share of all that it sends."""
    one = busiest(plan)
    whole = sum(each.bytes for each in one.traffic) or 1
    found = []
    for each in gather(traffic for traffic in one.traffic if traffic.node == node.id):
        time = "" if each.seconds is None else f", {seconds_text(each.seconds)}"
        beside = "exposed" if each.exposed else "overlapped"
        text = f"{each.count:,} {each.op} over {each.axis}, {bytes_text(each.bytes)} ({each.bytes / whole:.0%} of all)"
        over = link_text(crosses_nodes(plan.mesh, each.axis), plan.cluster)
        found.append(("traffic", f"{text}{time}, {beside}, {over}, on {ranks_text(plan, one.pp)}"))
    return found
