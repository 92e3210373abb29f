"""Codes of `base int8`: round(127 · value / absmax of the block), ties to even; value = code · (absmax / 127)."""

import torch
from torch import Tensor

MOST = 127.0


def encode(values_NB: Tensor, *, rest: bool = False) -> tuple[Tensor, Tensor]:
    """Encode fp32 blocks as bytes [N, B] and fp32 scales [N]."""
    scale_N = values_NB.abs().amax(-1) / MOST
    divisor_N1 = torch.where(scale_N == 0, 1.0, scale_N)[:, None]
    codes_NB = (values_NB / divisor_N1).round_().clamp_(-MOST, MOST)
    return codes_NB.to(torch.int8).view(torch.uint8), scale_N


def table() -> Tensor:
    """Return an empty table: decoding needs none."""
    return torch.empty(0)


def decode(codes_NB: Tensor, table: Tensor) -> Tensor:
    """Decode bytes [N, B] to fp32 [N, B], to be multiplied by the scale."""
    return codes_NB.view(torch.int8).to(torch.float32)
