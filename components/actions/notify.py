"""`notify("COMMAND")`: notification by a user's command."""

from typing import TYPE_CHECKING, ClassVar, Final

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS
from xtrain.lazy_attrs import frozen
from xtrain.plan.graph import ActionNode, ActionPlace
from xtrain.text.units import seconds_text

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved

# Time limit of a command in seconds.
LIMIT: Final = 30.0


@ACTIONS.register()
@frozen
class Notify(PlannedAction):
    """`notify("COMMAND")`: a shell command that rank 0 runs in the background; training does not wait for it.

    Environment variables describe the event: `XTRAIN_ALERT`, `XTRAIN_MESSAGE`, `XTRAIN_RUN`, `XTRAIN_STEP` and more.
    The value of `env("NAME")` is read where the command runs: plans, events and messages contain `env(NAME)`.
    """

    kind: ClassVar[str] = "notify"
    called = True
    example = "on finish {}"
    informs = True
    alone = True
    hands_on = True

    command: str

    def node(self, resolved: "Resolved", place: ActionPlace) -> ActionNode:
        command = str(self.command)
        short = command if len(command) <= 40 else f"{command[:39]}…"
        does = " ".join(f"run `{short}` during training, for at most {seconds_text(LIMIT)}".split())
        return ActionNode("tick.notify", {"command": command, "limit_seconds": LIMIT}, does)
