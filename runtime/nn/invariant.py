"""Batch-invariant computation: the numbers of a token depend neither on other tokens of a batch nor on its place there.

Kernels of matrix products and pointwise functions compute a row differently with other numbers of rows. Here they
always get the same shapes: products `TILE` rows at a time, pointwise functions whole vector registers, and attention
`QUERIES` queries and `KEYS` keys of a document at a time (He et al. 2025, "Defeating Nondeterminism in LLM Inference").
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from xtrain.runtime.nn.attention_blocks import Scores
from xtrain.runtime.nn.batch import DocumentLayout, KeyValueCache

TILE: Final = 32  # rows of a product
COLUMNS: Final = 16  # MKL computes rows at the end of a tile otherwise, if a product is 6 or 10 wide
LANES: Final = 64  # numbers of a pointwise function at least: torch computes fewer one by one, with other rounding
QUERIES: Final = 16
KEYS: Final = 64


class Invariant(TorchFunctionMode):
    """Replaces functions whose results depend on the number of rows."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        replaced = _REPLACED.get(func)
        if replaced is None or given.get("out") is not None or any(issubclass(kind, DTensor) for kind in types):
            return func(*args, **given)
        return replaced(func, *args, **given)


def linear(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return x · Wᵀ + b, `TILE` rows at a time."""
    out = _TiledProduct.apply(x.flatten(0, -2), weight_ND)
    assert isinstance(out, Tensor)
    out = out.view(*x.shape[:-1], len(weight_ND))
    return out if bias_N is None else out + bias_N


class _TiledProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ND: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ND)
        tokens = len(x_TD)
        filled_TD = F.pad(x_TD, (0, 0, 0, -tokens % TILE)).contiguous()
        weight_DN = F.pad(weight_ND, (0, 0, 0, -len(weight_ND) % COLUMNS)).t()
        out_TN = filled_TD.new_empty(len(filled_TD), weight_DN.shape[1])
        for first in range(0, len(filled_TD), TILE):
            torch.mm(filled_TD[first : first + TILE], weight_DN, out=out_TN[first : first + TILE])
        return out_TN[:tokens, : len(weight_ND)].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_TN,), (x_TD, weight_ND) = grad_outputs, ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad
        return grad_TN @ weight_ND if wants_x else None, grad_TN.t() @ x_TD if wants_weight else None


def _linear(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(input, weight, bias)


def _product(func: Any, left: Tensor, right: Tensor) -> Tensor:
    return linear(left, right.t()) if right.dim() == 2 and left.dim() >= 2 else func(left, right)


def _added(func: Any, bias: Tensor, left: Tensor, right: Tensor, **more: Any) -> Tensor:
    return func(bias, left, right, **more) if more else linear(left, right.t(), bias)


def _added_in_place(func: Any, total: Tensor, left: Tensor, right: Tensor, **more: Any) -> Tensor:
    return func(total, left, right, **more) if more else total.add_(linear(left, right.t()))


def _pointwise(func: Any, x: Tensor, *more: Any, **settings: Any) -> Tensor:
    flat = F.pad(x.reshape(-1), (0, -x.numel() % LANES))
    return func(flat, *more, **settings)[: x.numel()].view(x.shape)


def _in_place(func: Any, x: Tensor) -> Tensor:
    return x.copy_(_pointwise(func, x))


def _of_rows(func: Any, x: Tensor, *more: Any, **settings: Any) -> Tensor:
    """Call a reduction over the last dim with whole tiles of rows."""
    rows = x.reshape(-1, x.shape[-1])
    out = func(F.pad(rows, (0, 0, 0, -len(rows) % LANES)), *more, **settings)[: len(rows)]
    return out.view(*x.shape[:-1], *out.shape[1:])


_REPLACED: Final[dict[Any, Callable[..., Tensor]]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _product),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _added),
    Tensor.addmm_: _added_in_place,
    **dict.fromkeys((F.silu, F.gelu, F.softplus), _pointwise),
    **dict.fromkeys((torch.sigmoid, torch.exp, torch.tanh, torch.log1p), _pointwise),
    **dict.fromkeys((Tensor.sigmoid, Tensor.exp, Tensor.tanh, Tensor.log1p, Tensor.log), _pointwise),
    **dict.fromkeys((Tensor.cos, Tensor.sin, torch.cos, torch.sin), _pointwise),
    **dict.fromkeys((Tensor.sigmoid_, Tensor.exp_, Tensor.tanh_), _in_place),
    **dict.fromkeys((torch.logsumexp, Tensor.logsumexp, Tensor.softmax, Tensor.log_softmax), _of_rows),
}


def attend(
    q_NHQA: Tensor, k_NKLA: Tensor, v_NKLA: Tensor, first_N: Tensor, scores: Scores, sink_H: Tensor | None
) -> Tensor:
    """Return causal attention of queries of documents, [N, H, Q, A], in tiles of fixed shapes.

    first_N: position of the first query of each document. Keys are of positions from 0 on. Tiles that no query sees
    change nothing, so a result does not depend on how many there are.
    """
    documents, heads, queries, width = q_NHQA.shape
    exact = torch.float64 if q_NHQA.dtype == torch.float64 else torch.float32
    q_NHQA, k_NHLA, v_NHLA = (x.to(exact) for x in (q_NHQA, _repeated(k_NKLA, heads), _repeated(v_NKLA, heads)))
    factor, wide = scores.factor(width), v_NKLA.shape[-1]
    q_NHQA = F.pad(q_NHQA, (0, -width % COLUMNS, 0, -queries % QUERIES))
    k_NHLA, v_NHLA = (F.pad(x, (0, -x.shape[3] % COLUMNS, 0, -x.shape[2] % KEYS)) for x in (k_NHLA, v_NHLA))
    q_XTQA = q_NHQA.reshape(documents * heads, -1, QUERIES, q_NHQA.shape[-1])
    tiles = q_XTQA.shape[1]
    position_NQ = first_N[:, None] + torch.arange(tiles * QUERIES, device=q_NHQA.device)

    def scores_of(first: int) -> Tensor:
        """Return the scores of a tile of keys, [X, T, Q, keys]."""
        k_XKA = k_NHLA[:, :, first : first + KEYS].reshape(-1, 1, KEYS, k_NHLA.shape[-1])
        scored = _batched(q_XTQA, k_XKA.mT) * factor
        if scores.cap is not None:
            scored = scores.cap * torch.tanh(scored / scores.cap)
        key_K = torch.arange(first, first + KEYS, device=q_NHQA.device)
        seen_NQK = key_K <= position_NQ[..., None]
        if scores.window is not None:
            seen_NQK &= key_K > position_NQ[..., None] - scores.window
        seen = seen_NQK[:, None].expand(-1, heads, -1, -1).reshape(-1, tiles, QUERIES, KEYS)
        return scored.masked_fill(~seen, -torch.inf)

    starts = range(0, k_NHLA.shape[2], KEYS)
    top_XTQ, sink_XTQ = q_XTQA.new_full(q_XTQA.shape[:3], torch.finfo(exact).min), None
    if sink_H is not None:
        sink_XTQ = sink_H.to(exact)[None, :, None, None].expand(documents, heads, tiles, QUERIES).reshape_as(top_XTQ)
        top_XTQ = torch.maximum(top_XTQ, sink_XTQ)
    for first in starts:
        top_XTQ = torch.maximum(top_XTQ, scores_of(first).amax(-1))
    out_XTQA, total_XTQ = top_XTQ.new_zeros(*top_XTQ.shape, v_NHLA.shape[-1]), torch.zeros_like(top_XTQ)
    if sink_XTQ is not None:
        total_XTQ = (sink_XTQ - top_XTQ).exp()
    for first in starts:
        weight = (scores_of(first) - top_XTQ[..., None]).exp()
        total_XTQ = total_XTQ + weight.sum(-1)
        v_XKA = v_NHLA[:, :, first : first + KEYS].reshape(-1, 1, KEYS, v_NHLA.shape[-1])
        out_XTQA = out_XTQA + _batched(weight, v_XKA)
    out_NHQA = (out_XTQA / total_XTQ[..., None]).view(documents, heads, tiles * QUERIES, -1)
    return out_NHQA[:, :, :queries, :wide]


class Attended(torch.autograd.Function):
    """Attention of the documents of packed rows, whose gradient is of `plain`, another kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        plain: Callable[..., Tensor],
        packing: DocumentLayout,
        scores: Scores,
        q_BHSA: Tensor,
        k_BKSA: Tensor,
        v_BKSA: Tensor,
        sink_H: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(q_BHSA, k_BKSA, v_BKSA, sink_H)
        ctx.plain, ctx.packing, ctx.scores = plain, packing, scores
        segments, longest = packing.segments, packing.longest

        def documents(x_BHSA: Tensor) -> Tensor:
            cuts = (x_BHSA[row, :, first : first + length] for row, first, length in segments)
            return torch.stack([F.pad(cut, (0, 0, 0, longest - cut.shape[1])) for cut in cuts])

        first_N = torch.zeros(len(segments), dtype=torch.int64, device=q_BHSA.device)
        found_NHLA = attend(documents(q_BHSA), documents(k_BKSA), documents(v_BKSA), first_N, scores, sink_H)
        out_BHSA = q_BHSA.new_empty(*q_BHSA.shape[:3], v_BKSA.shape[-1])
        for found_HLA, (row, first, length) in zip(found_NHLA, segments, strict=True):
            out_BHSA[row, :, first : first + length] = found_HLA[:, :length]
        return out_BHSA

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        given = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            *tensors, sink_H = given
            out = ctx.plain(*tensors, ctx.packing, ctx.scores, sink_H)
        wanted = [x for x in given if x is not None]
        grads = iter(torch.autograd.grad(out, wanted, grad_outputs[0]))
        return None, None, None, *(None if x is None else next(grads) for x in given)


def newest(
    q_BH1A: Tensor, k_BKLA: Tensor, v_BKLA: Tensor, cache: KeyValueCache, scores: Scores, sink_H: Tensor | None
) -> Tensor:
    """Return attention of the newest position of every row over its cached positions, which are moved to the places
    that they have in their documents."""
    rows, kept = len(q_BH1A), k_BKLA.shape[2]
    seen, device = cache.seen_B11L, q_BH1A.device
    missing_B = torch.zeros(rows, dtype=torch.int64, device=device)
    if seen is not None:
        missing_B = (~seen[:, 0, 0]).sum(-1)
    place_BL = torch.arange(cache.filled + 1, device=device) + missing_B[:, None]  # in the row, of document positions
    known_BL = (place_BL <= cache.filled) & (place_BL > cache.filled - kept)
    at_B1L1 = (place_BL % kept if kept <= cache.filled else place_BL.clamp(max=kept - 1))[:, None, :, None]

    def moved(x_BKLA: Tensor) -> Tensor:
        found = x_BKLA.gather(2, at_B1L1.expand(-1, x_BKLA.shape[1], -1, x_BKLA.shape[3]))
        return found.masked_fill(~known_BL[:, None, :, None], 0)

    out = attend(q_BH1A, moved(k_BKLA), moved(v_BKLA), cache.filled - missing_B, scores, sink_H)
    return out.to(q_BH1A.dtype)


def _batched(left_XTMK: Tensor, right_X1KN: Tensor) -> Tensor:
    """Return the products of tiles, [X, T, M, N], each of the same shape."""
    tiles, right = left_XTMK.shape[1], right_X1KN.expand(-1, left_XTMK.shape[1], -1, -1)
    out = torch.bmm(left_XTMK.flatten(0, 1).contiguous(), right.reshape(-1, *right.shape[2:]).contiguous())
    return out.unflatten(0, (-1, tiles))


def _repeated(x_NKLA: Tensor, heads: int) -> Tensor:
    return x_NKLA if x_NKLA.shape[1] == heads else x_NKLA.repeat_interleave(heads // x_NKLA.shape[1], dim=1)
