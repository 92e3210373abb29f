"""Recurrent mixers: convolution and recurrence of whole rows, of ranks that share them, and of texts that grow.

A mixer keeps a state and the last inputs of the convolution instead of a cache.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from xtrain.blocks.recurrent import RecurrentLayer
from xtrain.plan.architecture import Architecture
from xtrain.runtime.base.collectives import to_heads, to_positions
from xtrain.runtime.nn.attention import AttentionKernel, AttentionModule
from xtrain.runtime.nn.attention_blocks import PLAIN, exact_type
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.batch import DocumentLayout, LayerCache
from xtrain.runtime.nn.chunks import Scan, StateBefore
from xtrain.runtime.nn.layers import Linear, WeightHolder
from xtrain.runtime.nn.recompute import as_one
from xtrain.runtime.nn.state_scan import Pieces, RingScan, halo_of, pieces_of

# shapes: B rows, S positions, J spread heads, H heads, V width of a head's output, W positions of the convolution, C
# channels, A any width


class Recurrence(ABC):
    """Convolution and recurrence as a function of projections and parameters.

    Its inputs are tensors [B, S, A] of projections, of which the first `CONVOLVED` pass a convolution, and parameters,
    the weights of the convolutions first. moving: number of projections. PREPARED: number of prepared inputs that have
    positions; all zero, these change no state. value_dim: width V of a head's output.
    """

    CONVOLVED: ClassVar[int] = 3
    PREPARED: ClassVar[int] = 5
    moving: ClassVar[int]
    value_dim: int

    @abstractmethod
    def spread(self, inputs: Sequence[Tensor]) -> int:
        """Return the number of this rank's heads that context parallelism spreads; each has a consecutive part of every
        projection and parameter."""

    @abstractmethod
    def prepared(self, inputs: Sequence[Tensor], document_BS: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of the recurrence, in the format of exact sums."""

    @abstractmethod
    def outputs(
        self, prepared: Sequence[Tensor], document_BS: Tensor, scan: Scan | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs [B, S, H, V], and the states after the last positions."""

    @abstractmethod
    def gradients(
        self, prepared: Sequence[Tensor], document_BS: Tensor, grad_BSHV: Tensor, scan: Scan | None = None
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the prepared inputs."""

    @staticmethod
    @abstractmethod
    def moved(maps: Tensor, states: Tensor, *, back: bool = False) -> Tensor:
        """Return what maps M make of states; back: of gradients of the states after them."""

    @abstractmethod
    def step(self, prepared: Sequence[Tensor], state: Tensor, rows: int) -> Tensor:
        """Return the outputs [B, 1, H, V] of the last position, and move the states on by it in place."""


class RecurrentMixer(AttentionModule):
    """Base of recurrent mixers. Context parallelism gathers whole rows of some heads, or a ring passes states."""

    compiles = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, kernel: AttentionKernel, axes: Axes, layer: RecurrentLayer) -> None:
        super().__init__(kernel, axes, PLAIN)
        self.layer, self.positions = layer, layer.kernel

    def project(self, arch: Architecture, *, bias: bool = False, **widths: int) -> None:
        """Add a projection `name_proj` of each width."""
        for name, width in widths.items():
            self.add_module(f"{name}_proj", Linear(arch.dim, width, bias=bias))

    def convolve(self, *, bias: bool = False, **widths: int) -> None:
        """Add the weights of a convolution `name_conv` of each width."""
        for name, width in widths.items():
            self.add_module(f"{name}_conv", WeightHolder((width, 1, self.positions), bias=bias))

    def mixed(
        self, how: Recurrence, inputs: Sequence[Tensor], packing: DocumentLayout, cache: LayerCache | None
    ) -> Tensor:
        """Return the outputs [B, S, H, V] of the recurrence; with a cache, also keep its states."""
        if cache is None:
            return self._spread(how, inputs, packing)
        if cache.filled == 0:
            return self._begun(how, inputs, packing, cache)
        return self._continued(how, inputs, cache)

    def _spread(self, how: Recurrence, inputs: Sequence[Tensor], packing: DocumentLayout) -> Tensor:
        """Compute this rank's positions."""
        ulysses, ring, document_BS = self.axes.ulysses, self.axes.ring, packing.document_BS
        groups = [group for group in (ulysses, ring) if group is not None]
        if not groups:
            return _mix(how, document_BS, None, *inputs)
        heads, width, order_BS = how.spread(inputs), inputs[0].element_size(), None
        scans = False
        if ring is not None:
            shared = heads // (1 if ulysses is None else ulysses.size())
            sizes = (document_BS.numel(), width, exact_of(inputs).itemsize)
            scans = len(packing.segments) <= self.layer.most_documents(ring.size(), shared, *sizes)
        groups = groups[:-1] if scans else groups
        flat, weights = inputs[: how.moving], inputs[how.moving :]
        if groups:
            parts = [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in flat]
            joined_BJSA = torch.cat(parts, dim=-1)
            own = [weight.unflatten(0, (heads, -1)) for weight in weights]
            for group in groups:
                (joined_BJSA,) = to_heads((joined_BJSA,), group)
                own = [weight.chunk(group.size())[group.rank()] for weight in own]
            if not scans and ring is not None:
                order_BS = torch.tensor(_order(packing.segments, ring.size()), device=document_BS.device)
                joined_BJSA = _taken(joined_BJSA, order_BS.argsort(1))
            whole = joined_BJSA.split([part.shape[-1] for part in parts], dim=-1)
            flat = [part.transpose(1, 2).flatten(2).contiguous() for part in whole]  # no views of all parts
            heads, weights = joined_BJSA.shape[1], [each.flatten(0, 1) for each in own]
        if scans:
            assert ring is not None
            out_BSHV = self._scanned(how, flat, weights, packing, ring)
        else:
            out_BSHV = _mix(how, document_BS, None, *flat, *weights)
        if not groups:
            return out_BSHV
        out_BJSA = out_BSHV.unflatten(2, (heads, -1)).flatten(-2).transpose(1, 2)
        if order_BS is not None:
            out_BJSA = _taken(out_BJSA, order_BS)
        for group in reversed(groups):
            out_BJSA = to_positions(out_BJSA, group)
        return out_BJSA.transpose(1, 2).flatten(2).unflatten(-1, (-1, how.value_dim))

    def _scanned(
        self,
        how: Recurrence,
        moving: Sequence[Tensor],
        weights: Sequence[Tensor],
        packing: DocumentLayout,
        ring: ProcessGroup,
    ) -> Tensor:
        """Compute the positions of a rank of a ring, which passes states."""
        (rows, sequence), device = packing.document_BS.shape, packing.document_BS.device
        pieces = pieces_of(packing.segments, sequence, ring.rank(), ring.size(), self.positions - 1, device)
        halo = halo_of(moving[: how.CONVOLVED], pieces, ring)
        out_BSHV = _mix(how, pieces.piece_1L, (pieces, ring), *halo, *moving, *weights)
        return out_BSHV[0].unflatten(0, (rows, -1))

    def _begun(self, how: Recurrence, inputs: Sequence[Tensor], packing: DocumentLayout, cache: LayerCache) -> Tensor:
        """Compute prompts, and keep the state and the inputs of the convolution after the last position."""
        document_BS = packing.document_BS
        out_BSHV, state = how.outputs(how.prepared(inputs, document_BS), document_BS)
        last = [_tail(part, document_BS, self.positions - 1) for part in inputs[: how.CONVOLVED]]
        cache.keep(self, (state, *last))
        return out_BSHV.to(inputs[0].dtype)

    def _continued(self, how: Recurrence, inputs: Sequence[Tensor], cache: LayerCache) -> Tensor:
        """Compute one position of each row, and move the states on."""
        if cache.one_text:
            return self._text_continued(how, inputs, cache)
        state, *last = cache.kept(self)
        count = how.CONVOLVED
        whole = [torch.cat((before, part), dim=1) for before, part in zip(last, inputs[:count], strict=True)]
        one = torch.zeros(whole[0].shape[:2], dtype=torch.int32, device=whole[0].device)  # of the same document
        prepared = how.prepared((*whole, *inputs[count:]), one)
        for before, part in zip(last, whole, strict=True):
            before.copy_(part[:, 1:])
        out_BSHV = how.step(prepared, state, len(one)).to(inputs[0].dtype)
        cache.keep(self, (state, *last))
        return out_BSHV

    def _text_continued(self, how: Recurrence, inputs: Sequence[Tensor], cache: LayerCache) -> Tensor:
        """Compute consecutive positions of one text, which are the rows, and move its state on."""
        state, *last = cache.kept(self)
        count, back = len(inputs[0]), self.positions - 1
        moving = [part.transpose(0, 1) for part in inputs[: how.moving]]
        whole = [torch.cat((before, part), dim=1) for before, part in zip(last, moving, strict=False)]
        one = torch.zeros(1, back + count, dtype=torch.int32, device=state.device)  # of the same document
        prepared = how.prepared((*whole, *moving[len(whole) :], *inputs[how.moving :]), one)
        own = [each[:, -count:] for each in prepared[: how.PREPARED]]
        out_1SHV, state = how.outputs((*own, *prepared[how.PREPARED :]), one[:, back:], StateBefore(state))
        cache.keep(self, (state, *(part[:, count:] for part in whole)))
        return out_1SHV.transpose(0, 1).to(inputs[0].dtype)


class _Mix(torch.autograd.Function):
    """Convolution and recurrence of whole rows, [B, S, H, V]. The backward keeps the inputs and computes the rest
    again. ring: the rows are a rank's pieces of documents, and the positions before these are the first inputs.
    """

    @staticmethod
    def forward(
        ctx: Any, how: Recurrence, document_BS: Tensor, ring: tuple[Pieces, ProcessGroup] | None, *inputs: Tensor
    ) -> Tensor:
        def forward() -> tuple[Tensor, ...]:
            scan = None if ring is None else RingScan(how, *ring)
            out_BSHV, _ = how.outputs(_prepared(how, document_BS, ring, inputs), document_BS, scan)
            out_BSHV = out_BSHV if ring is None else out_BSHV[:, ring[0].places]
            return (out_BSHV.to(inputs[0].dtype), *(() if scan is None else scan.kept))

        out_BSHV, *kept = as_one("attention", forward)
        ctx.save_for_backward(document_BS, *kept, *inputs)
        ctx.how, ctx.ring = how, ring
        return out_BSHV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        how, ring = ctx.how, ctx.ring
        document_BS, *saved = ctx.saved_tensors
        scan, (grad_BSHV,) = None, grad_outputs
        if ring is not None:
            scan, saved = RingScan(how, *ring, kept=tuple(saved[:2])), saved[2:]
            length = document_BS.shape[1]
            grad_BSHV = grad_BSHV.new_zeros(1, length, *grad_BSHV.shape[2:]).index_copy_(1, ring[0].places, grad_BSHV)
        wanted = ctx.needs_input_grad[3:]
        inputs = [each.detach().requires_grad_(wants) for each, wants in zip(saved, wanted, strict=True)]
        with torch.enable_grad():
            prepared = _prepared(how, document_BS, ring, inputs)
        grads = how.gradients([each.detach() for each in prepared], document_BS, grad_BSHV.to(prepared[0].dtype), scan)
        asked = [each for each in inputs if each.requires_grad]
        # With frozen parameters, some inputs of the recurrence have no gradient.
        pairs = [(out, grad) for out, grad in zip(prepared, grads, strict=True) if out.requires_grad]
        outputs, slopes = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, asked, slopes))
        return None, None, None, *(next(found) if wants else None for wants in wanted)


def _prepared(
    how: Recurrence, document_BS: Tensor, ring: tuple[Pieces, ProcessGroup] | None, inputs: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return the inputs of the recurrence."""
    if ring is None:
        return how.prepared(inputs, document_BS)
    pieces, count = ring[0], how.CONVOLVED if len(ring[0].last) else 0
    halo, moving, weights = inputs[:count], inputs[count : count + how.moving], inputs[count + how.moving :]
    prepared = how.prepared((*pieces.laid_out(moving, halo), *weights), document_BS)
    return [*map(pieces.only, prepared[: how.PREPARED]), *prepared[how.PREPARED :]]


# Compiled, each number of chunks would get a graph of its own.
_mix: Callable[..., Tensor] = torch.compiler.disable(_Mix.apply)  # pyright: ignore[reportAssignmentType]


def convolved(
    x_BSC: Tensor, weight_C1W: Tensor, document_BS: Tensor, exact: torch.dtype, bias_C: Tensor | None = None
) -> Tensor:
    """Return the causal convolution of each channel within documents, in the format of exact sums: the last weight is
    for the position itself."""
    return _Convolution.apply(x_BSC, weight_C1W, bias_C, document_BS, exact)  # pyright: ignore[reportReturnType]


class _Convolution(torch.autograd.Function):
    """Convolution that keeps its input alone."""

    @staticmethod
    def forward(
        ctx: Any, x_BSC: Tensor, weight_C1W: Tensor, bias_C: Tensor | None, document_BS: Tensor, exact: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x_BSC, weight_C1W, bias_C, document_BS)
        ctx.exact = exact
        x_BSC, weight_CW = x_BSC.to(exact), weight_C1W[:, 0].to(exact)
        out_BSC = x_BSC * weight_CW[:, -1]
        if bias_C is not None:
            out_BSC += bias_C.to(exact)
        for back, same_BS1 in _earlier(document_BS, weight_CW.shape[1]):
            out_BSC[:, back:].addcmul_(x_BSC[:, :-back] * same_BS1, weight_CW[:, -1 - back])
        return out_BSC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x_BSC, weight_C1W, bias_C, document_BS = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        (grad_BSC,), weight_CW = grad_outputs, weight_C1W[:, 0].to(ctx.exact)
        grad_x = grad_BSC * weight_CW[:, -1] if wants_x else None
        exact_BSC, grad_CW = x_BSC.to(ctx.exact), torch.zeros_like(weight_CW)
        if wants_weight:
            grad_CW[:, -1] = (grad_BSC * exact_BSC).sum((0, 1))
        for back, same_BS1 in _earlier(document_BS, weight_CW.shape[1]):
            moved_BSC = grad_BSC[:, back:] * same_BS1
            if grad_x is not None:
                grad_x[:, :-back].addcmul_(moved_BSC, weight_CW[:, -1 - back])
            if wants_weight:
                grad_CW[:, -1 - back] = moved_BSC.mul_(exact_BSC[:, :-back]).sum((0, 1))
        return (
            None if grad_x is None else grad_x.to(x_BSC.dtype),
            grad_CW[:, None].to(weight_C1W.dtype) if wants_weight else None,
            grad_BSC.sum((0, 1)).to(bias_C.dtype) if wants_bias else None,
            None,
            None,
        )


def _earlier(document_BS: Tensor, width: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each distance that a convolution sees back, and which positions have their document there [B, S - n, 1]."""
    for back in range(1, min(width, document_BS.shape[1])):
        yield back, (document_BS[:, back:] == document_BS[:, :-back])[..., None]


def exact_of(inputs: Sequence[Tensor]) -> torch.dtype:
    """Return the format of exact sums of inputs."""
    return exact_type(inputs[0].dtype)


def of_each(document_BS: Tensor, prepared: Sequence[Tensor]) -> Tensor:
    """Return the documents of each row of the prepared inputs, which has some of the heads."""
    return document_BS.repeat_interleave(len(prepared[0]) // len(document_BS), dim=0)


def _tail(x_BSC: Tensor, document_BS: Tensor, count: int) -> Tensor:
    """Return the last `count` positions of each row, zero where they belong to another document than the last one."""
    own_BS = document_BS == document_BS[:, -1:]
    short = max(0, count - x_BSC.shape[1])
    return F.pad(x_BSC * own_BS[..., None], (0, 0, short, 0))[:, x_BSC.shape[1] + short - count :].clone()


@lru_cache(maxsize=8)  # all layers of a microbatch ask for the same
def _order(segments: tuple[tuple[int, int, int], ...], ring: int) -> list[list[int]]:
    """Return for each row the positions in the order in which the ranks of a ring have them: of each document an early
    and a late piece (`runtime/feed/collate.py`)."""
    found: list[list[int]] = [[] for _ in range(1 + max(row for row, _, _ in segments))]
    for rank in range(ring):
        for row, first, length in segments:
            size = length // (2 * ring)
            for piece in (rank, 2 * ring - 1 - rank):
                found[row] += range(first + piece * size, first + (piece + 1) * size)
    return found


def _taken(x_BJSA: Tensor, order_BS: Tensor) -> Tensor:
    return x_BJSA.gather(2, order_BS[:, None, :, None].expand_as(x_BJSA))
