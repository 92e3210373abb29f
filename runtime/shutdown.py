"""`shutdown.*`: what always runs, however the run ended."""

import torch.distributed as dist

from .feed import Feed
from .ops import op
from .records import Records


@op("shutdown.drain")
def drain(records: Records, feed: Feed | None = None) -> None:
    """Nothing is read any more, and everything that was reported is in its file."""
    if feed is not None:
        feed.close()
    records.close()


@op("shutdown.leave")
def leave() -> None:
    """Wait for the others, then leave the process group."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
