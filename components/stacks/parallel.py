"""`stack = parallel`: all axes; the remaining data ranks shard the model with torch's FSDP2."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from xtrain.contracts.stacks import PlannedStack
from xtrain.dsl.schema.parallel import STACKS
from xtrain.lazy_attrs import frozen

if TYPE_CHECKING:
    from xtrain.blocks.op_trace import CollectiveCall
    from xtrain.blocks.stage_costs import StageCosts
    from xtrain.plan.graph import Builder
    from xtrain.plan.resolved import Resolved


@STACKS.register()
@frozen
class ParallelStack(PlannedStack):
    """`stack = parallel`: all axes below; data ranks shard the model with torch's FSDP2."""

    kind = "parallel"
    uses_fsdp = True
    # Not root_fsdp: nothing is computed before it is gathered, nor after its gradients are complete.
    beside = ("setup.parallel.fsdp", "setup.parallel.expert_fsdp")

    # Imported lazily: specs are read without the planner.

    def shard(self, graph: "Builder", resolved: "Resolved", last: str) -> str:
        from xtrain.planner.graph.parallel import add_fsdp

        return add_fsdp(graph, resolved, last)

    def calls(
        self, resolved: "Resolved", stages: list["StageCosts"], pp: int
    ) -> "Iterator[tuple[CollectiveCall, int]]":
        from xtrain.planner.costs.traffic import gathers_of, sums_of

        yield from gathers_of(resolved, stages, pp)
        yield from sums_of(resolved, stages)
