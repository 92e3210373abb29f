"""Layers that compute each position by itself, in pieces of the positions: what lies between their input and output
exists of one piece only, in the forward and in the backward, which computes it again.

ArcticTraining's tiled MLP (arXiv 2506.13996, section 3.1.2). Ranks need not agree on the pieces, as nothing is sent
while one is computed. Shapes: B rows, S positions, D dim, N = B · S positions, P those of a piece.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from xtrain.runtime.models.recompute import as_one


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
