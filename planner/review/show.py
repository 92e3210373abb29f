"""Views of a plan: a node (`xtrain plan --show`), a rank (`--rank`), and its graph for Mermaid and Graphviz.

In a graph, nodes are grouped: setup, collate, step, actions, shutdown. An edge with a label passes a value on; one
without a label only orders.
"""

import json
import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Final

from xtrain.dsl.checking.overrides import Addresses
from xtrain.dsl.diagnostics.suggest import closest
from xtrain.plan.estimates import RankClass
from xtrain.plan.mesh import local_shapes
from xtrain.plan.plan import Axis, Node, NodeKind, Plan
from xtrain.plan.timeline import known_timeline
from xtrain.plan.views import headroom, ranks_text
from xtrain.planner.review.costs import CATEGORIES, axis_text, busiest, gather
from xtrain.planner.review.mesh import MEANING, crosses_nodes, link_text, matches, pipeline_in
from xtrain.text.page import Page, clip
from xtrain.text.units import BYTES, bytes_text, count_text, plural, seconds_text, times_text

MOST = 6  # nodes shown in detail; more are listed
# Node → kinds of memory on a rank that it causes.
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
    """Name or pattern that no node of the plan matches."""


def show_nodes(plan: Plan, name: str, *, color: bool = False) -> str:
    """Render a page about a node: its id, the start of ids up to a dot, or a pattern with `*`. Raises NoSuchNode."""
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
    """Return the node with that id; otherwise nodes whose id starts with it (with or without their kind), ends with it,
    or matches it as a pattern."""
    ways: tuple[Callable[[Node], bool], ...] = (
        lambda node: node.id == name,
        lambda node: any(each == name or each.startswith(f"{name}.") for each in _names(node)),
        lambda node: node.id.endswith(f".{name}"),
        lambda node: any(fnmatchcase(each, name) for each in _names(node)),
    )
    for fits in ways:
        if found := [node for node in plan.nodes if fits(node)]:
            return found
    ids = [node.id for node in plan.nodes]
    # Part of an id is enough for a suggestion: `fspd` is compared with `fsdp`, `parallel.fsdp` and the whole id.
    parts = {part: id for id in reversed(ids) for part in (id.rpartition(".")[2], id.partition(".")[2], id)}
    near = closest(name, parts)
    hint = f"did you mean `{parts[near]}`?" if near else "`xtrain plan SPEC --full` lists them"
    raise NoSuchNode(f"the plan has no node `{name}`; {hint}")


def _names(node: Node) -> tuple[str, str]:
    return node.id, node.id.partition(".")[2]


def _node(page: Page, plan: Plan, node: Node) -> None:
    page.heading(node.id, node.kind)
    page.wrapped(node.does)
    rows = [("op", node.op)] if node.op != node.id else []
    if node.axes:
        rows.append(("axes", ", ".join(f"{name} {_size(plan, name)}" for name in node.axes)))
    found = matches(node)
    if found is not None:
        counts = node.args.get("matches", [])
        by_stage = f"; by pp {', '.join(map(str, counts[:16]))}" if len(counts) > 1 else ""
        rows.append(("matches", f"{plural(found, 'module')} of the whole model{by_stage}"))
    rows += [(f"  {name}", text) for name, text in _arguments(node.args)]
    rows += [("after", _edge(edge.before, edge.data)) for edge in plan.edges if edge.after == node.id]
    rows += [("before", _edge(edge.after, edge.data)) for edge in plan.edges if edge.before == node.id]
    rows += _runs(plan, node)
    rows += _node_memory(plan, node)
    rows += _node_traffic(plan, node)
    page.described(rows)


def _size(plan: Plan, axis: str) -> int:
    return next(each.size for each in (*plan.mesh.axes, *plan.mesh.expert_axes) if each.name == axis)


def _arguments(args: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield arguments as JSON, with one line for each entry of a list of objects."""
    for name, value in args.items():
        if name == "matches":
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for entry in value:
                shown = {key: sum(item) if key == "matches" else item for key, item in entry.items()}
                yield name, ", ".join(f"{key} {_plain_value(item)}" for key, item in shown.items())
        elif isinstance(value, dict):
            yield name, ", ".join(f"{key} {_plain_value(item)}" for key, item in value.items())
        else:
            yield name, _plain_value(value)


def _plain_value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return clip(text, 200)


def _edge(node: str, data: str) -> str:
    return f"{node}: {data}" if data else node


def _runs(plan: Plan, node: Node) -> list[tuple[str, str]]:
    """Return the ticks, events and commands that run a node."""
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
    """Return the paths by which `--set` changes the period of a node's ticks."""
    places = [(number, tick.nodes.index(node)) for number, tick in enumerate(plan.timeline.ticks) if node in tick.nodes]
    done = {node.id: (node.op.partition(".")[2], node.args.get("dataset", "")) for node in plan.nodes}
    addresses = Addresses([[done[each] for each in tick.nodes] for tick in plan.timeline.ticks])
    return sorted(f"every.{addresses.name(*place)}" for place in places)


def _node_memory(plan: Plan, node: Node) -> list[tuple[str, str]]:
    """Return the bytes of the fullest rank that this node causes."""
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


def _node_traffic(plan: Plan, node: Node) -> list[tuple[str, str]]:
    """Return what one rank sends in a step for this node, and its share of the rank's traffic."""
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


EXAMPLES = 4


class NoSuchRank(Exception):
    """Rank outside the world of the plan."""


def show_rank(plan: Plan, rank: int, *, color: bool = False) -> str:
    """Render a page about a rank: its place and groups, its memory, traffic and rows. Raises NoSuchRank."""
    world = plan.mesh.world_size
    if not 0 <= rank < world:
        message = f"there is no rank {rank:,}: the plan has {plural(world, 'rank')}, 0 to {world - 1:,}"
        raise NoSuchRank(message)
    page = Page(color=color)
    per_node = plan.mesh.ranks_per_node
    title = f"rank {rank:,} of {world:,}: node {rank // per_node:,}, its device {rank % per_node}"
    page.line(title, "bold")
    page.line(f"{plan.name} · plan {plan.id}", "dim")
    _place(page, plan, rank)
    _stages(page, plan, rank)
    _parameters(page, plan, rank)
    one = plan.estimates.classes[plan.mesh.coordinates(rank)["pp"]]
    _rank_memory(page, plan, one)
    _rank_traffic(page, plan, one)
    _rows(page, plan, rank)
    return str(page)


def members(axis: Axis, rank: int) -> list[int]:
    """Return the ranks of the group along an axis that `rank` is in, in the order of their coordinates."""
    first = rank - rank // axis.stride % axis.size * axis.stride
    return [first + index * axis.stride for index in range(axis.size)]


def _place(page: Page, plan: Plan, rank: int) -> None:
    """Show coordinate and group along every axis with several ranks."""
    mesh = plan.mesh
    page.heading("PLACE", "coordinate on every axis, and the ranks of its group")
    axes = list(mesh.axes)
    if plan.architecture.is_moe:
        axes += [axis for axis in mesh.expert_axes if axis.name != "pp"]
    wide = [axis for axis in axes if axis.size > 1]
    rows = [("axis", "at", "of", "group", "over", "what")] if wide else []
    for axis in wide:
        over = link_text(axis.crosses_nodes, plan.cluster)
        group, at = _group_text(members(axis, rank)), rank // axis.stride % axis.size
        rows.append((axis.name, f"{at:,}", f"{axis.size:,}", group, over, MEANING.get(axis.name, "")))
    page.table(rows, align="<>>", styles=("cyan", "", "", "", "", "dim"))
    if alone := [axis.name for axis in axes if axis.size == 1]:
        page.line(f"  at 0, alone, on {', '.join(alone)}", "dim")


def _group_text(ranks: list[int]) -> str:
    """Return ranks as text: all of a few, otherwise the first two and the last: `136, 137 … 143`."""
    if len(ranks) <= 4:
        return ", ".join(f"{rank:,}" for rank in ranks)
    return f"{ranks[0]:,}, {ranks[1]:,} … {ranks[-1]:,}"


def _stages(page: Page, plan: Plan, rank: int) -> None:
    pp, pipeline = plan.mesh.coordinates(rank)["pp"], pipeline_in(plan)
    ends = ["embedding"] if pipeline.holds_first(pp) else []
    ends += ["last norm", "head"] if pipeline.holds_last(pp) else []
    page.heading("LAYERS", f"with {', '.join(ends)}" if ends else "blocks alone")
    for stage in pipeline.owners[pp]:
        first, last = pipeline.spans[stage]
        layers = f"layers {first} to {last}" if last > first else f"layer {first}"
        page.line(f"  stage {stage} of {len(pipeline.spans)}: {layers}, {plural(last - first + 1, 'block')}")


def _parameters(page: Page, plan: Plan, rank: int) -> None:
    """Show the rank's parameters, and the whole and local shapes of some tensors."""
    width = BYTES[plan.node("setup.build_model").args["params"]]
    local = local_shapes(plan, rank)
    whole = {tensor.name: tensor.shape for tensor in plan.parameters.tensors}
    elements = sum(map(prod, local.values()))
    amount = f"{elements:,} in {plural(len(local), 'tensor')}, {bytes_text(elements * width)}"
    amount += f" of {bytes_text(plan.parameters.total * width)} ({count_text(plan.parameters.total)})"
    page.heading("PARAMETERS", amount)
    names = sorted(local, key=lambda name: -prod(whole[name]))
    kinds: dict[str, str] = {}  # one of each kind, the largest first: layers are alike
    for name in names:
        kinds.setdefault(".".join(part for part in name.split(".") if not part.isdecimal()), name)
    rows = [("tensor", "whole", "here")]
    for name in sorted(list(kinds.values())[: EXAMPLES + 2], key=names.index):
        here = _shape(local[name]) if prod(local[name]) else f"{_shape(local[name])}: nothing"
        rows.append((name, _shape(whole[name]), here))
    page.table(rows, styles=("", "dim"))
    if len(local) > len(rows) - 1:
        page.line(f"  and {len(local) - len(rows) + 1:,} more", "dim")


def _shape(shape: tuple[int, ...]) -> str:
    return " · ".join(map(str, shape))


def _rank_memory(page: Page, plan: Plan, one: RankClass) -> None:
    device = plan.cluster.memory_bytes
    of = "" if device is None else f" of {bytes_text(device)} ({one.memory.total_bytes / device:.0%})"
    host = "; parameters, gradients and optimizer in host memory" if one.memory.offloaded else ""
    ranks = f"the {plural(one.ranks, 'rank')} of pp {one.pp}"
    total = f"{bytes_text(one.memory.total_bytes)}{of} at the peak of a step, the most of {ranks}{host}"
    page.heading("MEMORY", total)
    parts = [(name, bytes_text(getattr(one.memory, name))) for name in CATEGORIES if getattr(one.memory, name)]
    page.wrapped(" · ".join(f"{name} {size}" for name, size in parts))


def _rank_traffic(page: Page, plan: Plan, one: RankClass) -> None:
    if plan.mesh.world_size == 1:
        return
    sent = gather(one.traffic)
    known = "" if sent else "not estimated"
    page.heading("COMMUNICATION", known or f"{bytes_text(sum(each.bytes for each in sent))} a step")
    rows = [
        (
            axis_text(plan.mesh, each.axis),
            each.op,
            f"{each.count:,} calls",
            bytes_text(each.bytes),
            "time unknown" if each.seconds is None else seconds_text(each.seconds),
            "exposed" if each.exposed else "overlapped",
            "network" if crosses_nodes(plan.mesh, each.axis) else "link",
        )
        for each in sent
    ]
    page.table(rows, align="<<>>>", styles=("cyan",))


def _rows(page: Page, plan: Plan, rank: int) -> None:
    """Show the rows of a step that the rank reads, by their index in the seeded order; for a server, its texts of a
    request."""
    if plan.serves:
        data_rank, ranks = plan.mesh.data_rank(rank), plan.mesh.data_ranks
        page.heading("DATA", f"data rank {data_rank:,} of {ranks:,}")
        page.wrapped(
            f"one of {ranks:,} equal parts of the texts of a request" if ranks > 1 else "all texts of a request"
        )
        return
    loader, mesh = plan.node("setup.loader").args, plan.mesh
    micro, accumulate, data_rank = loader["micro"], loader["accumulate"], mesh.data_rank(rank)
    place = mesh.coordinates(rank)
    page.heading("DATA", f"data rank {data_rank:,} of {mesh.data_ranks:,}")
    if place["pp"] not in plan.node("step.fetch").args["readers"]:
        page.line("  reads no rows: its stages have neither inputs nor labels")
        return
    each = micro * mesh.data_ranks
    first = data_rank * micro
    rows = f"{first:,} to {first + micro - 1:,}" if micro > 1 else f"{first:,}"
    text = f"of the {loader['rows']:,} rows of a step, {rows} in the first microbatch"
    if accumulate > 1:
        others = "the other" if accumulate == 2 else f"each of the {accumulate - 1} others"
        text += f", then {each:,} further on in {others}"
    page.wrapped(text)
    parts = mesh.size("ring") * mesh.size("ulysses")
    if parts > 1:
        page.line(f"  of each row {loader['sequence'] // parts:,} of {loader['sequence']:,} positions")
    sharers = [axis.name for axis in mesh.axes if axis.name in ("ring", "ulysses", "tp") and axis.size > 1]
    if sharers:
        page.line(f"  the same rows as its neighbors along {', '.join(sharers)}")


GROUPS: Final[dict[NodeKind, str]] = {
    "setup": "setup",
    "collate": "collate",
    "step": "a step",
    "tick": "along the way",
    "event": "on an event",
    "request": "a request",
    "shutdown": "shutdown",
}
FILLS: Final[dict[NodeKind, str]] = {
    "setup": "#dbeafe",
    "collate": "#dcfce7",
    "step": "#fef9c3",
    "tick": "#fae8ff",
    "event": "#ffe4e6",
    "request": "#fef9c3",
    "shutdown": "#e5e7eb",
}


def mermaid(plan: Plan) -> str:
    """Return a flowchart; GitHub and many editors draw it in a `mermaid` code block."""
    lines = ["flowchart TD", f"  %% {_plain_label(plan.name)}, plan {plan.id}"]
    for kind, title in GROUPS.items():
        nodes = plan.of_kind(kind)
        if not nodes:
            continue
        lines += [f'  subgraph group_{kind}["{title}"]', "    direction TB"]
        lines += [f'    {_word(node.id)}["{_mermaid_text(_label(plan, node))}"]' for node in nodes]
        lines.append("  end")
    for edge in plan.edges:
        arrow = f'-->|"{_mermaid_text(edge.data)}"|' if edge.data else "-->"
        lines.append(f"  {_word(edge.before)} {arrow} {_word(edge.after)}")
    for kind in GROUPS:
        if nodes := plan.of_kind(kind):
            lines.append(f"  classDef {kind}_node fill:{FILLS[kind]},stroke:#475569,color:#0f172a")
            lines.append(f"  class {','.join(_word(node.id) for node in nodes)} {kind}_node")
    return "\n".join(lines) + "\n"


def dot(plan: Plan) -> str:
    """Return a directed graph in the DOT language: `xtrain plan SPEC --format dot | dot -Tsvg > plan.svg`."""
    lines = [
        "digraph plan {",
        f"  label={_quoted(f'{plan.name}, plan {plan.id}')};",
        "  rankdir=TB;",
        '  node [shape=box, style="rounded,filled", fontname="sans-serif", fontsize=10];',
        '  edge [fontname="sans-serif", fontsize=9];',
    ]
    for kind, title in GROUPS.items():
        nodes = plan.of_kind(kind)
        if not nodes:
            continue
        lines += [f"  subgraph cluster_{kind} {{", f"    label={_quoted(title)};"]
        lines += [
            f'    {_quoted(node.id)} [label={_quoted(_label(plan, node))}, fillcolor="{FILLS[kind]}"];'
            for node in nodes
        ]
        lines.append("  }")
    for edge in plan.edges:
        label = f" [label={_quoted(edge.data)}]" if edge.data else ""
        lines.append(f"  {_quoted(edge.before)} -> {_quoted(edge.after)}{label};")
    return "\n".join([*lines, "}"]) + "\n"


PICTURES: Final[dict[str, Callable[[Plan], str]]] = {"mermaid": mermaid, "dot": dot}


def _label(plan: Plan, node: Node) -> str:
    """Return the name of a node without its kind; below it its axes, or when it runs."""
    second = ""
    if node.kind == "tick":
        second = ", ".join(f"every {tick.period}" for tick in plan.timeline.ticks if node.id in tick.nodes)
    elif node.kind == "event":
        triggers = [each for each in plan.timeline.triggers if node.id in each.nodes]
        when = [each.name + (", then stop" if each.stop else "") for each in triggers]
        when += ["request"] if any(node.id in command.nodes for command in plan.timeline.commands) else []
        second = ", ".join(f"on {each}" for each in when)
    elif node.axes and node.kind in ("setup", "collate"):
        sizes = {axis.name: axis.size for axis in (*plan.mesh.axes, *plan.mesh.expert_axes)}
        second = " · ".join(f"{axis} {sizes[axis]}" for axis in node.axes)
    name = node.id.partition(".")[2]
    return f"{name}\n{second}" if second else name


def _word(id: str) -> str:
    """Return an id that Mermaid accepts: letters, digits and `_`; other characters by number, so that ids stay
    distinct."""
    return "n_" + re.sub(r"[^A-Za-z0-9]", lambda found: "_" if found[0] == "." else f"_{ord(found[0]):x}_", id)


def _plain_label(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _mermaid_text(text: str) -> str:
    """Return text for inside quotes, with Mermaid's special characters escaped by number."""
    escaped = re.sub(r"[\"#;<>&`]", lambda found: f"#{ord(found[0])};", text)
    return "<br/>".join(_plain_label(line) for line in escaped.split("\n"))


def _quoted(text: str) -> str:
    """Return a string of the DOT language."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "\\n".join(_plain_label(line) for line in escaped.split("\n")) + '"'
