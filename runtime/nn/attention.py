"""Attention over packed rows.

Every kernel keeps the documents of a row apart and is causal within each of them.
"""

from collections.abc import Callable, Iterable
from functools import cache
from inspect import signature
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from xtrain.plan.hardware import FLASH
from xtrain.runtime.base.device import device_type
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.nn.attention_blocks import (
    ATEN,
    PLAIN,
    Scores,
    causal_blocks,
    exact_type,
    merge_sink,
    sink_gradient,
    written_out,
    written_out_backward,
)
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.batch import DocumentLayout, KeyValueCache, LayerCache
from xtrain.runtime.nn.blockwise import blockwise_attention
from xtrain.runtime.nn.recompute import as_one


class AttentionKernel(Protocol):
    def __call__(
        self,
        q_BHSA: Tensor,
        k_BKSA: Tensor,
        v_BKSA: Tensor,
        packing: DocumentLayout,
        scores: Scores = PLAIN,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        """Compute attention.

        With rows in a cache (`packing`) there may be more keys than queries: the queries are the last positions.
        sink_H: a further score of every query of a head, whose value is zero; None: no sink.
        """
        ...


class AttentionModule(nn.Module):
    """A layer that mixes positions: its kernel, which context parallelism wraps."""

    def __init__(self, kernel: AttentionKernel, axes: Axes, scores: Scores) -> None:
        super().__init__()
        self.kernel, self.axes, self.scores = kernel, axes, scores
        self.sinks: nn.Parameter | None = None
        self._one_graph = kernel in (flex, cudnn, flash, masked)

    @property
    def compiles(self) -> bool:
        """True if torch.compile includes its kernel; ring attention and attention document by document run outside."""
        return self._one_graph and self.axes.ring is None


def by_document(
    q_BHSA: Tensor,
    k_BKSA: Tensor,
    v_BKSA: Tensor,
    packing: DocumentLayout,
    scores: Scores = PLAIN,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Compute one causal product per document: no mask is built, and nothing is computed between documents.

    Rows of a single document go through one batched call. Documents longer than the window, sinks, and capped scores
    are computed block by block.
    """
    if packing.cached is not None:
        return newest(q_BHSA, k_BKSA, v_BKSA, packing.cached, scores, sink_H)
    if packing.single and _is_causal(scores, sink_H, q_BHSA.shape[2]):
        return causal(q_BHSA, k_BKSA, v_BKSA, scores.scale)
    return _one_by_one(q_BHSA, k_BKSA, v_BKSA, packing, scores, sink_H)


def by_queries(
    q_BHSA: Tensor,
    k_BKSA: Tensor,
    v_BKSA: Tensor,
    packing: DocumentLayout,
    scores: Scores = PLAIN,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Compute rows of a single document some queries at a time, all others as `by_document`."""
    if packing.cached is None and packing.single and _is_causal(scores, sink_H, q_BHSA.shape[2]):
        return causal_blocks(q_BHSA, k_BKSA, v_BKSA, scores.scale)
    return by_document(q_BHSA, k_BKSA, v_BKSA, packing, scores, sink_H)


def _is_causal(scores: Scores, sink_H: Tensor | None, length: int) -> bool:
    """Return True if attention in a document of this length is plainly causal."""
    return sink_H is None and scores.cap is None and scores.sees_all(length)


def causal(q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, scale: float | None = None) -> Tensor:
    """Compute attention of rows that are one document each."""
    grouped = q_BHSA.shape[1] != k_BKSA.shape[1]
    return F.scaled_dot_product_attention(q_BHSA, k_BKSA, v_BKSA, is_causal=True, scale=scale, enable_gqa=grouped)


def newest(
    q_BH1A: Tensor, k_BKLA: Tensor, v_BKLA: Tensor, cache: LayerCache, scores: Scores, sink_H: Tensor | None
) -> Tensor:
    """Compute attention of the newest position of every row over its cached positions, which no window hides.

    The heads of a group become queries of one head: one position needs no causal order, and keys and values are read in
    place instead of being repeated for every head.
    """
    groups = k_BKLA.shape[1]
    q_BKGA = q_BH1A.view(len(q_BH1A), groups, -1, q_BH1A.shape[-1])
    mask = cache.seen(k_BKLA.shape[2], scores.window)
    if sink_H is None and scores.cap is None:
        out_BKGA = F.scaled_dot_product_attention(q_BKGA, k_BKLA, v_BKLA, attn_mask=mask, scale=scores.scale)
        return out_BKGA.view_as(q_BH1A)
    out_BKGA, lse_BKG = written_out(q_BKGA, k_BKLA, v_BKLA, mask, scores)
    if sink_H is not None:
        merge_sink(out_BKGA, lse_BKG, sink_H.view(groups, -1))
    return out_BKGA.view_as(q_BH1A)


def _by_document(
    q_BHSA: Tensor,
    k_BKSA: Tensor,
    v_BKSA: Tensor,
    packing: DocumentLayout,
    scores: Scores,
    sink_H: Tensor | None,
) -> Tensor:
    rows, sequence = q_BHSA.shape[0], q_BHSA.shape[2]
    if not _is_causal(scores, sink_H, packing.longest):
        return blockwise_attention(q_BHSA, k_BKSA, v_BKSA, packing, scores, sink_H)
    by_row: list[list[Tensor]] = [[] for _ in range(rows)]
    for row, first, length in packing.segments:
        part = slice(first, first + length)
        q_1HLA, k_1KLA, v_1KLA = (x[row : row + 1, :, part] for x in (q_BHSA, k_BKSA, v_BKSA))
        by_row[row].append(causal(q_1HLA, k_1KLA, v_1KLA, scores.scale))
    out = torch.cat([torch.cat(parts, dim=2) if len(parts) > 1 else parts[0] for parts in by_row], dim=0)
    assert out.shape[2] == sequence
    return out


# Compiled, each number and length of documents would get a graph of its own.
_one_by_one: Callable[..., Tensor] = torch.compiler.disable(_by_document)  # pyright: ignore[reportAssignmentType]


def masked(
    q_BHSA: Tensor,
    k_BKSA: Tensor,
    v_BKSA: Tensor,
    packing: DocumentLayout,
    scores: Scores = PLAIN,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Compute scaled dot-product attention with a boolean mask; S² booleans per row, for short rows and any device.

    With sinks or capped scores it is written out, and takes the memory of S² scores per head.
    """
    if packing.cached is not None:
        return newest(q_BHSA, k_BKSA, v_BKSA, packing.cached, scores, sink_H)
    document_BS = packing.document_BS
    sequence = q_BHSA.shape[2]
    seen_SS = torch.ones(sequence, sequence, dtype=torch.bool, device=q_BHSA.device).tril()
    if scores.window is not None:
        seen_SS = seen_SS.triu(1 - scores.window)
    mask_B1SS = (document_BS[:, None, :, None] == document_BS[:, None, None, :]) & seen_SS
    if sink_H is not None or scores.cap is not None:
        return _WrittenOut.apply(q_BHSA, k_BKSA, v_BKSA, mask_B1SS, sink_H, scores)  # pyright: ignore
    grouped = q_BHSA.shape[1] != k_BKSA.shape[1]
    return F.scaled_dot_product_attention(
        q_BHSA, k_BKSA, v_BKSA, attn_mask=mask_B1SS, scale=scores.scale, enable_gqa=grouped
    )


class _WrittenOut(torch.autograd.Function):
    """Attention with a mask in plain operations, which saves the logsumexp of scores instead of the scores."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHSA: Tensor,
        k_BKSA: Tensor,
        v_BKSA: Tensor,
        mask_B1SS: Tensor,
        sink_H: Tensor | None,
        scores: Scores,
    ) -> Tensor:
        groups = q_BHSA.shape[1] // k_BKSA.shape[1]
        k_BHSA, v_BHSA = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k_BKSA, v_BKSA))

        def forward() -> tuple[Tensor, Tensor]:
            out_BHSA, lse_BHS = written_out(q_BHSA, k_BHSA, v_BHSA, mask_B1SS, scores)
            if sink_H is not None:
                exact = out_BHSA.to(exact_type(out_BHSA.dtype))
                merge_sink(exact, lse_BHS, sink_H[:, None])
                out_BHSA = exact.to(out_BHSA.dtype)
            return out_BHSA.transpose(1, 2).contiguous().transpose(1, 2), lse_BHS  # layout of the next product

        out_BHSA, lse_BHS = as_one("attention", forward)
        ctx.save_for_backward(q_BHSA, k_BKSA, v_BKSA, out_BHSA, lse_BHS, mask_B1SS, sink_H)
        ctx.scores = scores
        return out_BHSA

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q_BHSA, k_BKSA, v_BKSA, out_BHSA, lse_BHS, mask_B1SS, sink_H = ctx.saved_tensors
        heads, groups = k_BKSA.shape[1], q_BHSA.shape[1] // k_BKSA.shape[1]
        k_BHSA, v_BHSA = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k_BKSA, v_BKSA))
        grads = written_out_backward(grad_outputs[0], q_BHSA, k_BHSA, v_BHSA, out_BHSA, lse_BHS, mask_B1SS, ctx.scores)
        grad_k, grad_v = (x.unflatten(1, (heads, groups)).sum(2) for x in grads[1:])
        grad_sink_H = None
        if sink_H is not None:
            each_BHS = sink_gradient(grad_outputs[0], out_BHSA, lse_BHS, sink_H[:, None])
            grad_sink_H = each_BHS.sum((0, 2)).to(sink_H.dtype)
        return grads[0], grad_k, grad_v, None, grad_sink_H, None


def flex(
    q_BHSA: Tensor,
    k_BKSA: Tensor,
    v_BKSA: Tensor,
    packing: DocumentLayout,
    scores: Scores = PLAIN,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Compute FlexAttention with a block mask of the documents: compiled on CUDA, where it skips blocks between
    documents and beyond the window.

    Rows of a single document need no mask. Prompts have none either: it would be compiled for every length.
    """
    if scores.window not in packing.block_masks:
        return by_document(q_BHSA, k_BKSA, v_BKSA, packing, scores, sink_H)
    if isinstance(q_BHSA, FakeTensor):
        out_BHSA, lse_BHS = _stand_in(q_BHSA, k_BKSA, v_BKSA)
    else:
        # In a compiled block it is part of the block's own graph.
        inside = torch.compiler.is_compiling()
        attend: Callable[..., Any] = flex_attention if inside else _flex_functions(q_BHSA.device.type)[0]
        grouped = q_BHSA.shape[1] != k_BKSA.shape[1]
        attended: Any = attend(
            *(q_BHSA, k_BKSA, v_BKSA),
            score_mod=None if scores.cap is None else _capped(scores.cap),
            block_mask=packing.block_masks[scores.window],
            scale=scores.scale,
            enable_gqa=grouped,
            return_aux=None if sink_H is None else AuxRequest(lse=True),
        )
        out_BHSA, lse_BHS = (attended, None) if sink_H is None else (attended[0], attended[1].lse)
    if sink_H is None:
        return out_BHSA
    assert lse_BHS is not None
    # exp(lse - logaddexp(lse, sink)): the part of the softmax that the sink leaves.
    return out_BHSA * torch.sigmoid(lse_BHS - sink_H[:, None])[..., None].to(out_BHSA.dtype)


def _stand_in(q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor) -> tuple[Tensor, Tensor]:
    """Run an operation with the memory of flex, whose compiler does not accept fake tensors."""
    return ATEN._scaled_dot_product_flash_attention_for_cpu(q_BHSA, k_BKSA, v_BKSA, 0.0, True)


def with_block_masks(packing: DocumentLayout, kernels: Iterable[tuple[Scores, bool]]) -> DocumentLayout:
    """Return the packing with the block masks that flex needs.

    kernels: the scores of all layers, and whether they have sinks.
    """
    document_BS = packing.document_BS
    rows, sequence = document_BS.shape
    windows = {s.window for s, sinks in kernels if not (packing.single and not sinks and _is_causal(s, None, sequence))}
    if not windows:
        return packing
    _, make_mask = _flex_functions(document_BS.device.type)

    def mask_of(window: int) -> Any:
        def seen(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (q >= kv) & (q - kv < window) & (document_BS[b, q] == document_BS[b, kv])

        return make_mask(seen, rows, None, sequence, sequence, device=str(document_BS.device))

    return evolve(packing, block_masks={window: mask_of(window or sequence) for window in windows})


@cache
def _capped(cap: float) -> Callable[..., Tensor]:
    """Return the same function for the same cap: the compiler makes a kernel for each function."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod


@cache
def _flex_functions(device_type: str) -> tuple[Callable[..., Tensor], Callable]:
    if device_type != "cuda":
        return flex_attention, create_block_mask  # pyright: ignore[reportReturnType]
    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask, dynamic=False)  # pyright: ignore


def cudnn(
    q_BHSA: Tensor,
    k_BKSA: Tensor,
    v_BKSA: Tensor,
    packing: DocumentLayout,
    scores: Scores = PLAIN,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Compute rows of a single document with cuDNN's kernel, all others as `flex`. Shapes that cuDNN does not take go
    to the next of torch's kernels."""
    plain = packing.cached is None and packing.single and _is_causal(scores, sink_H, q_BHSA.shape[2])
    if not plain or device_type(q_BHSA) != "cuda":
        return flex(q_BHSA, k_BKSA, v_BKSA, packing, scores, sink_H)
    with sdpa_kernel(CUDNN_FIRST, set_priority=True):
        return causal(q_BHSA, k_BKSA, v_BKSA, scores.scale)


CUDNN_FIRST: Final = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def flash(
    q_BHSA: Tensor,
    k_BKSA: Tensor,
    v_BKSA: Tensor,
    packing: DocumentLayout,
    scores: Scores = PLAIN,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Compute all documents of a microbatch in one call of the release of FlashAttention that torch has activated. The
    plan refuses capped scores and sinks. Positions of generated texts are computed as by `by_document`."""
    if packing.bounds is None:
        return by_document(q_BHSA, k_BKSA, v_BKSA, packing, scores, sink_H)
    rows, sequence = q_BHSA.shape[0], q_BHSA.shape[2]
    q_THA, k_TKA, v_TKA = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHSA, k_BKSA, v_BKSA))
    bounds = packing.bounds
    out_THA: Any = varlen_attn(
        q_THA,
        k_TKA,
        v_TKA,
        bounds,
        bounds,
        sequence,
        sequence,
        scale=scores.scale,
        window_size=(-1 if scores.window is None else scores.window - 1, 0),
        **GROUPED,
    )
    return out_THA.unflatten(0, (rows, sequence)).transpose(1, 2)


# Versions of torch without this argument do not compare the numbers of heads.
GROUPED: Final[dict[str, Any]] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def with_bounds(packing: DocumentLayout) -> DocumentLayout:
    """Return the packing with the bounds of its documents, computed on the device. Compiled code is made once for any
    number of documents."""
    document_T = packing.document_BS.flatten()
    numbers = torch.arange(len(packing.segments) + 1, device=document_T.device, dtype=torch.int32)
    bounds = torch.searchsorted(document_T, numbers, out_int32=True)
    maybe_mark_dynamic(bounds, 0)
    return evolve(packing, bounds=bounds)


def activate(kernel: str) -> None:
    """Let torch use the release of FlashAttention of a kernel, if it is one. Raises EnvironmentFault X715 if torch or
    the package lacks it."""
    if (release := FLASH.get(kernel)) is None:
        return
    try:
        activate_flash_attention_impl(release.registered)
    except (ImportError, RuntimeError, ValueError) as error:
        message = f"torch {torch.__version__} cannot use {release.title}: {error}"
        raise EnvironmentFault("X715", f"{message}; {release.install}, or use attention auto") from error


def in_tiles(
    q_BHSA: Tensor,
    k_BKSA: Tensor,
    v_BKSA: Tensor,
    packing: DocumentLayout,
    scores: Scores = PLAIN,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Compute the same numbers for a position whatever else is in its batch, in training and in generation."""
    from xtrain.runtime.nn import invariant  # only for runs that ask for it

    if packing.cached is None:
        return invariant.Attended.apply(by_document, packing, scores, q_BHSA, k_BKSA, v_BKSA, sink_H)  # pyright: ignore
    assert isinstance(packing.cached, KeyValueCache)
    return invariant.newest(q_BHSA, k_BKSA, v_BKSA, packing.cached, scores, sink_H)


KERNELS: dict[str, AttentionKernel] = {
    "documents": by_document,
    "blocks": by_queries,
    "mask": masked,
    "flex": flex,
    "cudnn": cudnn,
    **dict.fromkeys(FLASH, flash),
    "tiles": in_tiles,
}
