"""Recomputation in the backward, and layers that are computed in tiles of the positions."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

import torch
from attrs import define
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten

# Word of the plan → operators whose results are kept. An exchange is waited for again, which is over at once.
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
    ),
    "all_to_all": (torch.ops._c10d_functional.all_to_all_single.default,),
}

_here = threading.local()


def recomputing() -> bool:
    """Whether this is the second run of a checkpointed function: counters have counted in the first."""
    run = getattr(_here, "run", None)
    return run is not None and run.again


def remember(make: Callable[[], Tensor]) -> Tensor:
    """`make()`; in the second run of a checkpoint that keeps choices, what the first run made in its place."""
    run = getattr(_here, "run", None)
    return make() if run is None else run.remember(make)


def as_one(word: str, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """`make()` as if it were one of the operators of `SAVED[word]`; those that it calls are not kept by themselves."""
    mode = getattr(_here, "mode", None)
    return make() if mode is None else mode.as_one(word, make)


@define(eq=False)
class RecomputeFunction:
    """Calls functions so that the backward runs them again.

    save: operators whose results are kept; none: only the arguments are. routes: there are routers in the functions,
    and keep_choices: what they choose is kept, see `remember`. compiled: the calls are part of what is compiled.
    """

    save: frozenset[Any] = frozenset()
    routes: bool = False
    keep_choices: bool = False
    compiled: bool = False

    def __call__(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        # Nothing in a block draws random numbers, so there is no state of a generator to keep.
        how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if self.compiled and self.save:
            # The compiler knows torch's own contexts, and takes from them what to keep.
            how["context_fn"] = partial(create_selective_checkpoint_contexts, list(self.save))
        elif self.save or self.routes:
            how["context_fn"] = partial(_contexts, self)
        return checkpoint(function, *args, **how)  # pyright: ignore[reportReturnType]


def _contexts(how: RecomputeFunction) -> tuple[AbstractContextManager, AbstractContextManager]:
    choices: list[Tensor] | None = [] if how.keep_choices else None
    first, second = _Run(choices, again=False), _Run(choices, again=True)
    if not how.save:
        return first, second
    words = [word for word, operators in SAVED.items() if how.save.issuperset(operators)]
    results: dict[Any, list[Any]] = {each: [] for each in (*how.save, *words)}
    return _Both(first, _Keeping(results)), _Both(second, _Reusing(results))


class _Run:
    """Marks what runs under it as the first or a second run of one call. A second run can happen more than once:
    pipelines that take the gradients of inputs and of weights apart go through the block twice."""

    def __init__(self, choices: list[Tensor] | None, *, again: bool) -> None:
        self.again, self._choices, self._next = again, choices, 0
        self._outer: _Run | None = None

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
    """What some operators return, and what is made `as_one`, by operator and by word."""

    def __init__(self, results: dict[Any, list[Any]]) -> None:
        super().__init__()
        self._results = results
        self._inside = False  # of what is made as one
        self._outer: _Results | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled inside the block stays so; its operators are not seen here."""
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
        """What stands for `make()`, of an operator or a word."""
        raise NotImplementedError


class _Keeping(_Results):
    """Keeps them.

    torch's own contexts (`create_selective_checkpoint_contexts`) compare all operators of both runs, and refuse where
    FSDP units inside the block gather their parameters in one of them only; and they hand out a result just once.
    """

    def result(self, name: Any, make: Callable[[], Any]) -> Any:
        out = make()
        self._results[name].append(_detached(out))
        return out


class _Reusing(_Results):
    """Gives what was kept instead of making it again, in the order of the calls."""

    def __init__(self, results: dict[Any, list[Any]]) -> None:
        super().__init__(results)
        self._left: dict[Any, Iterator[Any]] = {}

    def __enter__(self) -> Self:
        self._left = {name: iter(outputs) for name, outputs in self._results.items()}
        return super().__enter__()

    def result(self, name: Any, make: Callable[[], Any]) -> Any:
        return _detached(next(self._left[name]))


def _detached(results: Any) -> Any:
    # The tensors themselves become part of the graph of the run they are returned in.
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
    """tiles: as of a `Layer`. positions: of a piece; None: all are computed at once."""

    tiles = True
    positions: int | None = None

    def of_piece(self, x_BSD: Tensor) -> Tensor:
        """What it computes of some positions, without anything of other ranks; of the shape and format of `x_BSD`."""
        raise NotImplementedError

    def in_pieces(self, x_BSD: Tensor) -> Tensor:
        """The same of all positions."""
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
    """x itself, kept for the backward of `_InPieces`, before that computes anything: where it is the last thing that a
    recomputed block needs, the second run ends here. more: a parameter, without which nothing would be kept of an x
    that has no gradient."""

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
    """flows: x has a gradient. Those of parameters are summed over pieces in fp32, or in fp64."""

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

        # Where products are kept it is one of them, and those inside of it are not.
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
            piece_1PD, found = _gradients(ctx.module, x_1ND[:, own], grad_1ND[:, own], trained, flows=ctx.flows)
            if x_grad_1ND is not None and piece_1PD is not None:
                x_grad_1ND[:, own] = piece_1PD
            sums = [_sum(*both) for both in zip(sums, found, strict=True)]
            del piece_1PD, found  # before the next piece is computed
        out = (None if total is None else total.to(p.dtype) for total, p in zip(sums, trained, strict=True))
        return x_grad_1ND, None, None, None, *out


def _gradients(
    module: TiledModule, x_1PD: Tensor, grad_1PD: Tensor, trained: Sequence[nn.Parameter], *, flows: bool
) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    """Those of a piece's positions, if `flows`, and of the parameters; None: none comes to it."""
    x_1PD = x_1PD.detach().requires_grad_(flows)
    with torch.enable_grad():
        out_1PD = module.of_piece(x_1PD)
    first = [x_1PD] if flows else []
    found = torch.autograd.grad(out_1PD, [*first, *trained], grad_1PD, allow_unused=True)
    return (found[0] if flows else None), found[len(first) :]


def _sum(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    if total is None or more is None:
        # A copy, as two parameters may have one gradient together.
        return total if more is None else more.to(torch.promote_types(more.dtype, torch.float32), copy=True)
    return total.add_(more)
