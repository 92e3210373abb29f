"""In which order nodes are walked, which op a node means, and when a tick is due."""

from collections.abc import Callable

import networkx as nx
from attrs import frozen

from ..planner.plan import Node, Plan
from ..planner.plan_timeline import Tick
from .ops import OPS, Op, PlanMismatch
from .state import Step
from .timers import Clocks

StepCall = Callable[[Step], None]


@frozen
class DueTick:
    """A tick with its nodes bound; `due` is asked once after every step."""

    tick: Tick
    calls: tuple[StepCall, ...]
    clock: int | None

    def due(self, step: int, tokens_per_step: int, clocks: Clocks) -> bool:
        if self.tick.steps is not None:
            return step % self.tick.steps == 0
        if self.tick.tokens is not None:
            # It fires in the step in which another multiple of its period is reached.
            return step * tokens_per_step // self.tick.tokens > (step - 1) * tokens_per_step // self.tick.tokens
        assert self.clock is not None
        return clocks.due(self.clock)


def op_of(node: Node) -> Op:
    if node.op not in OPS:
        raise PlanMismatch(f"node `{node.id}` needs op `{node.op}`, which this version of xtrain does not have")
    return OPS[node.op]


def topological(plan: Plan) -> list[Node]:
    """Nodes in an order that respects every edge, the plan's own order where the edges leave a choice."""
    graph = nx.DiGraph()
    place = {node.id: number for number, node in enumerate(plan.nodes)}
    graph.add_nodes_from(place)
    graph.add_edges_from((edge.before, edge.after) for edge in plan.edges)
    order = nx.lexicographical_topological_sort(graph, key=place.__getitem__)
    by_id = {node.id: node for node in plan.nodes}
    return [by_id[node_id] for node_id in order]
