"""DeepSeek sparse attention of a `SparseLatentAttentionLayer`: the indexer and the attention over what it chooses."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.blocks.attention import TILE
from xtrain.blocks.sparse_attention import SparseLatentAttentionLayer
from xtrain.plan.architecture import Architecture
from xtrain.runtime.base.collectives import gather, to_heads, to_positions
from xtrain.runtime.nn.attention import AttentionKernel
from xtrain.runtime.nn.attention_blocks import exact_type
from xtrain.runtime.nn.axes import Axes, local
from xtrain.runtime.nn.batch import DocumentLayout, LayerCache
from xtrain.runtime.nn.block import BlockSettings, Built, Values, builds
from xtrain.runtime.nn.latent_attention import LatentAttention
from xtrain.runtime.nn.layers import Linear, Rotation
from xtrain.runtime.nn.recompute import as_one

NORM_EPS = 1e-6  # of the norm of keys, whatever the other norms have

# shapes: as in latent_attention.py; J index heads, I width of an index head, L positions that are known


class Indexer(nn.Module):
    """Scores of earlier positions, in at least fp32. Every tensor-parallel rank computes all index heads."""

    def __init__(self, arch: Architecture, axes: Axes, layer: SparseLatentAttentionLayer) -> None:
        super().__init__()
        assert layer.q_rank is not None
        self.axes, self.heads, self.width = axes, layer.index_heads, layer.index_dim
        self.interleaved = layer.index_interleaved
        self.wq_b = Linear(layer.q_rank, layer.index_heads * layer.index_dim)
        self.wk = Linear(arch.dim, layer.index_dim)
        self.k_norm = KeyNorm(layer.index_dim)
        self.weights_proj = Linear(arch.dim, layer.index_heads)

    def forward(self, x_BSD: Tensor, narrow_BSR: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, J, S, I], keys [B, 1, L, I] of the whole row, and weights [B, J, S]. x_BSD: this rank's
        positions between blocks. narrow_BSR: narrow vectors of queries, gathered over tensor parallelism."""
        joined_BSK = torch.cat((self.k_norm(self.wk(x_BSD)), self.weights_proj(x_BSD)), dim=-1)
        if (tensor := self.axes.tensor) is not None and tensor.sequence:
            joined_BSK = gather(joined_BSK, 1, tensor.group)
        k_BSI, weights_BSJ = joined_BSK.split((self.width, self.heads), dim=-1)
        q_BJSI = self.wq_b(narrow_BSR).unflatten(-1, (self.heads, self.width)).transpose(1, 2)
        q_BJSI, k_B1LI = (rotate(each, interleaved=self.interleaved) for each in (q_BJSI, k_BSI[:, None]))
        if self.axes.ulysses is not None:
            k_B1LI = gather(k_B1LI, 2, self.axes.ulysses)
        return q_BJSI, k_B1LI, weights_BSJ.transpose(1, 2)

    def scores(self, q_BJSI: Tensor, k_B1LI: Tensor, weights_BJS: Tensor) -> Tensor:
        """Return I [B, S, L] = Σ_j w_j / √J · relu(q_j · k / √I)."""
        exact = exact_type(q_BJSI.dtype)
        products_BJSL = q_BJSI.to(exact) @ k_B1LI.to(exact).mT
        products_BJSL = products_BJSL.mul_(self.width**-0.5).relu_()
        return products_BJSL.mul_((weights_BJS.to(exact) * self.heads**-0.5)[..., None]).sum(1)


class KeyNorm(nn.Module):
    """LayerNorm of the keys of index heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], local(self.weight), local(self.bias), NORM_EPS)


def highest(scores: Tensor, seen: Tensor, count: int) -> Tensor:
    """Return True at the `count` highest scores of each query among those that it sees, at all of them if there are
    fewer; of equal ones at the first. scores, seen: [..., L]."""
    scores = scores.masked_fill(~seen, -math.inf)
    if scores.shape[-1] <= count:
        return seen.expand_as(scores)
    least = scores.topk(count, dim=-1).values[..., -1:]
    above, equal = scores > least, (scores == least) & seen
    return above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


class SparseLatentAttention(LatentAttention):
    """Latent attention over chosen positions. Scores of all pairs of positions of a row are computed, for attention as
    well; those that are not chosen are hidden."""

    compiles = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(
        self, arch: Architecture, kernel: AttentionKernel, axes: Axes, layer: SparseLatentAttentionLayer
    ) -> None:
        super().__init__(arch, kernel, axes, layer)
        self.count, self.gives, self.takes = layer.chosen, layer.gives, layer.takes
        self.indexer = None if layer.takes else Indexer(arch, axes, layer)

    def chosen(
        self,
        x_BSD: Tensor,
        narrow_BSR: Tensor,
        rotate: Rotation,
        packing: DocumentLayout,
        cache: LayerCache | None,
        values: Values,
    ) -> Tensor | None:
        if cache is None and packing.document_BS.shape[1] <= self.count:
            return None
        if self.indexer is None:
            return values[self.takes][0]
        with torch.no_grad():
            indexer = self.indexer
            chosen_BSL = self._choice(indexer, x_BSD, narrow_BSR, rotate, packing, cache)  # pyright: ignore[reportCallIssue]
        if self.gives:
            values[self.gives] = (chosen_BSL,)
        return chosen_BSL

    @torch.compiler.disable  # compiled, each packing would get a graph of its own
    def _choice(
        self,
        indexer: Indexer,
        x_BSD: Tensor,
        narrow_BSR: Tensor,
        rotate: Rotation,
        packing: DocumentLayout,
        cache: LayerCache | None,
    ) -> Tensor:
        # Only the choice is kept for a second run, not the products that it follows from.
        q_BJSI, k_B1LI, weights_BJS = as_one("choice", lambda: indexer(x_BSD, narrow_BSR, rotate))
        if cache is not None:
            (k_B1LI,) = cache.extended(indexer, k_B1LI)
            if cache.filled:
                scores_BSL, seen = indexer.scores(q_BJSI, k_B1LI, weights_BJS), cache.seen(k_B1LI.shape[2], None)
                seen_BSL = torch.ones_like(scores_BSL, dtype=torch.bool) if seen is None else seen[:, 0]
                return highest(scores_BSL, seen_BSL, self.count)
        (chosen_BSL,) = as_one("attention", lambda: (self._of_rows(indexer, q_BJSI, k_B1LI, weights_BJS, packing),))
        ulysses = self.axes.ulysses
        return chosen_BSL if ulysses is None else gather(chosen_BSL, 1, ulysses)

    def _of_rows(
        self, indexer: Indexer, q_BJSI: Tensor, k_B1LI: Tensor, weights_BJS: Tensor, packing: DocumentLayout
    ) -> Tensor:
        """Return the positions of whole rows that each query of this rank sees, bool [B, S, L], some queries at a
        time."""
        document_BL, ulysses = packing.document_BS, self.axes.ulysses
        (rows, length), own = document_BL.shape, q_BJSI.shape[2]
        before = 0 if ulysses is None else ulysses.rank() * own
        chosen_BSL = torch.zeros(rows, own, length, dtype=torch.bool, device=document_BL.device)
        place_L = torch.arange(length, device=document_BL.device)
        for first in range(0, own, TILE):
            queries = slice(first, min(first + TILE, own))
            known = slice(queries.stop if ulysses is None else length)
            scores_BQL = indexer.scores(q_BJSI[:, :, queries], k_B1LI[:, :, known], weights_BJS[:, :, queries])
            place_Q = place_L[before + queries.start : before + queries.stop]
            seen_BQL = document_BL[:, place_Q, None] == document_BL[:, None, known]
            seen_BQL &= place_L[known] <= place_Q[:, None]
            chosen_BSL[:, queries, known] = highest(scores_BQL, seen_BQL, self.count)
        return chosen_BSL

    def attended(
        self, q_BHSA: Tensor, k_BKLA: Tensor, v_BKLA: Tensor, packing: DocumentLayout, chosen_BSL: Tensor | None
    ) -> Tensor:
        if chosen_BSL is None:
            return super().attended(q_BHSA, k_BKLA, v_BKLA, packing, None)
        if (ulysses := self.axes.ulysses) is not None:
            q_BHSA, k_BKLA, v_BKLA = to_heads((q_BHSA, k_BKLA, v_BKLA), ulysses)
        out_BHSA = _selected(q_BHSA, k_BKLA, v_BKLA, chosen_BSL[:, None], self.scores.scale)
        return out_BHSA if ulysses is None else to_positions(out_BHSA, ulysses)


def _masked(q_BHSA: Tensor, k_BKLA: Tensor, v_BKLA: Tensor, seen_B1SL: Tensor, scale: float | None) -> Tensor:
    grouped = q_BHSA.shape[1] != k_BKLA.shape[1]
    return F.scaled_dot_product_attention(q_BHSA, k_BKLA, v_BKLA, attn_mask=seen_B1SL, scale=scale, enable_gqa=grouped)


_selected: Callable[..., Tensor] = torch.compiler.disable(_masked)  # pyright: ignore[reportAssignmentType]


@builds(SparseLatentAttentionLayer)
def _sparse_attention(layer: SparseLatentAttentionLayer, settings: BlockSettings) -> Built:
    module = SparseLatentAttention(settings.arch, settings.kernel, settings.axes, layer)
    return module, lambda x_BSD, given: module(x_BSD, given.rotate, given.packing, given.cache, given.values)
