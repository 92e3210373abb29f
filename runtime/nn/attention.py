"""Attention over packed rows, and multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

Every kernel keeps the documents of a row apart and is causal within each of them.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from xtrain.blocks.latent_attention import LatentAttentionLayer
from xtrain.plan.architecture import Architecture
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
from xtrain.runtime.nn.axes import Axes, column_parallel_input, local
from xtrain.runtime.nn.batch import DocumentLayout, LayerCache
from xtrain.runtime.nn.blockwise import blockwise_attention
from xtrain.runtime.nn.layers import Linear, RMSNorm, Rotation
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
        self._one_graph = kernel in (flex, masked)

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


KERNELS: dict[str, AttentionKernel] = {"documents": by_document, "blocks": by_queries, "mask": masked, "flex": flex}


NORM_EPS = 1e-6  # of the norms of narrow vectors, whatever the other norms have


class LatentAttention(AttentionModule):
    """Multi-head latent attention of a `LatentAttentionLayer`. Each rank computes narrow vectors for its own positions,
    and tensor parallelism gathers these."""

    def __init__(self, arch: Architecture, kernel: AttentionKernel, axes: Axes, layer: LatentAttentionLayer) -> None:
        super().__init__(kernel, axes, Scores(scale=layer.scale))
        self.width, self.interleaved = arch.head_dim, layer.interleaved
        self.narrow = (layer.kv_rank, layer.rope_dim)
        self.query = (layer.nope_dim, layer.rope_dim)
        self.expanded = (layer.nope_dim, layer.value_dim)
        self.q_proj = self.q_a_proj = self.q_a_layernorm = self.q_b_proj = None
        if layer.q_rank is None:
            self.q_proj = Linear(arch.dim, arch.heads * layer.query_dim)
        else:
            self.q_a_proj = Linear(arch.dim, layer.q_rank, bias=layer.bias)
            self.q_a_layernorm = RMSNorm(layer.q_rank, NORM_EPS)
            self.q_b_proj = Linear(layer.q_rank, arch.heads * layer.query_dim)
        self.kv_a_proj_with_mqa = Linear(arch.dim, sum(self.narrow), bias=layer.bias)
        self.kv_a_layernorm = RMSNorm(layer.kv_rank, NORM_EPS, by_head=True)
        self.kv_b_proj = Linear(layer.kv_rank, arch.heads * sum(self.expanded))
        self.o_proj = Linear(arch.heads * layer.value_dim, arch.dim, bias=layer.bias)

    def forward(
        self, x_BSD: Tensor, rotate: Rotation | None, packing: DocumentLayout, cache: LayerCache | None = None
    ) -> Tensor:
        assert rotate is not None
        tensor = self.axes.tensor
        narrow_BSR = column_parallel_input(self.kv_a_proj_with_mqa(x_BSD), tensor)
        latent_BSR, shared_BSP = narrow_BSR.split(self.narrow, dim=-1)
        latent_BSR = self.kv_a_layernorm(latent_BSR)
        k_BS1P = self._turned(shared_BSP[:, :, None], rotate)
        q_BSHN, q_BSHP = self._heads(self._queries(x_BSD), self.query)
        q_BSHP = self._turned(q_BSHP, rotate)
        if cache is not None and self.keeps_latent:
            (known_B1LC,) = cache.extended(self, torch.cat((latent_BSR[:, None], k_BS1P.transpose(1, 2)), dim=-1))
            if cache.filled:
                out_BSHV = self._newest(q_BSHN, q_BSHP, known_B1LC, packing)
                return self.o_proj.row_parallel(out_BSHV.flatten(-2), tensor)
        k_BSHN, v_BSHV = self._heads(self.kv_b_proj(latent_BSR), self.expanded)
        # Heads stay the inner dimension in memory, also of the result, as the last product takes it.
        q_BSHA = torch.cat((q_BSHN, q_BSHP), dim=-1)
        k_BSHA = torch.cat((k_BSHN, k_BS1P.expand(-1, -1, k_BSHN.shape[2], -1)), dim=-1)
        q_BHSA, k_BHSA, v_BHSA = (self._padded(x).transpose(1, 2) for x in (q_BSHA, k_BSHA, v_BSHV))
        if cache is not None and not self.keeps_latent:
            k_BHSA, v_BHSA = cache.extended(self, k_BHSA, v_BHSA)
        out_BHSA = self.kernel(q_BHSA, k_BHSA, v_BHSA, packing, self.scores)
        out_BSHV = out_BHSA.transpose(1, 2)[..., : self.expanded[1]]
        return self.o_proj.row_parallel(out_BSHV.flatten(-2), tensor)

    @property
    def keeps_latent(self) -> bool:
        """True if a cache has narrow vectors instead of keys and values, as in `LatentAttentionLayer.cached`."""
        matrix = self.kv_b_proj
        return type(matrix) is Linear and matrix.quantised is None and matrix.fp8 is None

    def _newest(self, q_BSHN: Tensor, q_BSHP: Tensor, known_B1LC: Tensor, packing: DocumentLayout) -> Tensor:
        """Return the values [B, 1, H, V] of the newest position (section 2.1.2 of the paper).

        As q · (K · c) = (q · K) · c, keys are never expanded, and values only after summing over positions.
        """
        matrix_HXR = local(self.kv_b_proj.weight).unflatten(0, (-1, sum(self.expanded)))
        key_HNR, value_HVR = matrix_HXR.split(self.expanded, dim=1)
        q_BHSR = torch.einsum("bshn,hnr->bhsr", q_BSHN, key_HNR)
        q_BHSC = torch.cat((q_BHSR, q_BSHP.transpose(1, 2)), dim=-1)
        # The values of the part with positions are dropped: kernels are faster if keys and values are one tensor.
        out_BHSC = self.kernel(q_BHSC, known_B1LC, known_B1LC, packing, self.scores)
        return torch.einsum("bhsr,hvr->bshv", out_BHSC[..., : self.narrow[0]], value_HVR)

    def _queries(self, x_BSD: Tensor) -> Tensor:
        tensor = self.axes.tensor
        if self.q_a_proj is None or self.q_a_layernorm is None or self.q_b_proj is None:
            assert self.q_proj is not None
            return self.q_proj(column_parallel_input(x_BSD, tensor))
        return self.q_b_proj(column_parallel_input(self.q_a_layernorm(self.q_a_proj(x_BSD)), tensor))

    def _heads(self, flat_BSH: Tensor, widths: tuple[int, int]) -> tuple[Tensor, ...]:
        """Return both parts of every head, [B, S, H, …]."""
        return flat_BSH.unflatten(-1, (-1, sum(widths))).split(widths, dim=-1)

    def _turned(self, x_BSHP: Tensor, rotate: Rotation) -> Tensor:
        """Rotate by position. Adjacent pairs are moved into halves, as `Rotation` takes them: products of queries and
        keys stay the same."""
        if self.interleaved:
            x_BSHP = x_BSHP.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(x_BSHP.transpose(1, 2)).transpose(1, 2)

    def _padded(self, x_BSHA: Tensor) -> Tensor:
        missing = self.width - x_BSHA.shape[-1]
        return F.pad(x_BSHA, (0, missing)) if missing else x_BSHA
