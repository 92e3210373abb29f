"""Codes of `base fp8`: value · 448 / absmax of the block, rounded to e4m3; value = code · (absmax / 448)."""

import torch
from torch import Tensor

MOST = torch.finfo(torch.float8_e4m3fn).max


def encode(values_NB: Tensor, *, rest: bool = False) -> tuple[Tensor, Tensor]:
    """Encode fp32 blocks as bytes [N, B] and fp32 scales [N]."""
    scale_N = values_NB.abs().amax(-1) / MOST
    divisor_N1 = torch.where(scale_N == 0, 1.0, scale_N)[:, None]
    codes_NB = (values_NB / divisor_N1).clamp_(-MOST, MOST)
    return codes_NB.to(torch.float8_e4m3fn).view(torch.uint8), scale_N


def table() -> Tensor:
    """Return an empty table: decoding needs none."""
    return torch.empty(0)


def decode(codes_NB: Tensor, table: Tensor) -> Tensor:
    """Decode bytes [N, B] to fp32 [N, B], to be multiplied by the scale."""
    return codes_NB.view(torch.float8_e4m3fn).to(torch.float32)
