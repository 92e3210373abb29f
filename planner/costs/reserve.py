"""Memory that no tensor of the program has: what libraries take, and what the allocator cannot use."""

from typing import Final

from ..mesh.cluster import device_kind
from ..resolved import Resolved

CONTEXT: Final = 2**29 + 2**28  # CUDA's context and the workspaces of cuBLAS
COMMUNICATOR: Final = 2**28  # NCCL's buffers for one group of ranks
FRAGMENTED: Final = 0.04  # of what is alive at the peak, in blocks that are too small or at the wrong place


def reserve_of(run: Resolved, peak: int) -> int:
    """Bytes on a CUDA device beside the `peak` of what is alive; 0 where the device is no CUDA device, or not known."""
    if device_kind(run.spec) != "cuda":
        return 0
    axes = run.wide("pp", "replicate", "fsdp", "ring", "ulysses", "tp")
    groups = len(axes) + (len(axes) > 1)  # and all ranks
    if run.architecture.is_moe:
        groups += len(run.wide("ep_replicate", "ep_fsdp", "ep"))
    return CONTEXT + groups * COMMUNICATOR + int(FRAGMENTED * peak)
