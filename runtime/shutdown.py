"""`shutdown.*`: what always runs, however the run ended."""

import torch.distributed as dist

from .checkpoint.saver import Saver
from .control.signals import StopRequests
from .feed import Feed
from .observation.records import Records
from .ops import op


@op("shutdown.drain")
def drain(records: Records, requests: StopRequests, saver: Saver | None = None, feed: Feed | None = None) -> None:
    """A save that is still being written has its name, nothing is read any more, and all that was reported is in its
    file."""
    if saver is not None:
        saver.drain(requests.deadline_seconds)
    if feed is not None:
        feed.close()
    records.close()


@op("shutdown.leave")
def leave() -> None:
    """Wait for the others, then leave the process group."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
