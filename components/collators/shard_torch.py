"""`shard`: a rank's part of each row."""

from xtrain.dsl.schema.data_components import LOCAL_MICROBATCH, MICROBATCH
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.collate import Stage, local_part
from xtrain.runtime.feed.microbatch import Microbatch


def shard(*, ring: int, ulysses: int, ring_rank: int, ulysses_rank: int) -> Stage:
    """Keep the positions of one context-parallel rank. The stage raises DataError if they are not divisible by the
    ranks."""

    def keep(batch: Microbatch) -> Microbatch:
        return local_part(batch, ring, ulysses, ring_rank, ulysses_rank)

    return Stage(name="shard", takes=MICROBATCH, gives=LOCAL_MICROBATCH, function=keep)


@op("collate.shard", gives="stages")
def append_shard(stages: list[Stage], rank: Rank, ring: int, ulysses: int) -> list[Stage]:
    """Keep this rank's positions of every row: zigzag over the ring, then contiguous over ulysses."""
    at = rank.coordinates
    part = shard(ring=ring, ulysses=ulysses, ring_rank=at["ring"], ulysses_rank=at["ulysses"])
    return [*stages, part]
