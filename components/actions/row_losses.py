"""`row_losses`: the loss of each row of the step."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS, Action
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.graph import ActionNode, ActionPlace, StepNode

if TYPE_CHECKING:
    from xtrain.dsl.spec import Spec
    from xtrain.plan.resolved import Resolved


@ACTIONS.register()
@frozen
class RowLossesAction(PlannedAction):
    """`row_losses`: the cross-entropy of each row of the step, as an event."""

    kind: ClassVar[str] = "row_losses"
    reads_token_losses = True

    def node(self, resolved: "Resolved", place: ActionPlace) -> ActionNode:
        return ActionNode("tick.row_losses", {}, "write the loss of each row of the step to events.jsonl")

    def misplaced(self, event: str, following: Sequence[Action]) -> tuple[str, str] | None:
        if not event:
            return None
        return "row_losses is measured in a step", "write `every 1 step row_losses`"

    @classmethod
    def in_step(cls, ticks: Sequence[Action], resolved: "Resolved") -> Iterator[StepNode]:
        does = "in steps with row_losses: sum the cross-entropy of each row, with one all-reduce"
        yield StepNode("step.optimizer", "step.row_losses", {}, does)

    def faults(self, event: str, arch: Architecture, spec: "Spec") -> dict[str, tuple[str, str, str]]:
        if arch.has_logits:
            return {}
        return {"": ("X442", "the model has a reward head, whose losses are of pairs", "remove `row_losses`")}
