"""`notify("COMMAND")`: somebody is told, by a command of the user's own."""

from typing import TYPE_CHECKING, ClassVar, Final

from attrs import frozen

from ...dsl.schema.actions import ACTIONS, Action
from ...planner.graph.action_node import ActionNode, ActionPlace
from ...planner.units import seconds_text

if TYPE_CHECKING:
    from ...planner.resolved import Resolved

# Seconds that a command may take.
LIMIT: Final = 30.0


@ACTIONS.register()
@frozen
class Notify(Action):
    """`notify("COMMAND")`: a shell command that rank 0 runs in the background; training does not wait for it.

    What it is about is in its environment: `XTRAIN_ALERT`, `XTRAIN_MESSAGE`, `XTRAIN_RUN`, `XTRAIN_STEP` and more.
    """

    kind: ClassVar[str] = "notify"
    called = True
    example = "on finish {}"
    informs = True

    command: str

    def node(self, run: "Resolved", place: ActionPlace) -> ActionNode:
        shown = self.command if len(self.command) <= 40 else f"{self.command[:39]}…"
        does = " ".join(f"run `{shown}` beside training, for {seconds_text(LIMIT)} at most".split())
        return ActionNode("tick.notify", {"command": self.command, "limit_seconds": LIMIT}, does)
