"""The graph of a plan as a list that is read from top to bottom: what happens, in which order, and when."""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from attrs import field, frozen

from xtrain.tui.model.planned import Planned, PlannedEdge, PlannedNode, PlannedTick

# Kinds in execution order, and their titles.
KINDS = {
    "setup": "Set-up",
    "collate": "Collate",
    "step": "Step",
    "tick": "Ticks",
    "event": "Events and commands",
    "shutdown": "Shutdown",
}


@frozen(kw_only=True)
class ListSection:
    """Heading of the nodes of one kind. folded: the nodes are not in the list."""

    kind: str
    title: str
    nodes: int
    shown: int
    folded: bool


@frozen(kw_only=True)
class Outline:
    """Outline of a plan: its nodes by kind in execution order, and their relations.

    ticks: node → its ticks. when: event node → `on sigterm`, `asked: save`. before, after: node → the edges that end
    and begin there.
    """

    nodes: Mapping[str, tuple[PlannedNode, ...]]
    ticks: Mapping[str, tuple[PlannedTick, ...]] = field(factory=dict)
    when: Mapping[str, tuple[str, ...]] = field(factory=dict)
    before: Mapping[str, tuple[PlannedEdge, ...]] = field(factory=dict)
    after: Mapping[str, tuple[PlannedEdge, ...]] = field(factory=dict)

    @property
    def ids(self) -> tuple[str, ...]:
        """All nodes from top to bottom."""
        return tuple(node.id for nodes in self.nodes.values() for node in nodes)


Line = ListSection | PlannedNode


def outline(plan: Planned) -> Outline:
    """Arrange a plan."""
    nodes: dict[str, list[PlannedNode]] = {kind: [] for kind in KINDS}
    for node in execution_order(plan):
        nodes.setdefault(node.kind, []).append(node)
    ticks: dict[str, list[PlannedTick]] = {}
    for tick in plan.ticks:
        for node in dict.fromkeys(tick.nodes):
            ticks.setdefault(node, []).append(tick)
    when: dict[str, list[str]] = {}
    for trigger in plan.triggers:
        times = f" ({trigger.count} in a row)" if (trigger.count or 1) > 1 else ""
        for node in dict.fromkeys(trigger.nodes):
            when.setdefault(node, []).append(f"on {trigger.event}{times}")
    for command in plan.commands:
        for node in dict.fromkeys(command.nodes):
            when.setdefault(node, []).append(f"asked: {command.name}")
    before: dict[str, list[PlannedEdge]] = {}
    after: dict[str, list[PlannedEdge]] = {}
    for edge in plan.edges:
        before.setdefault(edge.after, []).append(edge)
        after.setdefault(edge.before, []).append(edge)
    return Outline(
        nodes={kind: tuple(found) for kind, found in nodes.items() if found},
        ticks={node: tuple(found) for node, found in ticks.items()},
        when={node: tuple(found) for node, found in when.items()},
        before={node: tuple(found) for node, found in before.items()},
        after={node: tuple(found) for node, found in after.items()},
    )


def execution_order(plan: Planned) -> list[PlannedNode]:
    """Return nodes in an order that respects every edge, else in the plan's order; nodes of a cycle, which no plan has,
    come last."""
    place = {node.id: number for number, node in enumerate(plan.nodes)}
    waits = dict.fromkeys(place, 0)
    followers: dict[str, list[str]] = {}
    for edge in plan.edges:
        if edge.before in place and edge.after in place:
            waits[edge.after] += 1
            followers.setdefault(edge.before, []).append(edge.after)
    ready = [place[node] for node, number in waits.items() if not number]
    heapify(ready)
    order: list[PlannedNode] = []
    while ready:
        node = plan.nodes[heappop(ready)]
        order.append(node)
        for after in followers.get(node.id, ()):
            waits[after] -= 1
            if not waits[after]:
                heappush(ready, place[after])
    done = {node.id for node in order}
    return order + [node for node in plan.nodes if node.id not in done]


def lines(arranged: Outline, *, query: str = "", folded: frozenset[str] = frozenset()) -> list[Line]:
    """Return headings and nodes from top to bottom. query: only nodes that contain all of its words; sections are then
    unfolded, and those without such a node left out."""
    words = query.casefold().split()
    found: list[Line] = []
    for kind, nodes in arranged.nodes.items():
        matching = [node for node in nodes if _matches(node, arranged, words)] if words else list(nodes)
        if words and not matching:
            continue
        hidden = kind in folded and not words
        found.append(
            ListSection(kind=kind, title=KINDS.get(kind, kind), nodes=len(nodes), shown=len(matching), folded=hidden)
        )
        if not hidden:
            found += matching
    return found


def _matches(node: PlannedNode, arranged: Outline, words: list[str]) -> bool:
    about = (node.id, node.kind, node.op, node.does, *node.axes, *arranged.when.get(node.id, ()))
    whole = "\n".join(about).casefold()
    return all(word in whole for word in words)
