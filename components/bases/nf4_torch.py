"""Codes of `base nf4`: the level nearest to value / absmax of the block, two codes per byte, the first in the high
half; value = level · absmax. Arithmetic and order of operations follow bitsandbytes 0.50."""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

# Quantiles of a normal distribution, including an exact zero (arXiv 2305.14314, appendix E).
LEVELS: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def encode(values_NB: Tensor, *, rest: bool = False) -> tuple[Tensor, Tensor]:
    """Encode blocks in fp32 as bytes [N, B / 2] and fp32 scales [N]. rest: the partial block after all full ones, for
    which bitsandbytes divides instead of multiplying by the inverse."""
    largest_N = values_NB.abs().amax(-1)
    divisor_N1 = largest_N.clamp(min=1e-38)[:, None]
    scaled_NB = values_NB / divisor_N1 if rest else values_NB * (1.0 / divisor_N1)
    levels = torch.tensor(LEVELS, device=values_NB.device)
    bounds = (levels[:-1] + levels[1:]) / 2
    codes_NB = torch.bucketize(scaled_NB.clamp_(-1, 1), bounds, out_int32=True).to(torch.uint8)
    return (codes_NB[:, ::2] << 4) | codes_NB[:, 1::2], divisor_N1[:, 0] if rest else largest_N


def table() -> Tensor:
    """Return the two levels of every byte, [256, 2]."""
    levels = torch.tensor(LEVELS)
    return torch.stack((levels.repeat_interleave(16), levels.repeat(16)), dim=-1)


def decode(codes_NH: Tensor, table: Tensor) -> Tensor:
    """Decode bytes [N, B / 2] to fp32 [N, B], to be multiplied by the scale."""
    return F.embedding(codes_NH.to(torch.int32), table).flatten(-2)
