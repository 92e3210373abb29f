"""Element-wise updates: number formats, stochastic rounding, and updates compiled into one kernel for each tensor.

A rule is the formula of an optimizer. On a CPU its operations run one after the other, some rows at a time if numbers
are converted. On CUDA `torch.compile` fuses the conversions, the rule and the rounding: AdamW with stochastic rounding
moves 14 bytes a parameter in one kernel, instead of 410 in 175.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Protocol

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch._dynamo import config

from xtrain.plan.groups import rows_at_once
from xtrain.runtime.base.state import Progress
from xtrain.runtime.nn.axes import start_of
from xtrain.runtime.nn.layers import shifted, splitmix64, stream_of


def wide(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Convert to the format of an update of `parameter`, fp32 or finer."""
    return tensor.to(torch.promote_types(parameter.dtype, torch.float32))


def row_ranges(tensor: Tensor) -> Iterator[slice]:
    """Return the row ranges of a shard that are updated at once; a shard without rows has one empty range."""
    rows = rows_at_once(tensor.shape)
    return (slice(first, first + rows) for first in range(0, max(1, tensor.shape[0]), rows))


Box = tuple[tuple[int, ...], tuple[int, ...], int]
"""Place of a shard for its random bits: shape of the whole parameter, offset of the shard, and key of the stream."""


@define(eq=False)
class StochasticRounding:
    """Stochastic rounding of weights. parameters: the rounded ones, by name. progress: has the step."""

    parameters: Iterable[tuple[str, Tensor]]
    seed: int
    progress: Progress
    _places: dict[int, tuple[str, tuple[int, ...], tuple[int, ...]]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._places = {id(p): (name, tuple(p.shape), start_of(p)) for name, p in self.parameters}

    def box(self, parameter: Tensor, first: int = 0) -> Box:
        """Return the place of a rank's shard of a parameter, from the row `first` of the shard on, in this step."""
        name, shape, start = self._places[id(parameter)]
        return shape, (start[0] + first, *start[1:]), stream_of(f"{self.seed}:{self.progress.step}:{name}")


def round_into(piece: Tensor, value: Tensor, box: Box) -> None:
    """Round `value`, in fp32, into `piece`, the rows of a shard that begin at the box's start."""
    shape, start, key = box
    piece.copy_(rounded(value, random_bits(_places(shape, start, piece.shape, piece.device), key)))


def rounded(value: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 to bf16: up if the lower half of a number plus 16 random bits, as int32, carry into the upper half."""
    upper = ((value.view(torch.int32) + bits) & -0x10000).view(torch.float32)
    return torch.where(value.isfinite(), upper, value).to(torch.bfloat16)


def random_bits(place: Tensor, key: int) -> Tensor:
    """Return 16 random bits, as int32, for each int64 number."""
    return shifted(splitmix64(place, key), 48).to(torch.int32)


def _places(shape: tuple[int, ...], start: tuple[int, ...], extent: torch.Size, device: torch.device) -> Tensor:
    """Return the index of each element of a box in the flattened whole. shape: of the whole."""
    places = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (begin, length) in enumerate(zip(start, extent, strict=True)):
        along = torch.arange(begin, begin + length, device=device) * prod(shape[dim + 1 :])
        places = places + along.view(-1, *(1 for _ in range(len(shape) - dim - 1)))
    return places


Number = float | Tensor
"""A scalar of an update; a tensor [] where the update is compiled, so that another value does not compile it again."""
Numbers = Mapping[str, Number]


def decay_cautiously(weights: Tensor, updates: Tensor, share: Number) -> None:
    """Decay weights, w ← w − share · w, where `updates`, which will be subtracted, do not move them away from 0 (Chen
    et al. 2025, arXiv 2510.12402)."""
    if isinstance(share, Tensor):
        weights.mul_(1 - (weights.sign() * updates.sign() >= 0).to(weights.dtype) * share)
        return
    for rows in row_ranges(weights):
        weight, update = weights[rows], updates[rows]
        toward_zero = (weight.sign() * update.sign() >= 0).to(weight.dtype)
        weight.mul_(toward_zero.mul_(-share).add_(1))


def decay(weights: Tensor, updates: Tensor, by: Numbers, *, cautious: bool) -> None:
    """Decay weights by the share `decay`; `keep` is 1 - `decay`. updates: will be subtracted."""
    share, keep = by["decay"], by["keep"]
    if not isinstance(share, Tensor) and share == 0:
        return
    if cautious:
        decay_cautiously(weights, updates, share)
    else:
        weights.mul_(keep)


def add_scaled(target: Tensor, addend: Tensor, factor: Number) -> None:
    """Add `factor` · addend in place."""
    if isinstance(factor, Tensor):
        target.add_(addend * factor)
    else:
        target.add_(addend, alpha=factor)


class UpdateRule(Protocol):
    """Formula of an element-wise optimizer, on numbers in fp32 or finer."""

    def __call__(
        self, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], count: Tensor | None, by: Numbers
    ) -> None:
        """Update a weight and its moments in place. count: of updates, with this one. by: the optimizer's numbers."""
        ...


@frozen(eq=False)
class MomentFormat:
    """Storage format of a moment. load: returns it in the format of an update of a weight. store: puts it back."""

    load: Callable[[Sequence[Tensor], Tensor], Tensor]
    store: Callable[[Sequence[Tensor], Tensor], None]


def _load(stored: Sequence[Tensor], weight: Tensor) -> Tensor:
    return wide(stored[0], weight)


def _store(stored: Sequence[Tensor], value: Tensor) -> None:
    if stored[0].dtype != value.dtype:  # otherwise the update was in place
        stored[0].copy_(value)


PLAIN = MomentFormat(_load, _store)

# Variants of one compiled update: numbers of dims, formats, extents of 1. torch's own limit is 8.
MOST_VARIANTS = 64


def compiled_update(update: Callable[..., Any]) -> Callable[..., Any]:
    """Return an update compiled for tensors of any shape. A call raises torch's error if a part cannot be compiled."""
    config.recompile_limit = max(config.recompile_limit, MOST_VARIANTS)
    return torch.compile(update, dynamic=True, fullgraph=True)


def compiled_rule(rule: UpdateRule, formats: Sequence[MomentFormat]) -> Callable[..., None]:
    """Return the whole update of a tensor by a rule, compiled: conversions, rule and rounding.

    It takes the stored weight, its gradient, the tensors of each moment, the count, the numbers as tensors, and the box
    of stochastic rounding or None.
    """

    def update(
        stored: Tensor,
        gradient: Tensor,
        moments: Sequence[Sequence[Tensor]],
        count: Tensor | None,
        by: Numbers,
        box: Box | None,
    ) -> None:
        weight = wide(stored, stored)
        values = [form.load(tensors, stored) for form, tensors in zip(formats, moments, strict=True)]
        rule(weight, wide(gradient, stored), values, count, by)
        for form, tensors, value in zip(formats, moments, values, strict=True):
            form.store(tensors, value)
        write_back(stored, weight, box)

    return compiled_update(update)


def write_back(stored: Tensor, value: Tensor, box: Box | None) -> None:
    """Write new weights, to the nearest number without a box."""
    if box is not None:
        round_into(stored, value, box)
    elif stored.dtype != value.dtype:  # otherwise the update was in place
        stored.copy_(value)


def tensors_of(numbers: Mapping[str, float], like: Tensor) -> dict[str, Tensor]:
    """Return numbers as tensors [] on the device and in the format of an update of `like`."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return {name: torch.full((), value, dtype=dtype, device=like.device) for name, value in numbers.items()}


def adamw(*, cautious: bool) -> UpdateRule:
    """Return the formula of torch's fused AdamW. by: `lr`, `decay`, `keep`, `eps`, the shares of the newest gradient in
    both moments, and the logarithms of what stays of them."""

    def rule(weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], count: Tensor | None, by: Any) -> None:
        assert count is not None
        average, square = moments
        average.lerp_(gradient, by["share"])
        decay(weight, average, by, cautious=cautious)
        square.mul_(1 - by["share_of_squares"]).add_(by["share_of_squares"] * gradient * gradient)
        # 1 - β^count without the error of a difference of nearly equal numbers.
        first, second = -torch.expm1(count * by["log"]), -torch.expm1(count * by["log_of_squares"])
        weight.sub_((by["lr"] / first) * average / (square.sqrt() / second.sqrt() + by["eps"]))

    return rule


def adam_numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of `adamw` from a parameter group."""
    (stays, stays_of_squares), share = group["betas"], group["lr"] * group["weight_decay"]
    return {
        "lr": group["lr"],
        "decay": share,
        "keep": 1 - share,
        "eps": group["eps"],
        "share": 1 - stays,
        "share_of_squares": 1 - stays_of_squares,
        "log": math.log(stays) if stays else -math.inf,
        "log_of_squares": math.log(stays_of_squares) if stays_of_squares else -math.inf,
    }
