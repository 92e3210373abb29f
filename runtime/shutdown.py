"""`shutdown.*`: what always runs, however the run ended."""

import torch.distributed as dist

from .ops import op
from .records import Records


@op("shutdown.drain")
def drain(records: Records) -> None:
    """Everything that was reported is in its file."""
    records.close()


@op("shutdown.leave")
def leave() -> None:
    """Wait for the others, then leave the process group."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
