"""`stack = ddp`: torch's DistributedDataParallel (Li et al. 2020, arXiv 2006.15704)."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Final

from xtrain.blocks.op_trace import CollectiveCall
from xtrain.contracts.stacks import PlannedStack
from xtrain.dsl.schema.parallel import STACKS
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import EMBEDDING
from xtrain.text.units import BYTES, bytes_text, plural

if TYPE_CHECKING:
    from xtrain.blocks.stage_costs import StageCosts
    from xtrain.plan.graph import Builder
    from xtrain.plan.resolved import Resolved

FIRST: Final = 2**20  # torch.nn.parallel.DistributedDataParallel: `_DEFAULT_FIRST_BUCKET_BYTES`, `bucket_cap_mb`
OTHERS: Final = 25 * 2**20
_COPY: Final = "keeps a full replica of the model on every rank"


@STACKS.register()
@frozen
class Ddp(PlannedStack):
    """`stack = ddp`: a whole copy of the model on each rank, synchronized by torch's DistributedDataParallel."""

    kind = "ddp"
    unsupported: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("tp", "pp", "cp", "ep"), _COPY),
        "fsdp": "shards nothing",
        "compute": "computes in the format of the parameters",
        "reduce": "sums gradients in the format of the parameters",
        "reshard": "gathers nothing that reshard could free",
        "prefetch": "gathers nothing that could be gathered early",
        "sync": "sums gradients once a step",
        "offload": "keeps model states where they are used",
    }
    buckets = True
    beside = ("setup.parallel.ddp",)

    def wrap(self, graph: "Builder", resolved: "Resolved", last: str) -> str:
        copy = bytes_text(BYTES[resolved.formats.params] * resolved.inventory.total)
        does = (
            f"a copy of {copy} on each of {plural(resolved.size('replicate'), 'rank')}, gradients summed during "
            "the backward"
        )
        return graph.add("setup", self.node(), does, axes=resolved.wide("replicate"), after=((last, "model"),))

    def calls(self, resolved: "Resolved", stages: list["StageCosts"], pp: int) -> Iterator[tuple[CollectiveCall, int]]:
        if resolved.size("replicate") > 1:
            for size in bucket_sizes(resolved, stages[0]):
                yield CollectiveCall("replicate", "all_reduce", self.node(), size), 1


def bucket_sizes(resolved: "Resolved", stage: "StageCosts") -> list[int]:
    """Return the bytes of every bucket of a step: a small bucket for the first gradients, then larger ones. A bucket is
    full when it has reached its limit. stage: the whole model."""
    width, buckets, filled, limit = BYTES[resolved.formats.params], [], 0, FIRST
    for elements in _as_they_come(resolved, stage):
        filled += elements * width
        if filled >= limit:
            buckets.append(filled)
            filled, limit = 0, OTHERS
    return [*buckets, filled] if filled else buckets


def _as_they_come(resolved: "Resolved", stage: "StageCosts") -> list[int]:
    """Return the sizes of trained parameters in the order in which gradients are ready: from the head to the
    embedding."""
    sizes = {tensor.name: tensor.size for tensor in resolved.inventory.tensors if tensor.trained}
    blocks = [
        f"layers.{block.layer}.{name}"
        for block, _ in reversed(stage.blocks)
        for name in reversed(block.trace.parameters)
    ]
    head = [] if resolved.architecture.tie_embeddings else [f"{resolved.architecture.head_module}.weight"]
    others = [name for name, _ in reversed(resolved.architecture.other_ends)]
    beside = [each.name for each in resolved.architecture.head_adapters()]
    names = [*reversed(beside), *head, *others, *blocks, f"{EMBEDDING}.weight"]
    return [sizes[name] for name in names if name in sizes]
