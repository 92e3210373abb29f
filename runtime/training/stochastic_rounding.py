"""Weights in bf16 rounded up or down at random, with the probability of how near each is: right on average.

What is drawn for an element depends on the seed of the run, the step, the name of the parameter and the place of the
element in the whole parameter, so that every layout, and a run that goes on, rounds alike.
"""

from collections.abc import Iterable
from math import prod

import torch
from attrs import define, field
from torch import Tensor

from xtrain.runtime.models.splitmix import shifted, splitmix64, stream_of
from xtrain.runtime.parallel.tensor import start_of
from xtrain.runtime.state import Progress


@define(eq=False)
class StochasticRounding:
    """parameters: those whose weights are rounded, by name. progress: knows the step."""

    parameters: Iterable[tuple[str, Tensor]]
    seed: int
    progress: Progress
    _places: dict[int, tuple[str, tuple[int, ...], tuple[int, ...]]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._places = {id(each): (name, tuple(each.shape), start_of(each)) for name, each in self.parameters}

    def write(self, parameter: Tensor, first: int, piece: Tensor, value: Tensor) -> None:
        """Round `value`, in fp32, into `piece`: rows of this rank's piece of a parameter, from its row `first` on."""
        name, shape, start = self._places[id(parameter)]
        place_RC = _places(shape, (start[0] + first, *start[1:]), piece.shape, piece.device)
        piece.copy_(rounded(value, random_bits(place_RC, stream_of(f"{self.seed}:{self.progress.step}:{name}"))))


def rounded(value: Tensor, bits: Tensor) -> Tensor:
    """fp32 → bf16 as fp32: up where the lower half of a number and 16 random bits, of int32, carry into the upper."""
    upper = ((value.view(torch.int32) + bits) & -0x10000).view(torch.float32)
    return torch.where(value.isfinite(), upper, value).to(torch.bfloat16)


def random_bits(place: Tensor, key: int) -> Tensor:
    """16 bits, as int32, for each number of int64."""
    return shifted(splitmix64(place, key), 48).to(torch.int32)


def _places(shape: tuple[int, ...], start: tuple[int, ...], extent: torch.Size, device: torch.device) -> Tensor:
    """The place of each element of a box in the flattened whole. shape: of the whole."""
    found = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (begin, length) in enumerate(zip(start, extent, strict=True)):
        along = torch.arange(begin, begin + length, device=device) * prod(shape[dim + 1 :])
        found = found + along.view(-1, *(1 for _ in range(len(shape) - dim - 1)))
    return found
