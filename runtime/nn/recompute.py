"""Recomputation in the backward, and layers that are computed in tiles of the positions."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

import torch
import torch.nn.attention.varlen  # registers its operators
from attrs import define
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten

# Word of the plan → operators whose results are saved. An exchange is awaited again, which is over at once.
SAVED: Mapping[str, tuple[Any, ...]] = {
    "matmul": (
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._grouped_mm.default,
        aten._scaled_mm.default,
    ),
    "attention": (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        torch.ops.higher_order.flex_attention,
        torch.ops.torch_attn._varlen_attn.default,
    ),
    "all_to_all": (torch.ops._c10d_functional.all_to_all_single.default,),
    "reduce_scatter": (torch.ops._c10d_functional.reduce_scatter_tensor.default,),
}

_here = threading.local()


def recomputing() -> bool:
    """Return True in the second run of a checkpointed function, in which counters must not count again."""
    current = getattr(_here, "run", None)
    return current is not None and current.again


def remember(make: Callable[[], Tensor]) -> Tensor:
    """Return `make()`, or in the second run of a checkpoint that keeps choices, the first run's result."""
    current = getattr(_here, "run", None)
    return make() if current is None else current.remember(make)


def keeps_choices() -> bool:
    """Return True within a checkpoint that keeps choices."""
    current = getattr(_here, "run", None)
    return current is not None and current.keeps_choices


def as_one(word: str, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return `make()` as if it were one operator of `SAVED[word]`; the operators that it calls are not saved
    separately."""
    mode = getattr(_here, "mode", None)
    return make() if mode is None else mode.as_one(word, make)


@define(eq=False)
class RecomputeFunction:
    """Checkpointed call of functions.

    save: operators whose results are saved; none: only the arguments are. routes: the functions contain routers, and
    keep_choices: their choices are saved, see `remember`. compiled: the calls are part of compiled code.
    """

    save: frozenset[Any] = frozenset()
    routes: bool = False
    keep_choices: bool = False
    compiled: bool = False

    def __call__(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        # No block draws random numbers, so there is no generator state to keep.
        how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if self.compiled and self.save:
            # The compiler knows torch's own contexts, and reads from them what to save.
            how["context_fn"] = partial(create_selective_checkpoint_contexts, list(self.save))
        elif self.save or self.routes:
            how["context_fn"] = partial(_contexts, self)
        return checkpoint(function, *args, **how)  # pyright: ignore[reportReturnType]


def _contexts(how: RecomputeFunction) -> tuple[AbstractContextManager, AbstractContextManager]:
    first, second = runs_of([] if how.keep_choices else None)
    if not how.save:
        return first, second
    words = [word for word, operators in SAVED.items() if how.save.issuperset(operators)]
    results: dict[Any, list[Any]] = {operator: [] for operator in (*how.save, *words)}
    return _Both(first, _Keeping(results)), _Both(second, _Reusing(results))


def runs_of(choices: list[Tensor] | None) -> "tuple[_Run, _Run]":
    """Return contexts of the first and second run of one call. choices: to which the first run adds what `remember`
    makes, and which the second run takes; None: each run makes its own."""
    return _Run(choices, again=False), _Run(choices, again=True)


class _Run:
    """Context of the first or second run of one call. A second run can happen more than once: pipelines that compute
    the gradients of inputs and of weights separately run the block twice."""

    def __init__(self, choices: list[Tensor] | None, *, again: bool) -> None:
        self.again, self._choices, self._next = again, choices, 0
        self._outer: _Run | None = None

    @property
    def keeps_choices(self) -> bool:
        return self._choices is not None

    def __enter__(self) -> None:
        self._next = 0
        self._outer = getattr(_here, "run", None)
        _here.run = self

    def __exit__(self, *exception: object) -> None:
        _here.run = self._outer

    def remember(self, make: Callable[[], Tensor]) -> Tensor:
        if self._choices is None:
            return make()
        if not self.again:
            self._choices.append(make())
            return self._choices[-1]
        self._next += 1
        return self._choices[self._next - 1]


class _Results(TorchDispatchMode):
    """Results of some operators, and of `as_one` calls, by operator and by word."""

    def __init__(self, results: dict[Any, list[Any]]) -> None:
        super().__init__()
        self._results = results
        self._inside = False  # within an `as_one` call
        self._outer: _Results | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code in the block stays compiled; its operators are not seen here."""
        return True

    def __enter__(self) -> Self:
        self._outer = getattr(_here, "mode", None)
        _here.mode = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _here.mode = self._outer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = func in self._results and not self._inside
        return self.result(func, lambda: func(*args, **(kwargs or {}))) if known else func(*args, **(kwargs or {}))

    def as_one(self, word: str, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        def inside() -> tuple[Tensor, ...]:
            self._inside = True
            try:
                return make()
            finally:
                self._inside = False

        if self._inside:
            return make()
        return self.result(word, inside) if word in self._results else inside()

    def result(self, name: Any, make: Callable[[], Any]) -> Any:
        """Return the result for `make()` of an operator or a word."""
        raise NotImplementedError


class _Keeping(_Results):
    """Mode that saves results.

    torch's own contexts (`create_selective_checkpoint_contexts`) compare all operators of both runs, and fail if FSDP
    units inside the block gather their parameters in only one of them; and they return a result only once.
    """

    def result(self, name: Any, make: Callable[[], Any]) -> Any:
        out = make()
        self._results[name].append(_detached(out))
        return out


class _Reusing(_Results):
    """Mode that returns saved results instead of computing them again, in the order of the calls."""

    def __init__(self, results: dict[Any, list[Any]]) -> None:
        super().__init__(results)
        self._left: dict[Any, Iterator[Any]] = {}

    def __enter__(self) -> Self:
        self._left = {name: iter(outputs) for name, outputs in self._results.items()}
        return super().__enter__()

    def result(self, name: Any, make: Callable[[], Any]) -> Any:
        return _detached(next(self._left[name]))


def _detached(results: Any) -> Any:
    # The tensors themselves become part of the graph of the run that returns them.
    return tree_map(lambda result: result.detach() if isinstance(result, Tensor) else result, results)


class _Both:
    def __init__(self, outer: AbstractContextManager, inner: AbstractContextManager) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._inner.__exit__(*exception)
        self._outer.__exit__(*exception)


class TiledModule(nn.Module):
    """A layer that can compute some positions at a time. tiles: as in a `Layer`. positions: of a piece; None: all at
    once."""

    tiles = True
    positions: int | None = None

    def of_piece(self, x_BSD: Tensor) -> Tensor:
        """Compute some positions, without communication; returns the shape and format of `x_BSD`."""
        raise NotImplementedError

    def in_pieces(self, x_BSD: Tensor) -> Tensor:
        """Compute all positions piece by piece."""
        positions = self.positions
        if positions is None or positions >= x_BSD.shape[0] * x_BSD.shape[1]:
            return self.of_piece(x_BSD)
        trained = _trained(self)
        x_1ND: Any = _Kept.apply(x_BSD.flatten(0, 1)[None], *trained[:1])
        out_1ND: Any = _InPieces.apply(x_1ND, self, positions, x_BSD.requires_grad, *trained)
        return out_1ND.view_as(x_BSD)


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


class _Kept(torch.autograd.Function):
    """x itself, saved for the backward of `_InPieces` before any computation: if it is the last tensor that a
    recomputed block needs, the second run ends here. more: a parameter, without which an x without gradient would
    not be saved."""

    @staticmethod
    def forward(ctx: Any, x_1ND: Tensor, *more: Tensor) -> Tensor:
        ctx.save_for_backward(x_1ND)
        ctx.set_materialize_grads(False)
        ctx.more = len(more)
        return x_1ND.view_as(x_1ND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        return *grad_outputs, *(None,) * ctx.more


class _InPieces(torch.autograd.Function):
    """Computation in pieces. flows: x has a gradient. Parameters' gradients are summed over pieces in fp32, or
    in fp64."""

    @staticmethod
    def forward(
        ctx: Any, x_1ND: Tensor, module: TiledModule, positions: int, flows: bool, *trained: nn.Parameter
    ) -> Tensor:
        ctx.kept, ctx.module, ctx.positions, ctx.flows = x_1ND.grad_fn, module, positions, flows

        def make() -> tuple[Tensor]:
            out_1ND = torch.empty_like(x_1ND)
            for x_1PD, out_1PD in zip(x_1ND.split(positions, 1), out_1ND.split(positions, 1), strict=True):
                out_1PD.copy_(module.of_piece(x_1PD))
            return (out_1ND,)

        # It counts as one product to save; products inside are not saved.
        (out_1ND,) = as_one("matmul", make)
        return out_1ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x_1ND,), (grad_1ND,) = ctx.kept.saved_tensors, grad_outputs
        trained = _trained(ctx.module)
        x_grad_1ND = torch.empty_like(x_1ND) if ctx.flows else None
        sums: list[Tensor | None] = [None] * len(trained)
        for first in range(0, x_1ND.shape[1], ctx.positions):
            own = slice(first, first + ctx.positions)
            piece_1PD, piece_grads = _gradients(ctx.module, x_1ND[:, own], grad_1ND[:, own], trained, flows=ctx.flows)
            if x_grad_1ND is not None and piece_1PD is not None:
                x_grad_1ND[:, own] = piece_1PD
            sums = [_sum(*both) for both in zip(sums, piece_grads, strict=True)]
            del piece_1PD, piece_grads  # before the next piece is computed
        out = (None if total is None else total.to(p.dtype) for total, p in zip(sums, trained, strict=True))
        return x_grad_1ND, None, None, None, *out


def _gradients(
    module: TiledModule, x_1PD: Tensor, grad_1PD: Tensor, trained: Sequence[nn.Parameter], *, flows: bool
) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    """Return the gradients of a piece's positions, if `flows`, and of the parameters; None without one."""
    x_1PD = x_1PD.detach().requires_grad_(flows)
    with torch.enable_grad():
        out_1PD = module.of_piece(x_1PD)
    first = [x_1PD] if flows else []
    grads = torch.autograd.grad(out_1PD, [*first, *trained], grad_1PD, allow_unused=True)
    return (grads[0] if flows else None), grads[len(first) :]


def _sum(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    if total is None or more is None:
        # A copy, as two parameters may share one gradient.
        return total if more is None else more.to(torch.promote_types(more.dtype, torch.float32), copy=True)
    return total.add_(more)
