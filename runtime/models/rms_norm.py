"""x / rms(x) · weight (Zhang and Sennrich 2019), computed in at least fp32; or · (1 + weight), as Gemma has it.

For its backward it keeps what it is given, in its own format, and one number a row. torch's own would keep fp32 copies
of rows in bf16, and on a CPU also the product.

Shapes: … rows, D width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.runtime.models.fused import fused_norm, fused_norm_gradients
from xtrain.runtime.parallel.collectives import all_reduce

ATEN = torch.ops.aten


def rms_norm(
    x: Tensor,
    weight_D: Tensor,
    eps: float,
    group: ProcessGroup | None = None,
    *,
    plus_one: bool = False,
    fused: bool = False,
) -> Tensor:
    """group: its ranks have equal pieces of every row, and of the weight. plus_one: rows are multiplied by 1 + weight,
    which is added in at least fp32. fused: by kernels of one pass, on a CPU and without a group."""
    fused = fused and group is None
    if not torch.is_grad_enabled():  # of one token, half the time would go to what autograd is told
        return _normed(x, _factor(weight_D, plus_one), eps, group, fused)[0]
    return _RMSNorm.apply(x, weight_D, eps, group, plus_one, fused)  # pyright: ignore[reportReturnType]


def _factor(weight_D: Tensor, plus_one: bool) -> Tensor:
    """What rows are multiplied by."""
    return 1 + _exact(weight_D) if plus_one else _exact(weight_D)


def _normed(x: Tensor, exact_D: Tensor, eps: float, group: ProcessGroup | None, fused: bool) -> tuple[Tensor, Tensor]:
    """The product, and 1 / rms of every row."""
    exact = _exact(x)
    if group is not None:
        squares = all_reduce(exact.square().sum(-1, keepdim=True), group)
        inverse = squares.div_(x.shape[-1] * group.size()).add_(eps).rsqrt_()
        out = (exact * inverse).mul_(exact_D)
    elif fused:
        out, inverse = fused_norm(exact, exact_D, eps)
    elif x.is_cuda:
        out, inverse = ATEN._fused_rms_norm(exact, exact_D.shape, exact_D, eps)
    else:
        inverse = exact.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        out = (exact * inverse).mul_(exact_D)
    return out.to(x.dtype), inverse


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_D: Tensor, eps: float, group: ProcessGroup | None, plus_one: bool, fused: bool
    ) -> Tensor:
        ctx.group, ctx.plus_one, ctx.fused = group, plus_one, fused
        out, inverse = _normed(x, _factor(weight_D, plus_one), eps, group, fused)
        ctx.save_for_backward(x, weight_D, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        x, weight_D, inverse = ctx.saved_tensors
        exact, exact_D, grad = _exact(x), _factor(weight_D, ctx.plus_one), _exact(grad_outputs[0])
        wanted = ctx.needs_input_grad[:2]
        if ctx.fused:
            grads = fused_norm_gradients(grad, exact, inverse, exact_D, wanted)
        elif x.is_cuda and ctx.group is None:
            grads = ATEN._fused_rms_norm_backward(grad, exact, weight_D.shape, inverse, exact_D, wanted)
        else:
            grads = _backward(grad, exact, inverse, exact_D, wanted, ctx.group)
        grad_x, grad_D = (None if found is None else found.to(x.dtype) for found in grads)
        return grad_x, grad_D, None, None, None, None


def _backward(
    grad: Tensor,
    x: Tensor,
    inverse: Tensor,
    weight_D: Tensor,
    wanted: tuple[bool, bool],
    group: ProcessGroup | None,
) -> tuple[Tensor | None, Tensor | None]:
    """With n = x / rms: ∂weight = Σ grad · n, ∂x = (grad · weight - n · mean(grad · weight · n)) / rms."""
    normed = x * inverse
    product = grad * normed
    grad_x = grad_D = None
    if wanted[0]:
        share, width = product @ weight_D, x.shape[-1]
        if group is not None:
            share, width = all_reduce(share, group), width * group.size()
        share = share.div_(width)[..., None]
        grad_x = (grad * weight_D).addcmul_(normed, share, value=-1).mul_(inverse)
    if wanted[1]:
        grad_D = product.flatten(0, -2).sum(0)
    return grad_x, grad_D


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
