"""Where documents lie in a batch, told to the pipeline stages that read no tokens."""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from attrs import frozen

from xtrain.planner.plan import Plan
from xtrain.runtime.data.collate.batch import Microbatch
from xtrain.runtime.data.collate.collators import CollateChain
from xtrain.runtime.data.collate.outline import decode_outline, encode_outline
from xtrain.runtime.parallel.mesh import Meshes
from xtrain.runtime.state import Rank


@frozen(kw_only=True, eq=False)
class Outlines:
    """Who reads rows along a pipeline, and how the others learn of them.

    readers: pipeline coordinates that read. group: the pipeline, None where all its ranks read. rows: of a
    microbatch, [rows, positions] whole. numbers: of rows, that go with it. local_part: what this rank holds of a
    microbatch of whole rows.
    """

    rank: Rank
    readers: list[int]
    group: dist.ProcessGroup | None
    rows: tuple[int, int]
    numbers: tuple[str, ...]
    local_part: Callable[[Microbatch], Microbatch]

    @classmethod
    def of(cls, plan: Plan, collate: CollateChain, rank: Rank, meshes: Meshes) -> "Outlines":
        loader = plan.node("setup.loader").args
        readers = plan.node("step.fetch").args["readers"]
        shared = next((node.args for node in plan.nodes if node.op == "step.share_outline"), {})
        return cls(
            rank=rank,
            readers=readers,
            group=meshes.group("pp") if len(readers) < rank.pipeline_ranks else None,
            rows=(loader["micro"], loader["sequence"]),
            numbers=tuple(shared.get("numbers", ())),
            local_part=collate.local_part,
        )

    @property
    def reads(self) -> bool:
        return self.rank.coordinates["pp"] in self.readers

    def share(self, microbatches: list[Microbatch], count: int) -> list[Microbatch]:
        """The `count` microbatches as they are where they were read, without tokens elsewhere. Collective."""
        if self.group is None:
            return microbatches
        rows, positions = self.rows
        empty_NBS = torch.empty(count, rows, positions + 2 * len(self.numbers), dtype=torch.int32)
        outline_NBS = encode_outline(microbatches, self.numbers) if self.reads else empty_NBS
        outline_NBS = outline_NBS.to(self.rank.device)
        dist.broadcast(outline_NBS, group=self.group, group_src=self.readers[0])
        if self.reads:
            return microbatches
        return [self.local_part(whole) for whole in decode_outline(outline_NBS, self.numbers)]

    def completed(self, microbatches: Iterable[Microbatch], count: int) -> Iterator[Microbatch]:
        """The same for a stream of `count` microbatches, one at a time."""
        reading = iter(microbatches) if self.reads else None
        for _ in range(count):
            yield from self.share([next(reading)] if reading is not None else [], 1)
