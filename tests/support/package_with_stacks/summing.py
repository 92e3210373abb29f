"""An execution stack of an installed package: copies of what tensor parallel leaves, their gradients summed one by
one."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import ClassVar

from attrs import frozen

from xtrain.blocks.op_trace import CollectiveCall
from xtrain.blocks.stage_costs import StageCosts
from xtrain.contracts.stacks import PlannedStack
from xtrain.dsl.schema.parallel import STACKS
from xtrain.plan.graph import Builder
from xtrain.plan.resolved import Resolved
from xtrain.text.units import BYTES, plural


@STACKS.register()
@frozen
class Summing(PlannedStack):
    """`stack = summing`: a copy of the model on each data rank, every gradient summed by itself."""

    kind = "summing"
    unsupported: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("pp", "cp", "ep"), "has copies and tensor parallel alone"),
        "fsdp": "shards nothing",
        "compute": "computes in the format of the parameters",
        "reduce": "sums gradients in the format of the parameters",
        "reshard": "gathers nothing that reshard could free",
        "sync": "sums gradients once a step",
        "offload": "keeps model states where they are used",
    }
    resuming: ClassVar[Mapping[str, str]] = {"tensors": "as many sums as there are parameters"}

    def wrap(self, graph: Builder, resolved: Resolved, last: str) -> str:
        args = {"tensors": len(resolved.inventory.tensors)}
        does = f"{args['tensors']} gradients are summed one by one over {plural(resolved.size('replicate'), 'rank')}"
        return graph.add(
            "setup", self.node(), does, args=args, axes=resolved.wide("replicate"), after=((last, "model"),)
        )

    def calls(self, resolved: Resolved, stages: list[StageCosts], pp: int) -> Iterator[tuple[CollectiveCall, int]]:
        if resolved.size("replicate") > 1:
            for tensor in resolved.inventory.tensors:
                size = prod(resolved.cuts.shape(tensor)) * BYTES[resolved.formats.params]
                yield CollectiveCall("replicate", "all_reduce", self.node(), size), 1
