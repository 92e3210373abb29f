"""Pointwise parts of a block with their gradients: RMSNorm, and the kernels that plans choose on a CPU.

x / rms(x) · weight (Zhang and Sennrich 2019) is computed in at least fp32; Gemma multiplies by 1 + weight.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from xtrain.runtime.base.collectives import all_reduce

# Numbers, 0.2 to 2 milliseconds, that are worth waking a thread: it must take its core from a thread of torch, which
# waits busily for the next product.
LEAST_SHARE: Final = 1 << 20


class Angles(Protocol):
    """Cosine and sine of the angles of every position, [B, S, A]."""

    @property
    def cos(self) -> Tensor: ...

    @property
    def sin(self) -> Tensor: ...


class Fusible(nn.Module):
    """A module with parts that these kernels can compute. fused: they do."""

    fused = False


def fused_norm(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x / rms(x) · weight, and 1 / rms of every row."""
    from xtrain.runtime.nn.fused_kernels import norm_forward

    x = x.contiguous()
    out, inverse = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)
    _over_rows(norm_forward, _parts(inverse, x), _rows(x), _Copied(weight_D), eps, _rows(out), inverse.view(-1))
    return out, inverse


def fused_norm_gradients(
    grad: Tensor, x: Tensor, inverse: Tensor, weight_D: Tensor, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of the weight, as far as they are wanted."""
    from xtrain.runtime.nn.fused_kernels import norm_backward

    x, grad, parts = x.contiguous(), grad.contiguous(), _parts(inverse, x)
    grad_x, grad_PD = torch.empty_like(x), weight_D.new_zeros(len(parts), *weight_D.shape)
    rows = _rows(grad), _rows(x), _Copied(weight_D), inverse.view(-1), _rows(grad_x)
    _over_rows(norm_backward, parts, *rows, grad_PD, numbered=True)
    return grad_x if wanted[0] else None, _sum(grad_PD) if wanted[1] else None


def turned(x_BSHA: Tensor, rotate: Angles) -> Tensor:
    """Rotate heads by their positions."""
    return _Turned.apply(x_BSHA, *_angles(rotate))  # pyright: ignore[reportReturnType]


def normed_and_turned(x_BSHA: Tensor, weight_A: Tensor, eps: float, rotate: Angles) -> Tensor:
    """Apply RMSNorm to heads, then rotate them by their positions."""
    return _NormedAndTurned.apply(x_BSHA, weight_A, eps, *_angles(rotate))  # pyright: ignore[reportReturnType]


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up."""
    return _SiluTimes.apply(gate, up)  # pyright: ignore[reportReturnType]


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSHA: Tensor, cos_TA: Tensor, sin_TA: Tensor) -> Tensor:
        from xtrain.runtime.nn.fused_kernels import turn_forward

        x_BSHA = x_BSHA.contiguous()
        ctx.save_for_backward(cos_TA, sin_TA)
        out_BSHA = torch.empty_like(x_BSHA)
        _over_rows(turn_forward, _parts(cos_TA, x_BSHA), _heads(x_BSHA), cos_TA, sin_TA, _heads(out_BSHA))
        return out_BSHA

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        from xtrain.runtime.nn.fused_kernels import turn_backward

        cos_TA, sin_TA = ctx.saved_tensors
        grad_BSHA = grad_outputs[0].contiguous()
        grad_x_BSHA = torch.empty_like(grad_BSHA)
        parts = _parts(cos_TA, grad_BSHA)
        _over_rows(turn_backward, parts, _heads(grad_BSHA), cos_TA, sin_TA, _heads(grad_x_BSHA))
        return grad_x_BSHA, None, None


class _NormedAndTurned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSHA: Tensor, weight_A: Tensor, eps: float, cos_TA: Tensor, sin_TA: Tensor) -> Tensor:
        from xtrain.runtime.nn.fused_kernels import norm_turn_forward

        x_BSHA = x_BSHA.contiguous()
        out_BSHA, inverse_TH = torch.empty_like(x_BSHA), x_BSHA.new_empty(len(cos_TA), x_BSHA.shape[2])
        given = _heads(x_BSHA), _Copied(weight_A), eps, cos_TA, sin_TA, _heads(out_BSHA), inverse_TH
        _over_rows(norm_turn_forward, _parts(cos_TA, x_BSHA), *given)
        ctx.save_for_backward(x_BSHA, weight_A, inverse_TH, cos_TA, sin_TA)
        return out_BSHA

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        from xtrain.runtime.nn.fused_kernels import norm_turn_backward

        x_BSHA, weight_A, inverse_TH, *angles = ctx.saved_tensors
        grad_BSHA, parts = grad_outputs[0].contiguous(), _parts(inverse_TH, x_BSHA)
        grad_x_BSHA, grad_PA = torch.empty_like(x_BSHA), weight_A.new_zeros(len(parts), *weight_A.shape)
        rows = _heads(grad_BSHA), _heads(x_BSHA), _Copied(weight_A), inverse_TH
        given = *rows, *angles, _heads(grad_x_BSHA), grad_PA
        _over_rows(norm_turn_backward, parts, *given, numbered=True)
        return grad_x_BSHA, _sum(grad_PA), None, None, None


class _SiluTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from xtrain.runtime.nn.fused_kernels import silu_times_forward

        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        _over_rows(silu_times_forward, _parts(gate.view(-1), gate), gate.view(-1), up.view(-1), out.view(-1))
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        from xtrain.runtime.nn.fused_kernels import silu_times_backward

        gate, up = ctx.saved_tensors
        grad = grad_outputs[0].contiguous()
        grads = torch.empty_like(gate), torch.empty_like(up)
        flat = (tensor.view(-1) for tensor in (grad, gate, up, *grads))
        _over_rows(silu_times_backward, _parts(gate.view(-1), gate), *flat)
        return grads


class _Copied(NamedTuple):
    """A weight that is copied for a kernel: numpy keeps references to arrays, and FSDP frees gathered weights."""

    weight: Tensor


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])


def _heads(x_BSHA: Tensor) -> Tensor:
    return x_BSHA.view(-1, *x_BSHA.shape[2:])


def _angles(rotate: Angles) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, each [T, A]."""
    return _rows(rotate.cos), _rows(rotate.sin)


def _sum(parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0)


def _parts(rows: Tensor, numbers: Tensor) -> list[tuple[int, int]]:
    """Split the rows evenly for the threads of this rank. numbers: the computed tensor, whose size limits the
    threads."""
    count, length = min(torch.get_num_threads(), max(1, numbers.numel() // LEAST_SHARE)), rows.numel()
    length = len(rows) if rows.dim() == 2 else length
    return [(length * part // count, length * (part + 1) // count) for part in range(count)]


def _over_rows(kernel: Callable[..., None], parts: list[tuple[int, int]], *given: Any, numbered: bool = False) -> None:
    """Call a kernel for every part, with the number of the part if `numbered`. Does nothing for fake tensors."""
    if isinstance(given[0], FakeTensor):
        return
    arrays = [_argument(argument, given[0]) for argument in given]
    calls = [(first, last, number) if numbered else (first, last) for number, (first, last) in enumerate(parts)]
    others = [_threads().submit(kernel, *call, *arrays) for call in calls[1:]]
    kernel(*calls[0], *arrays)
    for other in others:
        other.result()


def _argument(given: Any, like: Tensor) -> Any:
    """Return the kernel's argument: an array, or a number in the format of the arrays."""
    if isinstance(given, Tensor):
        return given.detach().numpy()
    if isinstance(given, _Copied):
        return given.weight.detach().clone().numpy()
    return _number(given, like.dtype)


@cache
def _number(value: float, dtype: torch.dtype) -> Any:
    return torch.tensor(value, dtype=dtype).numpy()[()]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "kernels")


ATEN = torch.ops.aten


def rms_norm(
    x: Tensor,
    weight_D: Tensor | None,
    eps: float,
    group: ProcessGroup | None = None,
    plus_one: bool = False,
    scale: float = 1.0,
    *,
    fused: bool = False,
) -> Tensor:
    """Compute x / rms(x) · weight · scale, with a weight [D] for rows, or [P, D] for P parts of each row; None: 1.

    group: its ranks have equal pieces of every row, and of the weight. plus_one: multiply by 1 + weight, added in at
    least fp32, as scale is multiplied. fused: use one-pass kernels, on a CPU and without a group.
    """
    fused = fused and group is None
    weight_D = x.new_ones(x.shape[-1]) if weight_D is None else weight_D
    if not torch.is_grad_enabled():  # for one token, autograd's bookkeeping would take half the time
        return _normed(x, _factor(weight_D, plus_one, scale), eps, group, fused)[0]
    return _RMSNorm.apply(x, weight_D, eps, group, plus_one, scale, fused)  # pyright: ignore[reportReturnType]


def _factor(weight_D: Tensor, plus_one: bool, scale: float) -> Tensor:
    """Return the factor of rows."""
    factor_D = 1 + _exact(weight_D) if plus_one else _exact(weight_D)
    return factor_D if scale == 1 else factor_D * scale


def _has_kernel(x: Tensor, weight_D: Tensor) -> bool:
    """Return True if torch has a fused kernel for the norm of x."""
    return x.is_cuda and weight_D.dim() == 1


def _normed(x: Tensor, exact_D: Tensor, eps: float, group: ProcessGroup | None, fused: bool) -> tuple[Tensor, Tensor]:
    """Return the product, and 1 / rms of every row."""
    exact = _exact(x)
    if group is not None:
        squares = all_reduce(exact.square().sum(-1, keepdim=True), group)
        inverse = squares.div_(x.shape[-1] * group.size()).add_(eps).rsqrt_()
        out = (exact * inverse).mul_(exact_D)
    elif fused:
        out, inverse = fused_norm(exact, exact_D, eps)
    elif _has_kernel(x, exact_D):
        out, inverse = ATEN._fused_rms_norm(exact, exact_D.shape, exact_D, eps)
    else:
        inverse = exact.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        out = (exact * inverse).mul_(exact_D)
    return out.to(x.dtype), inverse


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_D: Tensor,
        eps: float,
        group: ProcessGroup | None,
        plus_one: bool,
        scale: float,
        fused: bool,
    ) -> Tensor:
        ctx.group, ctx.plus_one, ctx.scale, ctx.fused = group, plus_one, scale, fused
        out, inverse = _normed(x, _factor(weight_D, plus_one, scale), eps, group, fused)
        ctx.save_for_backward(x, weight_D, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        x, weight_D, inverse = ctx.saved_tensors
        exact, exact_D, grad = _exact(x), _factor(weight_D, ctx.plus_one, ctx.scale), _exact(grad_outputs[0])
        wanted = ctx.needs_input_grad[:2]
        if ctx.fused:
            grads = fused_norm_gradients(grad, exact, inverse, exact_D, wanted)
        elif _has_kernel(x, weight_D) and ctx.group is None:
            grads = ATEN._fused_rms_norm_backward(grad, exact, weight_D.shape, inverse, exact_D, wanted)
        else:
            grads = _backward(grad, exact, inverse, exact_D, wanted, ctx.group)
        if ctx.scale != 1 and grads[1] is not None:
            grads = grads[0], grads[1] * ctx.scale
        grad_x, grad_D = (None if grad_part is None else grad_part.to(x.dtype) for grad_part in grads)
        return grad_x, grad_D, None, None, None, None, None


def _backward(
    grad: Tensor,
    x: Tensor,
    inverse: Tensor,
    weight_D: Tensor,
    wanted: tuple[bool, bool],
    group: ProcessGroup | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients. With n = x / rms: ∂weight = Σ grad · n, ∂x = (grad · weight - n · mean(grad · weight · n))
    / rms."""
    normed = x * inverse
    product = grad * normed
    grad_x = grad_D = None
    if wanted[0]:
        share, width = product @ weight_D if weight_D.dim() == 1 else (product * weight_D).sum(-1), x.shape[-1]
        if group is not None:
            share, width = all_reduce(share, group), width * group.size()
        share = share.div_(width)[..., None]
        grad_x = (grad * weight_D).addcmul_(normed, share, value=-1).mul_(inverse)
    if wanted[1]:
        grad_D = product.flatten(0, -1 - weight_D.dim()).sum(0)
    return grad_x, grad_D


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
