"""`Builder`: puts nodes and edges of a plan together, and proves that they make a graph that can be executed."""

from graphlib import CycleError, TopologicalSorter
from typing import Any

from attrs import define, field

from xtrain.planner.plan import Edge, Node, NodeKind


class GraphError(Exception):
    """The planner put together something that cannot be executed: a mistake of the planner, not of the spec."""


@define
class Builder:
    """Nodes in the order in which they were added, each at its first mention."""

    nodes: list[Node] = field(factory=list)
    edges: list[Edge] = field(factory=list)

    def add(
        self,
        kind: NodeKind,
        op: str,
        does: str,
        *,
        id: str = "",
        args: dict[str, Any] | None = None,
        axes: tuple[str, ...] = (),
        after: tuple[str | tuple[str, str], ...] = (),
    ) -> str:
        """Append a node and the edges that lead to it; its id. `after` holds ids, or (id, what is taken from it)."""
        node = Node(id=id or op, kind=kind, op=op, args=args or {}, axes=axes, does=does)
        self.nodes.append(node)
        for before in after:
            source, data = (before, "") if isinstance(before, str) else before
            self.edges.append(Edge(before=source, after=node.id, data=data))
        return node.id


def check_matches(node: Node) -> None:
    """Prove that every rule of a node means some module on some pipeline coordinate. Raises GraphError."""
    for rule in (node.args, *node.args.get("rules", ())):
        if "matches" in rule and not sum(rule["matches"]):
            raise GraphError(f"rule `{rule.get('pattern', node.op)}` of {node.id} matches nothing in the whole model")


def check_graph(nodes: tuple[Node, ...], edges: tuple[Edge, ...], root: str) -> str:
    """Prove that ids are unique, edges join known nodes, rules match, nothing runs in a circle, all follows `root`.

    The proof in words. Raises GraphError.
    """
    before: dict[str, set[str]] = {node.id: set() for node in nodes}
    after: dict[str, set[str]] = {node.id: set() for node in nodes}
    if len(before) != len(nodes):
        raise GraphError("two nodes have the same id")
    for edge in edges:
        if edge.before not in before or edge.after not in before:
            raise GraphError("an edge joins a node that is not there")
        before[edge.after].add(edge.before)
        after[edge.before].add(edge.after)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        raise GraphError(f"the graph runs in a circle: {' -> '.join(error.args[1])}") from error
    for node in nodes:
        check_matches(node)
    reached, open_nodes = {root}, [root]
    while open_nodes:
        following = after[open_nodes.pop()] - reached
        reached |= following
        open_nodes += following
    lost = before.keys() - reached
    if lost:
        raise GraphError(f"nothing leads from {root} to {', '.join(sorted(lost))}")
    return f"{len(nodes)} nodes, {len(edges)} edges, no circle, all reached from {root}"
