"""`dump`: memory and last microbatches of a rank that fails."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS, FAILURE, Action
from xtrain.dsl.schema.setting import between, cadence_setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.graph import ActionNode, ActionPlace, StepNode
from xtrain.text.units import plural

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


@ACTIONS.register()
@frozen
class Dump(PlannedAction):
    """`dump`: each rank of a failed run writes its memory by category, and its last microbatches.

    The files are in `logs/dump-ATTEMPT/` of the run: `rank-N.md` and `rank-N.json` with planned and held memory,
    `rank-N.pickle` with the segments of a GPU's allocator, and `rank-N.pt` for `torch.load`: the failure, and by step
    the tensors of each microbatch.
    """

    kind: ClassVar[str] = "dump"
    example = "on failure {}"
    alone = True
    writes_beside = True

    batches: int = cadence_setting(
        "steps whose microbatches are written: the running step and those before it; 0: none",
        default=2,
        check=between(0, 1000),
    )

    def node(self, resolved: "Resolved", place: ActionPlace) -> ActionNode:
        does = "write the memory of each rank by category"
        does += f", and its microbatches of the last {plural(self.batches, 'step')}" if self.batches else ""
        return ActionNode("tick.dump", {"batches": self.batches}, does)

    @classmethod
    def in_step(cls, ticks: Sequence[Action], resolved: "Resolved") -> Iterator[StepNode]:
        most = max((action.batches for action in ticks if isinstance(action, cls)), default=0)
        if most:
            does = f"hold the microbatches of the last {plural(most, 'step')}, to write them if the run fails"
            yield StepNode("step.agree", "step.dump", {"batches": most}, does)

    def misplaced(self, event: str, following: Sequence[Action]) -> tuple[str, str] | None:
        if event == FAILURE:
            return None
        return "dump describes a rank that fails", "write `on failure dump`; elsewhere use `memory_snapshot`"
