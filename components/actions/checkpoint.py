"""`checkpoint`: save the full state, from which a run resumes. Retention and format are settings of the `checkpoint`
block."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS, TURN_OF_SAVE, Action
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.graph import ActionNode, ActionPlace
from xtrain.text.units import bytes_text

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved

STATES: Final = {0: "no optimizer state", 1: "the moment", 2: "both moments"}


@ACTIONS.register()
@frozen
class CheckpointAction(PlannedAction):
    """`checkpoint`: save the full state."""

    kind: ClassVar[str] = "checkpoint"
    default_ticks = 20
    default_apart = 100
    turn = TURN_OF_SAVE
    saves = True
    lasting = True
    hooked = "checkpoint"

    def node(self, resolved: "Resolved", place: ActionPlace) -> ActionNode:
        averages = "" if resolved.averages is None else " their average,"
        counts = resolved.moment_counts
        state = STATES.get(max(counts), f"{max(counts)} moments") if len(counts) == 1 else "moments"
        does = f"save weights,{averages} {state} and the data position: {bytes_text(resolved.checkpoint_bytes)}"
        if place.asked:
            does += ", as soon as requested"
        elif place.ends:
            does += ", before the run ends"
        return ActionNode("tick.checkpoint", {"must": place.asked or place.ends}, does)

    @classmethod
    def commands(
        cls, declared: Sequence[Action], spec: Spec, training: tuple[str, ...]
    ) -> Iterator[tuple[str, Action, str]]:
        if spec.checkpoint.enabled:
            yield "save", cls(), ""
