"""What an action becomes in a plan, and where it stands."""

from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from xtrain.dsl.schema.actions import ENDINGS

if TYPE_CHECKING:
    from xtrain.planner.resolved import Resolved

# The event that the nodes of `xtrain control` are of.
CONTROL: Final = "control"


@frozen(kw_only=True)
class ActionPlace:
    """Where an action stands. event: "" of a tick. stops: the run stops behind it."""

    event: str = ""
    stops: bool = False

    @property
    def ends(self) -> bool:
        """Whether the run has no step behind it."""
        return self.stops or self.event in ENDINGS

    @property
    def asked(self) -> bool:
        """Whether it is a command of `xtrain control`."""
        return self.event == CONTROL


@frozen
class ActionNode:
    """op, arguments, what it does. name: the id in a tick, where the op does not say enough. after: (node, what is
    taken from it)."""

    op: str
    args: dict[str, Any]
    does: str
    name: str = ""
    after: tuple[tuple[str, str], ...] = ()


@frozen
class StepNode:
    """A node of every step that an action needs, right before the one that `before` names: what the step has come to
    is seen there, or what the action works with is taken."""

    before: str
    op: str
    args: dict[str, Any]
    does: str


def averaged_weights(run: "Resolved") -> tuple[dict[str, Any], str]:
    """Whose weights evaluations and texts are of: an argument of their nodes, and words, both empty where it is those
    that are trained."""
    averaged = run.spec.ema is not None and run.spec.ema.eval
    return ({"averaged": True}, ", of the averaged weights") if averaged else ({}, "")
