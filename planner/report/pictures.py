"""The graph of a plan as a picture: text for Mermaid (https://mermaid.js.org) and for Graphviz's dot.

Nodes stand in groups: setup, collate, step, what happens along the way, shutdown. An edge with a label hands something
over; one without says order only.
"""

import re
from collections.abc import Callable
from typing import Final

from xtrain.planner.plan import Node, NodeKind, Plan, Trigger

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
    """A flowchart; GitHub and many editors draw it where it stands in a fence called `mermaid`."""
    lines = ["flowchart TD", f"  %% {_plain(plan.name)}, plan {plan.id}"]
    for kind, title in GROUPS.items():
        nodes = plan.of_kind(kind)
        if not nodes:
            continue
        lines += [f'  subgraph group_{kind}["{title}"]', "    direction TB"]
        lines += [f'    {_name(node)}["{_mermaid_text(_label(plan, node))}"]' for node in nodes]
        lines.append("  end")
    for edge in plan.edges:
        arrow = f'-->|"{_mermaid_text(edge.data)}"|' if edge.data else "-->"
        lines.append(f"  {_word(edge.before)} {arrow} {_word(edge.after)}")
    for kind in GROUPS:
        if nodes := plan.of_kind(kind):
            lines.append(f"  classDef {kind}_node fill:{FILLS[kind]},stroke:#475569,color:#0f172a")
            lines.append(f"  class {','.join(_name(node) for node in nodes)} {kind}_node")
    return "\n".join(lines) + "\n"


def dot(plan: Plan) -> str:
    """A directed graph in the DOT language: `xtrain plan SPEC --format dot | dot -Tsvg > plan.svg`."""
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
    """The name of a node without its kind; below it its axes, or when it runs."""
    second = ""
    if node.kind == "tick":
        second = ", ".join(f"every {tick.period}" for tick in plan.timeline.ticks if node.id in tick.nodes)
    elif node.kind == "event":
        when = [_event(each) for each in plan.timeline.triggers if node.id in each.nodes]
        when += ["request"] if any(node.id in command.nodes for command in plan.timeline.commands) else []
        second = ", ".join(f"on {each}" for each in when)
    elif node.axes and node.kind in ("setup", "collate"):
        sizes = {axis.name: axis.size for axis in (*plan.mesh.axes, *plan.mesh.expert_axes)}
        second = " · ".join(f"{axis} {sizes[axis]}" for axis in node.axes)
    name = node.id.partition(".")[2]
    return f"{name}\n{second}" if second else name


def _event(trigger: Trigger) -> str:
    return f"{trigger.name}, then stop" if trigger.stop else trigger.name


def _name(node: Node) -> str:
    return _word(node.id)


def _word(id: str) -> str:
    """An id as Mermaid takes it. Letters, digits and `_` alone; other signs by their number, so that none clash."""
    return "n_" + re.sub(r"[^A-Za-z0-9]", lambda found: "_" if found[0] == "." else f"_{ord(found[0]):x}_", id)


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _mermaid_text(text: str) -> str:
    """Text inside quotes: what Mermaid would read as its own is written by number."""
    escaped = re.sub(r"[\"#;<>&`]", lambda found: f"#{ord(found[0])};", text)
    return "<br/>".join(_plain(line) for line in escaped.split("\n"))


def _quoted(text: str) -> str:
    """A string of the DOT language."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "\\n".join(_plain(line) for line in escaped.split("\n")) + '"'
