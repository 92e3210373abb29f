"""Dropping what goes into matrices at random.

What is drawn for a number depends on the seed of the run, the name of the matrix, the number of the row in the run, the
position in the row and the feature: every layout, a run that goes on and a block that is computed again drop the same.
A row comes once in a run, so that its number says the step as well.

Shapes: B rows, S positions, T = B · S, D features.
"""

from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from xtrain.dsl.schema.adapters import DROPOUT_CHUNK
from xtrain.runtime.models.splitmix import splitmix64, stream_of


@frozen
class Dropout:
    """share: of the numbers that are dropped; the others are divided by the rest. stream: of a matrix."""

    share: float
    stream: int

    @classmethod
    def of(cls, matrix: str, share: float, seed: int) -> "Dropout":
        """That of a matrix, by its name."""
        return cls(share, stream_of(f"{seed}:{matrix}"))

    def __call__(self, x_BSD: Tensor, keys_BS: Tensor, first: int) -> Tensor:
        """keys_BS: as of `token_keys`. first: which of all features of the matrix is the first of x."""
        return _Dropped.apply(x_BSD, keys_BS, self, first)  # pyright: ignore[reportReturnType]

    def dropped(self, x_BSD: Tensor, keys_BS: Tensor, first: int) -> Tensor:
        out_TD = (x_BSD * (1 / (1 - self.share))).flatten(0, -2)
        features = out_TD.shape[-1]
        numbers_D = torch.arange(first, first + features, device=out_TD.device)
        feature_D = splitmix64(numbers_D, self.stream).to(torch.int32)
        token_T = splitmix64(keys_BS.flatten(), self.stream).to(torch.int32)
        # Of 2^32 numbers, as int32, the lowest ones are dropped.
        limit = round(self.share * 2**32) - 2**31
        each = len(token_T) if torch.compiler.is_compiling() else max(1, DROPOUT_CHUNK // features)
        for begin in range(0, len(token_T), each):
            bits = mixed(token_T[begin : begin + each, None] + feature_D)
            out_TD[begin : begin + each].masked_fill_(bits < limit, 0)
        return out_TD.view_as(x_BSD)


def mixed(bits: Tensor) -> Tensor:
    """int32, in place: the last steps of MurmurHash3, in which every bit changes all others."""
    for shift, factor in ((16, -0x7A143595), (13, -0x3D4D51CB)):
        bits ^= (bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        bits *= factor
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def token_keys(place_B: Tensor, in_row_BS: Tensor) -> Tensor:
    """int64 [B, S]: a number for each token of a run. place_B: of its row in the run; in_row_BS: its
    position there; [S] where that is the same in all rows."""
    return splitmix64(in_row_BS, splitmix64(place_B, 0)[:, None])


class _Dropped(torch.autograd.Function):
    """Keeps nothing but the tokens' keys: what is dropped is drawn again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys_BS: Tensor, how: Dropout, first: int) -> Tensor:
        ctx.save_for_backward(keys_BS)
        ctx.how, ctx.first = how, first
        return how.dropped(x, keys_BS, first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (keys_BS,) = ctx.saved_tensors
        return ctx.how.dropped(grad_outputs[0], keys_BS, ctx.first), None, None, None


class HasKeys(nn.Module):
    """A module whose block sets keys_BS, those of all tokens; None where nothing is dropped."""

    keys_BS: Tensor | None = None


class DropsInputs(HasKeys):
    """A module that drops some of its inputs where `dropout` and keys are set."""

    dropout: Dropout | None = None
