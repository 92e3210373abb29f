"""`setup.base`: what is not trained, named by its content, so that a checkpoint of an adapter is never put on another.

Of a tensor X with indices i, j, … the sum is Σ bits(X[i, j, …]) · u_i · v_j · … modulo 2^64, with odd weights u, v
drawn from the name of the tensor. It is a sum over elements, so ranks add up their own pieces, whatever the layout. The
bits are those of the value as fp32: bf16, fp16 and fp32 of the same values have the same sum.
"""

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Final

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from xtrain.planner.graph.checkpoint_fit import base_sizes
from xtrain.planner.plan import Plan
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.models.splitmix import splitmix64, stream_of
from xtrain.runtime.models.tensors import model_tensors, own_indices
from xtrain.runtime.monitoring.heartbeat import HeartbeatWriter
from xtrain.runtime.ops import op
from xtrain.runtime.parallel.collective_errors import CollectiveErrors
from xtrain.runtime.parallel.tensor import local
from xtrain.runtime.state import Rank

# Numbers of a tensor that are looked at at a time: their bits as int64 stay in a cache of a CPU.
CHUNK: Final = 2**18
DIGEST_BYTES: Final = 8
MASK: Final = 2**64 - 1
# Odd multipliers of the parts of a number in fp64.
_PARTS: Final = (1, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@frozen(kw_only=True)
class TensorSum:
    """What a rank has of a tensor. numbers: how many; sum: theirs, not negative."""

    numbers: int
    sum: int


def piece_of(name: str, tensor: Tensor, report: Callable[[], None] = lambda: None) -> TensorSum:
    """The sum of this rank's piece of a tensor, which is cut as it is itself."""
    piece = local(tensor)
    if piece.numel() == 0:
        return TensorSum(numbers=0, sum=0)
    rows, columns = _weights(name, tensor, piece.device)
    matrix, total = piece.reshape(-1, piece.shape[-1] if piece.ndim else 1), 0
    each = max(1, CHUNK // matrix.shape[1])
    for begin in range(0, matrix.shape[0], each):
        part, weights = matrix[begin : begin + each], rows[begin : begin + each]
        for multiplier, bits in zip(_PARTS, _bits(part), strict=False):
            total += multiplier * int((bits.mul_(columns).sum(1) * weights).sum().item())
        report()
    return TensorSum(numbers=piece.numel(), sum=total & MASK)


def digest_of(sums: Mapping[str, int]) -> str:
    """One name for tensors with these sums."""
    content = "".join(f"{name}\0{sums[name]:016x}\n" for name in sorted(sums))
    return blake2b(content.encode(), digest_size=DIGEST_BYTES).hexdigest()


def _bits(part: Tensor) -> list[Tensor]:
    """int64, new: the bits of every number; of fp64 those of three numbers in fp32 that add up to it."""
    if not part.dtype.is_floating_point:
        return [part.to(torch.int64, copy=True)]
    found = []
    for _ in range(3 if part.dtype == torch.float64 else 1):
        rounded = part.to(torch.float32)
        found.append(rounded.contiguous().view(torch.int32).to(torch.int64))
        part = part - rounded
    return found


def _weights(name: str, tensor: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [R], [C]: of the rows and columns of this rank's piece, dimensions before the last being rows."""
    dims = [_drawn(own_indices(tensor, dim), f"{name}:{dim}") for dim in range(tensor.ndim)]
    columns = dims.pop() if dims else torch.ones(1, dtype=torch.int64)
    rows = torch.ones(1, dtype=torch.int64)
    for weights in dims:
        rows = (rows[:, None] * weights).flatten()
    return rows.to(device), columns.to(device)


def _drawn(indices: Tensor, seed: str) -> Tensor:
    """int64, odd: one for each index."""
    return splitmix64(indices.to(torch.int64), stream_of(seed)) | 1


@op("setup.base", gives="base")
def name_base(plan: Plan, model: ModelParts, rank: Rank, beat: HeartbeatWriter, parameters: int) -> str:
    """The digest of all that is not trained. Collective: every rank looks at its own pieces, and the sums are added.

    What several ranks have is counted on each, and so many times over in the sum of all.
    """
    sizes, own = base_sizes(plan), model_tensors(model, "")
    names = sorted(sizes)
    pieces = [piece_of(name, own[name], beat.mark) if name in own else TensorSum(numbers=0, sum=0) for name in names]
    # In halves, so that no sum over ranks is too large for int64.
    counts = torch.tensor([[each.numbers, each.sum >> 32, each.sum & (2**32 - 1)] for each in pieces])
    group = CollectiveErrors.of(rank).group
    if group is not None:
        dist.all_reduce(counts, group=group)
    sums: dict[str, int] = {}
    for name, (numbers, high, low) in zip(names, counts.tolist(), strict=True):
        times, rest = divmod(numbers, sizes[name])
        assert times and not rest, f"{name}: {numbers:,} numbers are in pieces of ranks, and it has {sizes[name]:,}"
        sums[name] = ((high << 32) + low) // times & MASK
    return digest_of(sums)
