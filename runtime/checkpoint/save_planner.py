"""`CachedSavePlanner`: which rank writes which piece of which tensor, planned again only when a tensor has changed."""

from typing import Any

from attrs import frozen
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from xtrain.runtime.parallel.collective_errors import CollectiveErrors

# Stands for the plan of a rank that all know already.
UNCHANGED = SavePlan([], usable=False)


@frozen(eq=False)
class _Planned:
    """Of the last save: what this rank has proposed, what the first rank made of it, and, there, the metadata."""

    proposed: SavePlan
    final: SavePlan
    metadata: Metadata | None


class CachedSavePlanner(DefaultSavePlanner):
    """Plans of the saves of a run. The first rank divides replicated tensors among the ranks that have them, and checks
    that the pieces are whole tensors: while names, shapes and placements are those of the last save on all ranks, so is
    its outcome, and ranks send it nothing.

    torch has such a cache, in variables of the class: after a save that failed on a few ranks, ranks differ in what
    they have in theirs. This one is of a save that succeeded on all ranks, or is empty on all.
    """

    def __init__(self) -> None:
        super().__init__(flatten_sharded_tensors=False)
        self._last: _Planned | None = None
        self._again = False
        self._metadata: Metadata | None = None
        self._proposed = self._final = UNCHANGED

    def begin(self, tensors: dict[str, Any], collective: CollectiveErrors) -> None:
        """Before a save of `tensors`. Collective."""
        super().set_up_planner(tensors, is_coordinator=collective.rank == 0)
        self._proposed = super().create_local_plan()
        known = self._last is not None and self._last.proposed == self._proposed
        self._again = all(collective.all(lambda: known))

    def end(self, *, saved: bool) -> None:
        """After a save. saved: whether it succeeded, the same on all ranks."""
        self._last = _Planned(self._proposed, self._final, self._metadata) if saved else None
        self.state_dict = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """`begin` has been told the tensors."""

    def create_local_plan(self) -> SavePlan:
        return UNCHANGED if self._again else self._proposed

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self._again:
            assert self._metadata is not None
            return all_plans, self._metadata
        plans, self._metadata = super().create_global_plan(all_plans)
        return plans, self._metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if not self._again:
            self._final = new_plan
        return self._final
