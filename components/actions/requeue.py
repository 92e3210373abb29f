"""`requeue`: put the job back into Slurm's queue."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS, ENDINGS, Action
from xtrain.lazy_attrs import frozen
from xtrain.plan.graph import ActionNode, ActionPlace

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved

USUAL: Final = "on sigusr1 checkpoint then requeue then stop"


@ACTIONS.register()
@frozen
class Requeue(PlannedAction):
    """`requeue`: ask Slurm to requeue the job; the run then resumes from its last checkpoint."""

    kind: ClassVar[str] = "requeue"
    example = "on sigusr1 {} then stop"

    def node(self, resolved: "Resolved", place: ActionPlace) -> ActionNode:
        return ActionNode("event.requeue", {}, "ask Slurm to restart the job; warn without Slurm")

    def misplaced(self, event: str, following: Sequence[Action]) -> tuple[str, str] | None:
        """Return the problem if this action is not last where the run stops."""
        if not event:
            return "a tick has the action requeue, but a job is requeued when its run stops", f"write `{USUAL}`"
        if event not in ENDINGS:
            message = f"on {event} has the action requeue, but a job is requeued when its run stops"
            return message, "remove it, as in `on disk checkpoint then stop`"
        last = f"write it last, as in `{USUAL}`"
        if event == "finish":
            return "on finish has the action requeue, but a finished run has nothing left to train", last
        if any(not isinstance(action, Requeue) and not action.stops for action in following):
            return f"on {event}: other actions follow requeue, and Slurm ends the job as soon as it is asked", last
        return None
