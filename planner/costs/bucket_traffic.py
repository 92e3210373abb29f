"""How DistributedDataParallel puts gradients together: what is ready first in a small bucket, the rest in larger."""

from typing import Final

from ..architecture import EMBEDDING, HEAD
from ..model.inventory import block_tensors
from ..resolved import Resolved
from ..units import BYTES

FIRST: Final = 2**20  # torch.nn.parallel.DistributedDataParallel: `_DEFAULT_FIRST_BUCKET_BYTES`, `bucket_cap_mb`
OTHERS: Final = 25 * 2**20

# The order in which a block uses its parameters; gradients are ready in the opposite one.
USES: Final = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.q_norm",
    "self_attn.k_proj",
    "self_attn.k_norm",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate.",
    "mlp.experts.gate_proj",
    "mlp.experts.up_proj",
    "mlp.experts.down_proj",
    "mlp.shared_experts.gate_proj",
    "mlp.shared_experts.up_proj",
    "mlp.shared_experts.down_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def bucket_sizes(run: Resolved) -> list[int]:
    """Bytes of every bucket of a step. A bucket is full when it has reached its limit."""
    width, buckets, filled, limit = BYTES[run.formats.params], [], 0, FIRST
    for elements in _as_they_come(run):
        filled += elements * width
        if filled >= limit:
            buckets.append(filled)
            filled, limit = 0, OTHERS
    return [*buckets, filled] if filled else buckets


def _as_they_come(run: Resolved) -> list[int]:
    """Elements of all parameters in the order in which their gradients are ready: from the head to the embedding."""
    sizes = {tensor.name: tensor.size for tensor in run.inventory.tensors}
    block = {tensor.name.removeprefix("layers.0."): tensor.size for tensor in block_tensors(run.inventory)}
    used = sorted(block, key=lambda name: next(place for place, use in enumerate(USES) if name.startswith(use)))
    head = [sizes[f"{HEAD}.weight"]] if f"{HEAD}.weight" in sizes else []
    blocks = [block[name] for name in reversed(used)] * run.architecture.layers
    return [*head, sizes["norm.weight"], *blocks, sizes[f"{EMBEDDING}.weight"]]
