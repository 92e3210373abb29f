"""Ring attention (Liu et al. 2023, arXiv 2310.01889) over segments dealt in zigzag: keys and values go round.

A rank holds chunks r and 2R - 1 - r of each segment. Of the keys and values of rank s
    s = r: causal in the local order, the early chunk before the late one,
    s < r: every query sees the early chunk and none sees the late one,
    s > r: the late queries see both chunks and the early queries none,
so every product is a dense one, or causal, and no mask is needed.

Shapes: B rows, H query heads, K key/value heads, S positions of a row on this rank, T = B·S, A head width.
"""

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from ..models.attention import DocumentLayout
from ..parallel.attention_blocks import attend, attend_backward, exact_type


def ring_attention(
    q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, packing: DocumentLayout, ring: ProcessGroup
) -> Tensor:
    """Attention of this rank's positions over those of all ranks of the ring. `packing` speaks of whole rows."""
    return _uncompiled(q_BHSA, k_BKSA, v_BKSA, packing, ring)


@frozen(eq=False)
class RingLayout:
    """This rank's positions sorted by the length of their segment, so that segments of one length are one batch.

    It is the same on every rank of the ring.
    order, restore: int64 [T], from rows to sorted positions and back; None if they are in order as they lie.
    batches: (first sorted position, number of segments, their local length).
    """

    rows: int
    order: Tensor | None
    restore: Tensor | None
    batches: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, packing: DocumentLayout, ring: int) -> "RingLayout":
        """The layout of a microbatch, made by the first layer that asks for it."""
        known = _LAYOUTS.setdefault(packing, {})
        if ring not in known:
            known[ring] = cls._make(packing, ring)
        return known[ring]

    @classmethod
    def _make(cls, packing: DocumentLayout, ring: int) -> "RingLayout":
        rows, sequence = packing.document_BS.shape
        starts: dict[int, list[int]] = {}
        for row, first, length in packing.segments:
            assert length % (2 * ring) == 0, f"a segment of {length} positions on a ring of {ring}"
            starts.setdefault(length // ring, []).append((row * sequence + first) // ring)
        batches, indices, filled = [], [], 0
        for length, firsts in starts.items():
            batches.append((filled, len(firsts), length))
            indices.append((np.array(firsts)[:, None] + np.arange(length)).ravel())
            filled += len(firsts) * length
        order = np.concatenate(indices)
        if (order == np.arange(filled)).all():
            return cls(rows=rows, order=None, restore=None, batches=tuple(batches))
        device, order_T = packing.document_BS.device, torch.from_numpy(order)
        restore_T = order_T.argsort().to(device, non_blocking=True)
        order_T = order_T.to(device, non_blocking=True)
        return cls(rows=rows, order=order_T, restore=restore_T, batches=tuple(batches))

    def sort(self, x_BHSA: Tensor) -> Tensor:
        """[B, H, S, A] → [T, H, A], contiguous."""
        x_THA = x_BHSA.transpose(1, 2).flatten(0, 1)
        return x_THA.contiguous() if self.order is None else x_THA.index_select(0, self.order)

    def unsort(self, x_THA: Tensor) -> Tensor:
        """[T, H, A] → [B, H, S, A]."""
        x_THA = x_THA if self.restore is None else x_THA.index_select(0, self.restore)
        return x_THA.unflatten(0, (self.rows, -1)).transpose(1, 2)

    def parts(self, source: int, rank: int) -> Iterator[tuple["_RingView", "_RingView", bool]]:
        """Of every batch the queries of `rank` that see keys of `source`, those keys, and whether causally."""
        for first, number, length in self.batches:
            whole, half = slice(None), length // 2
            queries = slice(half, None) if source > rank else whole
            keys = slice(None, half) if source < rank else whole
            yield _RingView(first, number, length, queries), _RingView(first, number, length, keys), source == rank


@frozen
class _RingView:
    """Some positions of all segments of one length."""

    first: int
    number: int
    length: int
    positions: slice

    def __call__(self, x_TH: Tensor) -> Tensor:
        """[T, H, …] → [segments, H, positions, …], sharing memory."""
        batch = x_TH[self.first : self.first + self.number * self.length]
        return batch.unflatten(0, (self.number, self.length))[:, self.positions].transpose(1, 2)


# As long as the microbatch they belong to: every layer of a rank, and every recomputation, asks for the same one.
_LAYOUTS: WeakKeyDictionary[DocumentLayout, dict[int, RingLayout]] = WeakKeyDictionary()


@frozen(eq=False)
class _Passing:
    """A tensor on its way to the next rank of the ring, while another one comes from the rank before."""

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


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, layout: RingLayout, ring: ProcessGroup
    ) -> Tensor:
        q_THA = layout.sort(q_BHSA)
        own_kv = torch.stack((layout.sort(k_BKSA), layout.sort(v_BKSA)))
        exact = exact_type(q_THA.dtype)
        out_THA = torch.empty_like(q_THA, dtype=exact)
        lse_TH = q_THA.new_empty(q_THA.shape[:2], dtype=exact)
        size, rank, kv = ring.size(), ring.rank(), own_kv
        for step in range(size):
            coming = _Passing.of(kv, ring) if step + 1 < size else None
            for queries, keys, causal in layout.parts((rank - step) % size, rank):
                block_out, block_lse = attend(queries(q_THA), keys(kv[0]), keys(kv[1]), causal)
                if step == 0:
                    queries(out_THA).copy_(block_out)
                    queries(lse_TH).copy_(block_lse)
                else:
                    _merge(queries(out_THA), queries(lse_TH), block_out, block_lse)
            kv = coming.wait() if coming else kv
        out_THA = out_THA.to(q_THA.dtype)
        ctx.save_for_backward(q_THA, own_kv, out_THA, lse_TH)
        ctx.layout, ctx.ring = layout, ring
        return layout.unsort(out_THA)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q_THA, kv, out_THA, lse_TH = ctx.saved_tensors
        layout, ring = ctx.layout, ctx.ring
        grad_THA = layout.sort(grad_outputs[0])
        exact = exact_type(q_THA.dtype)
        grad_q_THA = torch.zeros_like(q_THA, dtype=exact)
        grad_kv = torch.zeros_like(kv, dtype=exact)
        size, rank, passed = ring.size(), ring.rank(), None
        for step in range(size):
            coming = _Passing.of(kv, ring) if step + 1 < size else None
            found = []
            for queries, keys, causal in layout.parts((rank - step) % size, rank):
                known = (queries(out_THA), queries(lse_TH), causal)
                grad_q, grad_k, grad_v = attend_backward(
                    queries(grad_THA), queries(q_THA), keys(kv[0]), keys(kv[1]), *known
                )
                queries(grad_q_THA).add_(grad_q)
                found.append((keys, grad_k, grad_v))
            # The sums that belong to these keys come from the rank that had the keys before.
            grad_kv = passed.wait() if passed else grad_kv
            for keys, grad_k, grad_v in found:
                keys(grad_kv[0]).add_(grad_k)
                keys(grad_kv[1]).add_(grad_v)
            passed = _Passing.of(grad_kv, ring)
            kv = coming.wait() if coming else kv
        assert passed is not None
        grad_k_TKA, grad_v_TKA = passed.wait().to(q_THA.dtype)
        grad_q_THA = grad_q_THA.to(q_THA.dtype)
        return layout.unsort(grad_q_THA), layout.unsort(grad_k_TKA), layout.unsort(grad_v_TKA), None, None


def _apply(q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, packing: DocumentLayout, ring: ProcessGroup) -> Tensor:
    return _Ring.apply(q_BHSA, k_BKSA, v_BKSA, RingLayout.of(packing, ring.size()), ring)  # pyright: ignore


# The compiler can follow neither point-to-point messages nor a table by object.
_uncompiled: Callable[..., Tensor] = torch.compiler.disable(_apply)  # pyright: ignore[reportAssignmentType]


def _merge(out_NHQA: Tensor, lse_NHQ: Tensor, block_out_NHQA: Tensor, block_lse_NHQ: Tensor) -> None:
    """Take further keys into `out` and `lse`, in place.

    out' = out - σ(d) · (out - block_out) and lse' = lse + softplus(d), with d = block_lse - lse.
    """
    block_share_NHQ = torch.sigmoid(block_lse_NHQ - lse_NHQ)
    out_NHQA.sub_(block_share_NHQ[..., None] * (out_NHQA - block_out_NHQA))
    # The same as adding softplus, which torch rounds to its argument from 20 on: too early for fp64.
    lse_NHQ.copy_(torch.logaddexp(lse_NHQ, block_lse_NHQ))
