"""Attention block by block: documents cut by a window, attention sinks, and ring attention over ranks."""

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from xtrain.blocks.attention import TILE
from xtrain.runtime.nn.attention_blocks import (
    PLAIN,
    Scores,
    Seen,
    attend,
    attend_backward,
    exact_type,
    has_kernel,
    merge,
    merge_sink,
    sink_gradient,
)
from xtrain.runtime.nn.batch import DocumentLayout
from xtrain.runtime.nn.recompute import as_one


def blockwise_attention(
    q_BHSA: Tensor,
    k_BKSA: Tensor,
    v_BKSA: Tensor,
    packing: DocumentLayout,
    scores: Scores = PLAIN,
    sink_H: Tensor | None = None,
    ring: ProcessGroup | None = None,
) -> Tensor:
    """Compute attention of this rank's positions over the positions of all ranks of the ring.

    `packing` describes whole rows. sink_H: a further score of every query of a head, whose value is zero.
    """
    return _uncompiled(q_BHSA, k_BKSA, v_BKSA, packing, scores, sink_H, ring)


@frozen
class _Tiles:
    """The same positions of `number` consecutive pieces of one length."""

    first: int
    number: int
    length: int
    positions: slice = slice(None)

    def __call__(self, x_TH: Tensor) -> Tensor:
        """Return a view [pieces, H, positions, …] of x [T, H, …]."""
        batch = x_TH[self.first : self.first + self.number * self.length]
        return batch.unflatten(0, (self.number, self.length))[:, self.positions].transpose(1, 2)


_Part = tuple[_Tiles, _Tiles, Seen]
"""Queries, keys, and which of these each query sees."""


@frozen(eq=False)
class BlockLayout:
    """This rank's positions sorted by the length of their segment, so that segments of one length are one batch.

    It is the same on every rank of the ring. order, restore: int64 [T], from rows to sorted positions and back; None if
    rows are sorted already. batches: (first sorted position, number of segments, their local length). ring: number of
    its ranks.
    """

    rows: int
    order: Tensor | None
    restore: Tensor | None
    batches: tuple[tuple[int, int, int], ...]
    ring: int

    @classmethod
    def of(cls, packing: DocumentLayout, ring: int) -> "BlockLayout":
        """Return the layout of a microbatch, computed by the first layer that needs it."""
        known = _LAYOUTS.setdefault(packing, {})
        if ring not in known:
            known[ring] = cls._make(packing, ring)
        return known[ring]

    @classmethod
    def _make(cls, packing: DocumentLayout, ring: int) -> "BlockLayout":
        rows, sequence = packing.document_BS.shape
        starts: dict[int, list[int]] = {}
        for row, first, length in packing.segments:
            assert ring == 1 or length % (2 * ring) == 0, f"a segment of {length} positions on a ring of {ring}"
            starts.setdefault(length // ring, []).append((row * sequence + first) // ring)
        batches, indices, filled = [], [], 0
        for length, firsts in starts.items():
            batches.append((filled, len(firsts), length))
            indices.append((np.array(firsts)[:, None] + np.arange(length)).ravel())
            filled += len(firsts) * length
        order = np.concatenate(indices)
        if (order == np.arange(filled)).all():
            return cls(rows=rows, order=None, restore=None, batches=tuple(batches), ring=ring)
        device, order_T = packing.document_BS.device, torch.from_numpy(order)
        restore_T = order_T.argsort()
        if device.type == "cuda":  # a copy from memory that is not pinned waits for the device
            order_T, restore_T = order_T.pin_memory(), restore_T.pin_memory()
        order_T, restore_T = (x.to(device, non_blocking=True) for x in (order_T, restore_T))
        return cls(rows=rows, order=order_T, restore=restore_T, batches=tuple(batches), ring=ring)

    def sort(self, x_BHSA: Tensor) -> Tensor:
        """Sort [B, H, S, A] to [T, H, A], contiguous."""
        x_THA = x_BHSA.transpose(1, 2).flatten(0, 1)
        return x_THA.contiguous() if self.order is None else x_THA.index_select(0, self.order)

    def unsort(self, x_THA: Tensor) -> Tensor:
        """Restore [T, H, A] to [B, H, S, A]."""
        x_THA = x_THA if self.restore is None else x_THA.index_select(0, self.restore)
        return x_THA.unflatten(0, (self.rows, -1)).transpose(1, 2)

    def parts(self, source: int, rank: int, scores: Scores = PLAIN, *, tiled: bool = False) -> Iterator[_Part]:
        """Yield the queries of `rank` with the keys of `source` that they see, for every batch.

        The first part of each query is causal, and no other is. tiled: at most TILE queries at once, if the row is on
        one rank.
        """
        for first, number, length in self.batches:
            if not scores.sees_all(length * self.ring) or (tiled and self.ring == 1):
                window = length * self.ring if scores.window is None else scores.window
                for segment in range(first, first + number * length, length):
                    yield from self._cut(segment, length, window, source, rank, tiled)
                continue
            whole, half = slice(None), length // 2
            queries = slice(half, None) if source > rank else whole
            keys = slice(None, half) if source < rank else whole
            seen: Seen = "causal" if source == rank else "all"
            yield _Tiles(first, number, length, queries), _Tiles(first, number, length, keys), seen

    def _cut(self, first: int, length: int, window: int, source: int, rank: int, tiled: bool) -> Iterator[_Part]:
        """Yield the parts of one segment with a window."""
        if self.ring == 1:
            yield from _own_chunk(first, length, window, min(window, TILE) if tiled else window)
            return
        chunk = length // 2
        last = 2 * self.ring - 1
        for i, of_queries in enumerate((rank, last - rank)):
            for j, of_keys in ((1, last - source), (0, source)):  # the own chunk before earlier ones
                queries, keys = first + i * chunk, first + j * chunk
                if of_queries == of_keys:
                    yield from _own_chunk(queries, chunk, window, min(window, chunk))
                elif of_queries > of_keys:
                    yield from _earlier(queries, chunk, keys, chunk, (of_queries - of_keys) * chunk, window)


def _own_chunk(first: int, length: int, window: int, tile: int) -> Iterator[_Part]:
    """Yield the parts of queries and keys at the same `length` positions from `first` on, in tiles of at most
    `tile`."""
    number, rest = divmod(length, tile)
    for view in (_Tiles(first, number, tile), _Tiles(first + number * tile, 1, rest)):
        if view.number and view.length:
            yield view, view, "causal"
    if tile == window and tile > 1 and number > 1:
        later, earlier = _Tiles(first + tile, number - 1, tile), _Tiles(first, number - 1, tile)
        yield evolve(later, positions=slice(tile - 1)), evolve(earlier, positions=slice(1, None)), "reversed"
    done = number * tile if tile == window else tile
    for begin in range(done, length, tile):
        keys = max(0, begin - window + 1)
        count = min(tile, length - begin)
        if keys < begin:
            yield from _earlier(first + begin, count, first + keys, begin - keys, begin - keys, window)


def _earlier(queries: int, q: int, keys: int, k: int, distance: int, window: int) -> Iterator[_Part]:
    """Yield the parts of `q` queries and `k` keys, all keys before all queries; the first ones are `distance` positions
    apart.

    The query i sees the keys from distance + i - window + 1 on.
    """
    hidden = distance - window + 1
    seeing_all = max(0, -hidden)
    if hidden + q - 1 <= 0:
        yield _Tiles(queries, 1, q), _Tiles(keys, 1, k), "all"
        return
    if seeing_all:
        yield _Tiles(queries, 1, seeing_all), _Tiles(keys, 1, k), "all"
    queries, q = queries + seeing_all, q - seeing_all
    keys, k = keys + max(0, hidden), k - max(0, hidden)
    size = min(q, k)
    if size <= 0:
        return
    yield _Tiles(queries, 1, size), _Tiles(keys, 1, size), "reversed"
    if k > size:
        yield _Tiles(queries, 1, size), _Tiles(keys + size, 1, k - size), "all"


# Kept as long as the microbatch: every layer of a rank, and every recomputation, uses the same layout.
_LAYOUTS: WeakKeyDictionary[DocumentLayout, dict[int, BlockLayout]] = WeakKeyDictionary()


@frozen(eq=False)
class _Passing:
    """A tensor in transit to the next rank of the ring, while the previous rank's is received."""

    sent: Tensor
    received: Tensor
    works: list[Any]

    @classmethod
    def of(cls, x: Tensor, ring: ProcessGroup) -> "_Passing":
        size, rank = ring.size(), ring.rank()
        received = torch.empty_like(x)
        send = dist.P2POp(dist.isend, x, group=ring, group_peer=(rank + 1) % size)
        receive = dist.P2POp(dist.irecv, received, group=ring, group_peer=(rank - 1) % size)
        return cls(sent=x, received=received, works=dist.batch_isend_irecv([send, receive]))

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHSA: Tensor,
        k_BKSA: Tensor,
        v_BKSA: Tensor,
        sink_H: Tensor | None,
        layout: BlockLayout,
        scores: Scores,
        ring: ProcessGroup | None,
    ) -> Tensor:
        q_THA = layout.sort(q_BHSA)
        own_kv = torch.stack((layout.sort(k_BKSA), layout.sort(v_BKSA)))
        out_THA, lse_TH = as_one("attention", lambda: _forward(q_THA, own_kv, sink_H, layout, scores, ring))
        ctx.save_for_backward(q_THA, own_kv, out_THA, lse_TH, sink_H)
        ctx.layout, ctx.scores, ctx.ring = layout, scores, ring
        return layout.unsort(out_THA)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q_THA, kv, out_THA, lse_TH, sink_H = ctx.saved_tensors
        layout, scores, ring = ctx.layout, ctx.scores, ctx.ring
        grad_THA = layout.sort(grad_outputs[0])
        exact = exact_type(q_THA.dtype)
        grad_q_THA = torch.zeros_like(q_THA, dtype=exact)
        grad_kv = torch.zeros_like(kv, dtype=exact)
        rank, passed, tiled = _rank(ring), None, not has_kernel(q_THA, scores)
        for step in range(layout.ring):
            coming = _Passing.of(kv, ring) if ring is not None and step + 1 < layout.ring else None
            key_gradients = []
            for queries, keys, seen in layout.parts((rank - step) % layout.ring, rank, scores, tiled=tiled):
                known = (queries(out_THA), queries(lse_TH), seen, scores)
                grad_q, grad_k, grad_v = attend_backward(
                    queries(grad_THA), queries(q_THA), keys(kv[0]), keys(kv[1]), *known
                )
                queries(grad_q_THA).add_(grad_q)
                key_gradients.append((keys, grad_k, grad_v))
            # The sums of these keys come from the rank that had the keys before.
            grad_kv = passed.wait() if passed else grad_kv
            for keys, grad_k, grad_v in key_gradients:
                keys(grad_kv[0]).add_(grad_k)
                keys(grad_kv[1]).add_(grad_v)
            passed = _Passing.of(grad_kv, ring) if ring is not None else None
            kv = coming.wait() if coming else kv
        grad_k_TKA, grad_v_TKA = (passed.wait() if passed else grad_kv).to(q_THA.dtype)
        grad_q_THA = grad_q_THA.to(q_THA.dtype)
        grad_sink_H = None
        if sink_H is not None:
            grad_sink_H = sink_gradient(grad_THA, out_THA, lse_TH, sink_H).sum(0).to(sink_H.dtype)
        grads = (layout.unsort(grad_q_THA), layout.unsort(grad_k_TKA), layout.unsort(grad_v_TKA))
        return (*grads, grad_sink_H, None, None, None)


def _forward(
    q_THA: Tensor,
    own_kv: Tensor,
    sink_H: Tensor | None,
    layout: BlockLayout,
    scores: Scores,
    ring: ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Return (out [T, H, A], logsumexp [T, H] of its scores). own_kv: [2, T, K, A]."""
    exact = exact_type(q_THA.dtype)
    out_THA = torch.empty_like(q_THA, dtype=exact)
    lse_TH = q_THA.new_empty(q_THA.shape[:2], dtype=exact)
    rank, kv, tiled = _rank(ring), own_kv, not has_kernel(q_THA, scores)
    for step in range(layout.ring):
        coming = _Passing.of(kv, ring) if ring is not None and step + 1 < layout.ring else None
        for queries, keys, seen in layout.parts((rank - step) % layout.ring, rank, scores, tiled=tiled):
            block_out, block_lse = attend(queries(q_THA), keys(kv[0]), keys(kv[1]), seen, scores)
            if seen == "causal":
                queries(out_THA).copy_(block_out)
                queries(lse_TH).copy_(block_lse)
            else:
                merge(queries(out_THA), queries(lse_TH), block_out, block_lse)
        kv = coming.wait() if coming else kv
    if sink_H is not None:
        merge_sink(out_THA, lse_TH, sink_H)
    return out_THA.to(q_THA.dtype), lse_TH


def _rank(ring: ProcessGroup | None) -> int:
    return 0 if ring is None else ring.rank()


def _apply(
    q_BHSA: Tensor,
    k_BKSA: Tensor,
    v_BKSA: Tensor,
    packing: DocumentLayout,
    scores: Scores,
    sink_H: Tensor | None,
    ring: ProcessGroup | None,
) -> Tensor:
    layout = BlockLayout.of(packing, 1 if ring is None else ring.size())
    return _Blockwise.apply(q_BHSA, k_BKSA, v_BKSA, sink_H, layout, scores, ring)  # pyright: ignore


# The compiler supports neither point-to-point messages nor a table by object.
_uncompiled: Callable[..., Tensor] = torch.compiler.disable(_apply)  # pyright: ignore[reportAssignmentType]
