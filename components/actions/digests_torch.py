"""`tick.digests`: digests of whole tensors from the shards of ranks, with one all-reduce.

A digest is two sums over the elements of a tensor, modulo the prime 2^31 − 1, of hashes of an element's bits and its
place in the whole tensor. So it does not depend on the layout. A rank adds the hashes of its shard divided, modulo the
prime, by the number of ranks with the same shard. Copies that differ change the digest.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.plan.plan import Plan
from xtrain.records.training_events import DigestsEvent
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.nn.axes import local
from xtrain.runtime.nn.batch import Step, StepCall
from xtrain.runtime.nn.gradients import copies_of
from xtrain.runtime.nn.transformer import ModelParts, QuantisedParameter
from xtrain.runtime.nn.weights import own_indices, places_of, values_of
from xtrain.runtime.observe.records import Records

PRIME: Final = 2**31 - 1
AT_ONCE: Final = 1 << 20
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@op("tick.digests")
def digests(plan: Plan, model: ModelParts, rank: Rank, progress: Progress, records: Records) -> StepCall:
    """Write the digests of parameters and of gradients as the optimizer took them. Before the first trained step of a
    start there are no gradients. Collective."""
    tensors = plan.parameters.tensors
    names = [*(tensor.name for tensor in tensors), *(tensor.name for tensor in tensors if tensor.trained)]
    place = {name: number for number, name in enumerate(names[: len(tensors)])}
    place_of_gradient = {name: number for number, name in enumerate(names) if number >= len(tensors)}

    @torch.no_grad()
    def write(step: Step) -> None:
        sums_2N = torch.zeros(2, len(names), dtype=torch.int64)
        stored = {each.name: each for each in model.quantised()}
        named = [*model.named_parameters()]
        for (name, parameter), copies in zip(named, copies_of(model, rank, trained=False), strict=True):
            piece = values_of(stored[name]) if name in stored else local(parameter)
            _add(sums_2N[:, place[name]], piece, *_indices(stored.get(name, parameter)), copies)
        trained = [*model.trained()]
        known = all(parameter.grad is not None for _, parameter in trained)
        for (name, parameter), copies in (
            zip(trained, copies_of(model, rank, trained=True), strict=True) if known else ()
        ):
            assert parameter.grad is not None
            _add(sums_2N[:, place_of_gradient[name]], local(parameter.grad), *_indices(parameter), copies)
        if rank.world_size > 1:
            sums_2N = sums_2N.to(rank.device)
            dist.all_reduce(sums_2N)
        found = [f"{high % PRIME:08x}{low % PRIME:08x}" for high, low in sums_2N.T.tolist()]
        records.event(
            DigestsEvent(
                step=progress.step,
                parameters=dict(zip(names[: len(tensors)], found, strict=False)),
                gradients=dict(zip(names[len(tensors) :], found[len(tensors) :], strict=True)) if known else {},
            )
        )

    return write


def _indices(whole: QuantisedParameter | Tensor) -> tuple[Sequence[int], list[Tensor]]:
    """Return the shape of a whole tensor, and the indices of each dimension that this rank has."""
    if isinstance(whole, QuantisedParameter):
        return places_of(whole)
    return whole.shape, [own_indices(whole, dim) for dim in range(whole.ndim)]


def _add(sums_2: Tensor, piece: Tensor, shape: Sequence[int], indices: list[Tensor], copies: int) -> None:
    """Add the hashes of a rank's piece of a tensor of this shape. indices: of each dimension that the piece has."""
    total_2 = sum((part.cpu() for part in hashes(piece, shape, indices)), torch.zeros(2, dtype=torch.int64))
    share = pow(copies, -1, PRIME)
    sums_2 += torch.tensor([int(total) % PRIME * share % PRIME for total in total_2])


def hashes(piece: Tensor, shape: Sequence[int], indices: list[Tensor]) -> Iterator[Tensor]:
    """Yield sums of the hashes of up to `AT_ONCE` elements each, int64 [2], below 2^51."""
    if not piece.numel():
        return
    device = piece.device
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    bits_E = piece.contiguous().view(-1).view(_INTEGERS[piece.element_size()])
    places = [own.to(device) * stride for own, stride in zip(indices, strides, strict=True)]
    inner = [prod(piece.shape[dim + 1 :]) for dim in range(piece.ndim)]
    for first in range(0, len(bits_E), AT_ONCE):
        bits_e = bits_E[first : first + AT_ONCE].long()
        number_e = torch.arange(first, first + len(bits_e), device=device)
        place_e = torch.zeros_like(number_e)
        for own, size, each in zip(places, piece.shape, inner, strict=True):
            place_e += own[number_e.div(each, rounding_mode="floor") % size]
        # Products wrap around. The mixer of SplitMix64 (Steele et al. 2014), with arithmetic shifts.
        mixed_e = bits_e * -7046029254386353131 + (place_e + 1) * -4417276706812531889
        mixed_e = (mixed_e ^ (mixed_e >> 30)) * -4658895280553007687
        mixed_e = (mixed_e ^ (mixed_e >> 27)) * -7723592293110705685
        mixed_e = mixed_e ^ (mixed_e >> 31)
        yield torch.stack([((mixed_e >> 32) & PRIME).sum(), (mixed_e & PRIME).sum()])
