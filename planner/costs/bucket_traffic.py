"""How DistributedDataParallel puts gradients together: what is ready first in a small bucket, the rest in larger."""

from typing import Final

from ..architecture import EMBEDDING, HEAD
from ..model.inventory import block_tensors
from ..resolved import Resolved
from ..units import BYTES
from .op_trace import OpTrace

FIRST: Final = 2**20  # torch.nn.parallel.DistributedDataParallel: `_DEFAULT_FIRST_BUCKET_BYTES`, `bucket_cap_mb`
OTHERS: Final = 25 * 2**20


def bucket_sizes(run: Resolved, block: OpTrace) -> list[int]:
    """Bytes of every bucket of a step. A bucket is full when it has reached its limit. block: the trace of one."""
    width, buckets, filled, limit = BYTES[run.formats.params], [], 0, FIRST
    for elements in _as_they_come(run, block):
        filled += elements * width
        if filled >= limit:
            buckets.append(filled)
            filled, limit = 0, OTHERS
    return [*buckets, filled] if filled else buckets


def _as_they_come(run: Resolved, trace: OpTrace) -> list[int]:
    """Elements of all parameters in the order in which their gradients are ready: from the head to the embedding."""
    sizes = {tensor.name: tensor.size for tensor in run.inventory.tensors}
    block = {tensor.name.removeprefix("layers.0."): tensor.size for tensor in block_tensors(run.inventory)}
    head = [sizes[f"{HEAD}.weight"]] if f"{HEAD}.weight" in sizes else []
    blocks = [block[name] for name in reversed(trace.parameters)] * run.architecture.layers
    return [*head, sizes["norm.weight"], *blocks, sizes[f"{EMBEDDING}.weight"]]
