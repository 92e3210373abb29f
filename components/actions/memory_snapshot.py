"""`memory_snapshot`: a snapshot of a rank's memory."""

from typing import TYPE_CHECKING, ClassVar, Literal

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.schema.actions import ACTIONS
from xtrain.dsl.schema.setting import AUTO, Auto, between, cadence_setting
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.graph import ActionNode, ActionPlace, RecordedRanks, ranks_setting
from xtrain.text.units import plural

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


@ACTIONS.register()
@frozen
class MemorySnapshot(PlannedAction):
    """`memory_snapshot`: memory of a rank by category, compared with the plan."""

    kind: ClassVar[str] = "memory_snapshot"
    writes_beside = True

    ranks: int | Literal["first", "all"] | Auto = ranks_setting("write a snapshot")
    history: int | Auto = cadence_setting(
        "steps for which allocations on a GPU are recorded before the snapshot; auto: 1 on a GPU",
        default=AUTO,
        check=between(0, 100),
        example="2",
    )

    def node(self, resolved: "Resolved", place: ActionPlace) -> ActionNode:
        """Return the plan node. At the end of a run there are no following steps to record."""
        recorded, history = RecordedRanks.of(self.ranks, resolved), 0 if place.ends else self.length(resolved.spec)
        watched = f", after {plural(history, 'step')} of recorded GPU allocations" if history else ""
        does = f"memory snapshot of {recorded.text}, compared with the plan{watched}"
        return ActionNode("tick.memory_snapshot", {"ranks": recorded.ranks, "history": history}, does)

    def length(self, spec: Spec) -> int:
        """Return the number of steps of allocator history. A CPU has no allocator history."""
        if _on_cpu(spec):
            return 0
        return 1 if isinstance(self.history, Auto) else self.history

    def needs_steps(self) -> tuple[str, str] | None:
        if isinstance(self.history, Auto) or not self.history:
            return None
        return "history", "write `memory_snapshot` without `history`"

    def idle(self, spec: Spec, ranks: int) -> dict[str, tuple[str, str]]:
        if not _on_cpu(spec) or self.history in (0, AUTO):
            return {}
        return {"history": ("only a GPU's allocator can record its allocations", "remove it")}


def _on_cpu(spec: Spec) -> bool:
    from xtrain.plan.mesh import device_kind

    return device_kind(spec) == "cpu"
