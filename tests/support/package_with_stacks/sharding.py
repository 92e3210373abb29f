"""An execution stack of an installed package: torch's `fully_shard` and nothing beside it."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from attrs import frozen

from xtrain.blocks.op_trace import CollectiveCall
from xtrain.blocks.stage_costs import StageCosts
from xtrain.contracts.stacks import PlannedStack
from xtrain.dsl.schema.parallel import STACKS
from xtrain.plan.graph import Builder
from xtrain.plan.resolved import Resolved
from xtrain.planner.costs.traffic import EXPERTS, FSDP, ROOT, gathers_of, sums_of
from xtrain.planner.graph.parallel import add_fsdp


@STACKS.register()
@frozen
class Sharding(PlannedStack):
    """`stack = sharding`: data ranks shard the model, and there are no other axes."""

    kind = "sharding"
    uses_fsdp = True
    unsupported: ClassVar[Mapping[str, str]] = dict.fromkeys(("tp", "pp", "cp", "ep"), "has no axis but fsdp")
    beside = (FSDP, ROOT, EXPERTS)

    def shard(self, graph: Builder, resolved: Resolved, last: str) -> str:
        return add_fsdp(graph, resolved, last)

    def calls(self, resolved: Resolved, stages: list[StageCosts], pp: int) -> Iterator[tuple[CollectiveCall, int]]:
        yield from gathers_of(resolved, stages, pp)
        yield from sums_of(resolved, stages)
