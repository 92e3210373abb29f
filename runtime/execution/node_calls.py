"""The callables of a plan's nodes on this rank: made once, with the hooks around them and a mark of progress before."""

from contextlib import suppress
from typing import Any

from attrs import define, field

from xtrain.dsl.schema.actions import action_of
from xtrain.planner.plan import Node, Plan, PlanTick
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.execution.node_order import DueTick
from xtrain.runtime.monitoring.heartbeat import LASTING, HeartbeatWriter
from xtrain.runtime.ops import OPS, op_of
from xtrain.runtime.state import Progress, Resources
from xtrain.runtime.step_state import Step, StepCall
from xtrain.runtime.timers import Clocks


@define(eq=False)
class NodeCalls:
    """last_step: the step that has ended last, None before the first and when the run has gone back."""

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
        """Call the op of a node: what it does at once, or the callable that it makes."""
        return op_of(node).bind(node, {**self.resources, "node_id": node.id})()

    def due_tick(self, tick: PlanTick) -> DueTick:
        clock = self.clocks.add(tick.seconds) if tick.seconds is not None else None
        return DueTick(tick, {node: self.call(node) for node in tick.nodes}, clock)

    def call(self, node_id: str) -> StepCall:
        """The callable of a step, tick or event node, made once."""
        if node_id not in self._bound:
            node = self.plan.node(node_id)
            call = op_of(node).bind(node, {**self.resources, "node_id": node_id})()
            call = self._with_hooks(node_id, call)
            self._bound[node_id] = call if node.kind == "step" else self._marked(node, call)
        return self._bound[node_id]

    def _with_hooks(self, node_id: str, call: StepCall) -> StepCall:
        """The call of a node with the hooks before and after it."""
        around = [node for node in self._hooks if node_id in node.args.get("nodes", ())]
        action = action_of(self.plan.node(node_id).op)
        if not around or (action is not None and action.saves):  # a save that is due need not be made: the saver knows
            return call
        before, after = (
            [self.call(node.id) for node in around if node.args["place"].startswith(word)]
            for word in ("before", "after")
        )

        def run(step: Step) -> None:
            for each in (*before, call, *after):
                each(step)

        return run

    def call_hooks(self, place: str, **details: Any) -> None:
        """Call the hooks of a place that no node alone decides about."""
        step = self.last_step or Step(index=max(0, self.progress.step - 1))
        for node in self._hooks:
            if node.args["place"] == place:
                self.beat.at(node.id, lasting=True)
                OPS["event.hook"].bind(node, {**self.resources, "node_id": node.id})()(step, **details)

    def call_failure_hooks(self, error: BaseException) -> None:
        """What goes wrong in them is a warning: the run has failed for another reason."""
        if "optimizer" not in self.resources or "feed" not in self.resources:
            return
        try:
            self.call_hooks("at_failure", failure=error)
        except (Exception, SystemExit) as another:
            with suppress(EnvironmentFault):
                records = self.resources["records"]
                records.warn(f"a hook at_failure: {another}", step=self.progress.step, every_rank=True)

    def _marked(self, node: Node, call: StepCall) -> StepCall:
        """The call with a mark before it; the first time it may take long, as it may compile."""
        action, before = action_of(node.op), False
        lasting = node.op in LASTING if action is None or action.lasting is None else action.lasting
        compiles = action is None or action.lasting is None

        def run(step: Step) -> None:
            nonlocal before
            self.beat.at(node.id, lasting=lasting or (compiles and not before))
            before = True
            call(step)

        return run
