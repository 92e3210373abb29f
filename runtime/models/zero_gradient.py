"""A gradient of zeros, where a schedule wants one and nothing needs it."""

from typing import Any

import torch
from torch import Tensor


def with_zero_gradient(out: Tensor, given: Tensor) -> Tensor:
    """A copy of `out`, whose backward gives `given` zeros as its gradient, whatever `out` was computed from."""
    return _WithZeroGradient.apply(out, given)  # pyright: ignore[reportReturnType]


class _WithZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, given: Tensor) -> Tensor:
        ctx.shape, ctx.dtype, ctx.device = given.shape, given.dtype, given.device
        return out.clone()  # schedules want no view

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        return grad_outputs[0], torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device)
