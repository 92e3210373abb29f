"""Order of a plan's nodes, the ticks that are due, and the callables of the nodes on this rank."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import networkx as nx
from attrs import define, field, frozen

from xtrain.dsl.schema.actions import FAILURE, action_of
from xtrain.plan.plan import Node, Plan, PlanTick
from xtrain.plan.step_sizes import StepSizes
from xtrain.plan.timeline import passes
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.ops import OPS, op_of
from xtrain.runtime.base.state import Clocks, Progress, Resources
from xtrain.runtime.nn.batch import Step, StepCall
from xtrain.runtime.observe.heartbeat import LASTING, HeartbeatWriter


@frozen
class DueTick:
    """A tick with its bound nodes by id; `due` is called once after every step."""

    tick: PlanTick
    calls: dict[str, StepCall]
    clock: int | None

    def due(self, step: int, tokens: int, of_epochs: int, of_step: int, clocks: Clocks) -> bool:
        """Return True if the tick is due after `step` steps. tokens: of the run so far, `of_step` of the last step;
        of_epochs: tokens of the data that epochs count."""
        if self.clock is not None:
            return clocks.due(self.clock)
        if self.tick.tokens is not None:
            return passes(of_epochs if self.tick.epochs is not None else tokens, of_step, self.tick.tokens)
        assert self.tick.steps is not None
        return step % self.tick.steps == 0


@define
class DueTicks:
    """Ticks of a run, and the ones due after a finished or the running step."""

    progress: Progress
    clocks: Clocks
    sizes: StepSizes
    """Tokens of every step."""
    ticks: list[DueTick] = field(factory=list)
    tokens_taken: Callable[[int], int] = int
    """Tokens of the data after a number of steps."""

    def due(self, ahead: int = 0) -> list[DueTick]:
        """Return the due ticks. ahead: 1 for those due once the running step ends."""
        step = self.progress.step + ahead
        of_step, of_epochs = self.sizes.at(step - 1), self.tokens_taken(step)
        tokens = self.progress.tokens + ahead * of_step
        return [tick for tick in self.ticks if tick.due(step, tokens, of_epochs, of_step, self.clocks)]

    def will_run(self, nodes: Collection[str]) -> bool:
        """Return True if a due tick runs one of these nodes after the running step; known once ranks have agreed."""
        return any(not tick.calls.keys().isdisjoint(nodes) for tick in self.due(ahead=1))


def nodes_due(ticks: Sequence[DueTick]) -> dict[str, StepCall]:
    """Return the nodes to run for ticks due in one step, in order; a node in several ticks runs once."""
    return {node: call for tick in ticks for node, call in tick.calls.items()}


def topological(plan: Plan) -> list[Node]:
    """Sort nodes so that every edge is respected; ties keep the plan's order."""
    graph = nx.DiGraph()
    place = {node.id: number for number, node in enumerate(plan.nodes)}
    graph.add_nodes_from(place)
    graph.add_edges_from((edge.before, edge.after) for edge in plan.edges)
    order = nx.lexicographical_topological_sort(graph, key=place.__getitem__)
    by_id = {node.id: node for node in plan.nodes}
    return [by_id[node_id] for node_id in order]


@define(eq=False)
class NodeCalls:
    """Bound callables of a plan's nodes. last_step: the last finished step, None before the first and after a
    rollback."""

    plan: Plan
    resources: Resources
    progress: Progress
    beat: HeartbeatWriter
    clocks: Clocks
    last_step: Step | None = None
    _bound: dict[str, StepCall] = field(factory=dict)
    _hooks: list[Node] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._hooks = [node for node in self.plan.nodes if node.op in ("step.hook", "event.hook")]

    def act(self, node: Node) -> Any:
        """Call the op of a node: it acts at once, or returns a callable."""
        return op_of(node).bind(node, {**self.resources, "node_id": node.id})()

    def due_tick(self, tick: PlanTick) -> DueTick:
        clock = self.clocks.add(tick.seconds) if tick.seconds is not None else None
        return DueTick(tick, {node: self.call(node) for node in tick.nodes}, clock)

    def call(self, node_id: str) -> StepCall:
        """Return the callable of a step, tick or event node, bound on first use."""
        if node_id not in self._bound:
            node = self.plan.node(node_id)
            call = self._with_hooks(node_id, self.act(node))
            self._bound[node_id] = call if node.kind == "step" else self._marked(node, call)
        return self._bound[node_id]

    def _with_hooks(self, node_id: str, call: StepCall) -> StepCall:
        """Wrap a node's call with the hooks before and after it."""
        around = [node for node in self._hooks if node_id in node.args.get("nodes", ())]
        action = action_of(self.plan.node(node_id).op)
        # the saver calls its own hooks: a due save may not be made
        if not around or (action is not None and action.saves):
            return call
        before, after = (
            [self.call(node.id) for node in around if node.args["place"].startswith(word)]
            for word in ("before", "after")
        )

        def call_with_hooks(step: Step) -> None:
            for function in (*before, call, *after):
                function(step)

        return call_with_hooks

    def call_hooks(self, place: str, **details: Any) -> None:
        """Call the hooks of a place that belongs to no single node."""
        step = self.last_step or Step(index=max(0, self.progress.step - 1))
        for node in self._hooks:
            if node.args["place"] == place:
                self.beat.at(node.id, lasting=True)
                OPS["event.hook"].bind(node, {**self.resources, "node_id": node.id})()(step, **details)

    def call_failure_hooks(self, error: BaseException) -> None:
        """Call the failure hooks and the actions of `on failure`; their errors are warnings, because the run failed for
        another reason."""
        if "optimizer" not in self.resources or "feed" not in self.resources:
            return
        self.resources["failure"] = error
        self._attempt("a hook at_failure", lambda: self.call_hooks("at_failure", failure=error))
        nodes = [node for each in self.plan.timeline.triggers if each.event == FAILURE for node in each.nodes]
        step = self.last_step or Step(index=max(0, self.progress.step - 1))
        for node in map(self.plan.node, nodes):
            self.beat.at(node.id, lasting=True)
            self._attempt(f"on failure, {node.id}", lambda node=node: self.act(node)(step))

    def _attempt(self, what: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except (Exception, SystemExit) as another:
            with suppress(EnvironmentFault):
                records = self.resources["records"]
                records.warn(f"{what}: {another}", step=self.progress.step, every_rank=True)

    def _marked(self, node: Node, call: StepCall) -> StepCall:
        """Wrap a call with a heartbeat mark; the first call may take long, because it may compile."""
        action, before = action_of(node.op), False
        lasting = node.op in LASTING if action is None or action.lasting is None else action.lasting
        compiles = action is None or action.lasting is None

        def mark_and_call(step: Step) -> None:
            nonlocal before
            self.beat.at(node.id, lasting=lasting or (compiles and not before))
            before = True
            call(step)

        return mark_and_call
