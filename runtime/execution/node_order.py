"""In which order nodes are run, and when a tick is due."""

from collections.abc import Callable, Collection, Sequence

import networkx as nx
from attrs import define, field, frozen

from xtrain.planner.plan import Node, Plan, PlanTick
from xtrain.planner.schedule.counts import passes
from xtrain.planner.schedule.step_sizes import StepSizes
from xtrain.runtime.state import Progress
from xtrain.runtime.step_state import StepCall
from xtrain.runtime.timers import Clocks


@frozen
class DueTick:
    """A tick, counted, with its nodes bound, by their ids; `due` is asked once after every step."""

    tick: PlanTick
    calls: dict[str, StepCall]
    clock: int | None

    def due(self, step: int, tokens: int, of_epochs: int, of_step: int, clocks: Clocks) -> bool:
        """After `step` steps of the run. tokens: that it has taken, `of_step` in the last one; of_epochs: those of the
        data its epochs are of."""
        if self.clock is not None:
            return clocks.due(self.clock)
        if self.tick.tokens is not None:
            return passes(of_epochs if self.tick.epochs is not None else tokens, of_step, self.tick.tokens)
        assert self.tick.steps is not None
        return step % self.tick.steps == 0


@define
class DueTicks:
    """The ticks of a run, and which of them are due: behind a step that has ended, or behind the one under way."""

    progress: Progress
    clocks: Clocks
    sizes: StepSizes
    """Tokens of every step."""
    ticks: list[DueTick] = field(factory=list)
    tokens_taken: Callable[[int], int] = int
    """Tokens of the data after so many steps."""

    def due(self, ahead: int = 0) -> list[DueTick]:
        """ahead: 1 for what will be due when the step under way has ended."""
        step = self.progress.step + ahead
        of_step, of_epochs = self.sizes.at(step - 1), self.tokens_taken(step)
        tokens = self.progress.tokens + ahead * of_step
        return [tick for tick in self.ticks if tick.due(step, tokens, of_epochs, of_step, self.clocks)]

    def will_run(self, nodes: Collection[str]) -> bool:
        """Whether any of these nodes runs behind the step under way, by a tick; known once ranks have agreed."""
        return any(not tick.calls.keys().isdisjoint(nodes) for tick in self.due(ahead=1))


def nodes_due(ticks: Sequence[DueTick]) -> dict[str, StepCall]:
    """What ticks that are due in the same step run, in their order: a node that several of them name runs once."""
    return {node: call for tick in ticks for node, call in tick.calls.items()}


def topological(plan: Plan) -> list[Node]:
    """Nodes in an order that respects every edge, the plan's own order where the edges leave a choice."""
    graph = nx.DiGraph()
    place = {node.id: number for number, node in enumerate(plan.nodes)}
    graph.add_nodes_from(place)
    graph.add_edges_from((edge.before, edge.after) for edge in plan.edges)
    order = nx.lexicographical_topological_sort(graph, key=place.__getitem__)
    by_id = {node.id: node for node in plan.nodes}
    return [by_id[node_id] for node_id in order]
