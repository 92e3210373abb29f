"""DeepSeek sparse attention of a `SparseLatentAttentionLayer`: the indexer, its loss, and the attention over what it
chooses."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.blocks.attention import TILE
from xtrain.blocks.sparse_attention import SparseLatentAttentionLayer
from xtrain.plan.architecture import Architecture
from xtrain.runtime.base.collectives import all_reduce, gather, reduce_scatter, to_heads, to_positions
from xtrain.runtime.nn.attention import AttentionKernel
from xtrain.runtime.nn.attention_blocks import exact_type
from xtrain.runtime.nn.axes import Axes, local
from xtrain.runtime.nn.batch import DocumentLayout, LayerCache
from xtrain.runtime.nn.block import BlockSettings, Built, Values, builds
from xtrain.runtime.nn.latent_attention import ChosenPositions, LatentAttention, call_of
from xtrain.runtime.nn.layers import Linear, Rotation
from xtrain.runtime.nn.recompute import as_one, recomputing
from xtrain.runtime.nn.router import LayerLosses, attach

NORM_EPS = 1e-6  # of the norm of keys, whatever the other norms have

# shapes: as in latent_attention.py; J index heads, I width of an index head, L positions that are known, Q queries of a
# tile


class Indexer(nn.Module, LayerLosses):
    """Scores of earlier positions, in at least fp32. Every tensor-parallel rank computes all index heads.

    loss_weight: of the loss of a row. scale: factor of the products of attention.
    """

    def __init__(self, arch: Architecture, axes: Axes, layer: SparseLatentAttentionLayer, rows: int) -> None:
        super().__init__()
        assert layer.q_rank is not None
        self.axes, self.heads, self.width = axes, layer.index_heads, layer.index_dim
        self.interleaved, self.scale = layer.index_interleaved, layer.scale
        self.loss_weight = layer.index_loss / rows
        self.wq_b = Linear(layer.q_rank, layer.index_heads * layer.index_dim)
        self.wk = Linear(arch.dim, layer.index_dim)
        self.k_norm = KeyNorm(layer.index_dim, axes)
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

    @property
    def learns(self) -> bool:
        return self.loss_weight > 0 and any(each.requires_grad for each in self.parameters())

    def scores(self, q_BJSI: Tensor, k_B1LI: Tensor, weights_BJS: Tensor) -> Tensor:
        """Return I [B, S, L] = Σ_j w_j / √J · relu(q_j · k / √I)."""
        products_BJSL = self._products(q_BJSI, k_B1LI)
        return products_BJSL.mul_(self._weights(weights_BJS)).sum(1)

    def _products(self, q_BJSI: Tensor, k_B1LI: Tensor) -> Tensor:
        exact = exact_type(q_BJSI.dtype)
        products_BJSL = q_BJSI.to(exact) @ k_B1LI.to(exact).mT
        return products_BJSL.mul_(self.width**-0.5).relu_()

    def _weights(self, weights_BJS: Tensor) -> Tensor:
        return (weights_BJS.to(exact_type(weights_BJS.dtype)) * self.heads**-0.5)[..., None]

    def loss(
        self,
        indexed: tuple[Tensor, Tensor, Tensor],
        attention: tuple[Tensor, Tensor],
        seen_BLL: Tensor,
        real_BS: Tensor,
    ) -> Tensor:
        """Return this rank's share of the objective of a step. indexed: queries of this rank's positions, keys and
        weights. attention: queries and keys of whole rows, for this rank's heads."""
        out: Any = _Divergence.apply(*indexed, lambda: self._divergence(indexed, attention, seen_BLL, real_BS))
        loss, aux = out
        if not recomputing():
            tensor = self.axes.tensor
            self.add(aux if tensor is None or tensor.sequence else aux / tensor.size)
        return self.scaled(self.loss_weight * loss)

    def _divergence(
        self,
        indexed: tuple[Tensor, Tensor, Tensor],
        attention: tuple[Tensor, Tensor],
        seen_BLL: Tensor,
        real_BS: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the divergence summed over rows, and its gradients by queries, keys and weights, some queries at a
        time.

        Of a row: the mean over its real positions t of KL(p_t ‖ softmax(I_t)) over the positions that t sees, with the
        mean p over heads of attention's probabilities (DeepSeek-V3.2, 2025). Its gradient by I_ts is softmax(I_t)_s −
        p_ts.
        """
        (q_BJSI, k_B1LI, weights_BJS), (q_BHLA, k_BHLA) = indexed, attention
        ulysses, tensor = self.axes.ulysses, self.axes.tensor
        own, exact = q_BJSI.shape[2], exact_type(q_BJSI.dtype)
        spread, before = (1, 0) if ulysses is None else (ulysses.size(), ulysses.rank() * own)
        heads = q_BHLA.shape[1] * spread * (1 if tensor is None else tensor.size)
        counts_B = real_BS.sum(1)
        if ulysses is not None:
            counts_B = all_reduce(counts_B, ulysses)
        # Tensor-parallel ranks compute the same; each has a part of it where gradients are summed over them.
        parts = tensor.size if tensor is not None and tensor.sequence else 1
        shares_BS = real_BS / (counts_B.clamp(min=1) * parts).to(exact)[:, None]
        total = shares_BS.new_zeros(())
        dq_BJSI, dk_B1LI, dweights_BJS = (torch.zeros_like(each, dtype=exact) for each in indexed)
        for first in range(0, own, TILE):
            queries = slice(first, min(first + TILE, own))
            known = slice(queries.stop if spread == 1 else None)
            sent = [slice(rank * own + first, rank * own + queries.stop) for rank in range(spread)]
            p_BQL = torch.cat([self._attended(q_BHLA, k_BHLA, seen_BLL, each, known) for each in sent], dim=1)
            p_BQL = p_BQL if ulysses is None else reduce_scatter(p_BQL, 1, ulysses)
            p_BQL = (p_BQL if tensor is None else all_reduce(p_BQL, tensor.group)).div_(heads)
            hidden_BQL = ~seen_BLL[:, before + queries.start : before + queries.stop, known]
            products_BJQL = self._products(q_BJSI[:, :, queries], k_B1LI[:, :, known])
            weights_BJQ1 = self._weights(weights_BJS[:, :, queries])
            scores_BQL = (products_BJQL * weights_BJQ1).sum(1).masked_fill_(hidden_BQL, -math.inf)
            logs_BQL = scores_BQL.log_softmax(-1)
            shares_BQ1 = shares_BS[:, queries, None]
            gaps_BQL = torch.xlogy(p_BQL, p_BQL).sub_(p_BQL * logs_BQL.masked_fill(hidden_BQL, 0))
            total += gaps_BQL.mul_(shares_BQ1).sum()
            dscores_B1QL = logs_BQL.exp_().sub_(p_BQL).mul_(shares_BQ1)[:, None]
            dweights_BJS[:, :, queries] = (products_BJQL * dscores_B1QL).sum(-1) * self.heads**-0.5
            dproducts_BJQL = (products_BJQL > 0) * dscores_B1QL * (weights_BJQ1 * self.width**-0.5)
            dq_BJSI[:, :, queries] = dproducts_BJQL @ k_B1LI[:, :, known].to(exact)
            dk_B1LI[:, :, known] += (dproducts_BJQL.mT @ q_BJSI[:, :, queries].to(exact)).sum(1, keepdim=True)
        return total, dq_BJSI, dk_B1LI, dweights_BJS

    def _attended(self, q_BHLA: Tensor, k_BHLA: Tensor, seen_BLL: Tensor, queries: slice, known: slice) -> Tensor:
        """Return attention's probabilities of some queries, [B, Q, L], summed over this rank's heads."""
        exact = exact_type(q_BHLA.dtype)
        scores_BHQL = q_BHLA[:, :, queries].to(exact) @ k_BHLA[:, :, known].to(exact).mT
        hidden_B1QL = ~seen_BLL[:, None, queries, known]
        return scores_BHQL.mul_(self.scale).masked_fill_(hidden_B1QL, -math.inf).softmax(-1).sum(1)


class _Divergence(torch.autograd.Function):
    """The divergence of an indexer, twice, the second without a gradient. Its gradients are computed with it: of the
    products that they follow from, nothing is kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, weights: Tensor, make: Callable[[], tuple[Tensor, ...]]) -> Any:
        loss, *gradients = as_one("attention", make)
        ctx.save_for_backward(*gradients)
        ctx.dtype = q.dtype
        aux = loss.clone()
        ctx.mark_non_differentiable(aux)
        return loss, aux

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        return *((each * grad_outputs[0]).to(ctx.dtype) for each in ctx.saved_tensors), None


class KeyNorm(nn.Module):
    """LayerNorm of the keys of index heads."""

    def __init__(self, width: int, axes: Axes) -> None:
        super().__init__()
        self.axes = axes
        self.weight, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        partial = self.axes.tensor is not None and self.axes.tensor.sequence
        weight, bias = (local(each, partial=partial) for each in (self.weight, self.bias))
        return F.layer_norm(x, x.shape[-1:], weight, bias, NORM_EPS)


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
        self,
        arch: Architecture,
        kernel: AttentionKernel,
        axes: Axes,
        layer: SparseLatentAttentionLayer,
        rows: int,
    ) -> None:
        super().__init__(arch, kernel, axes, layer)
        self.count, self.gives, self.takes = layer.chosen, layer.gives, layer.takes
        self.always = layer.index_loss > 0  # a loss needs the scores of short rows too
        self.indexer = None if layer.takes else Indexer(arch, axes, layer, rows)

    def chosen(
        self,
        x_BSD: Tensor,
        narrow_BSR: Tensor,
        rotate: Rotation,
        packing: DocumentLayout,
        cache: LayerCache | None,
        values: Values,
        real_BS: Tensor,
    ) -> ChosenPositions | None:
        indexer = self.indexer
        if cache is None and packing.document_BS.shape[1] <= self.count and not self.always:
            return None
        if indexer is None:
            return ChosenPositions(values[self.takes][0])
        choice: ChosenPositions = self._choice(indexer, x_BSD, narrow_BSR, rotate, packing, cache, real_BS)  # pyright: ignore[reportCallIssue]
        if self.gives:
            values[self.gives] = (choice.seen_BSL,)
        return choice

    @torch.compiler.disable  # compiled, each packing would get a graph of its own
    def _choice(
        self,
        indexer: Indexer,
        x_BSD: Tensor,
        narrow_BSR: Tensor,
        rotate: Rotation,
        packing: DocumentLayout,
        cache: LayerCache | None,
        real_BS: Tensor,
    ) -> ChosenPositions:
        learns = indexer.learns and self.training and cache is None and torch.is_grad_enabled()
        x_BSD, narrow_BSR = x_BSD.detach(), narrow_BSR.detach()  # the model learns from its own loss alone
        with torch.set_grad_enabled(learns):
            # Only the choice is kept for a second run, not the products that it follows from.
            q_BJSI, k_B1LI, weights_BJS = as_one("choice", lambda: indexer(x_BSD, narrow_BSR, rotate))
        with torch.no_grad():
            seen_BSL = self._seen(indexer, q_BJSI, k_B1LI, weights_BJS, packing, cache)
        if not learns:
            return ChosenPositions(seen_BSL)
        return ChosenPositions(
            seen_BSL, lambda q, k: indexer.loss((q_BJSI, k_B1LI, weights_BJS), (q, k), seen_BSL, real_BS)
        )

    def _seen(
        self,
        indexer: Indexer,
        q_BJSI: Tensor,
        k_B1LI: Tensor,
        weights_BJS: Tensor,
        packing: DocumentLayout,
        cache: LayerCache | None,
    ) -> Tensor:
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
        self, q_BHSA: Tensor, k_BKLA: Tensor, v_BKLA: Tensor, packing: DocumentLayout, choice: ChosenPositions | None
    ) -> Tensor:
        if choice is None:
            return super().attended(q_BHSA, k_BKLA, v_BKLA, packing, None)
        if (ulysses := self.axes.ulysses) is not None:
            q_BHSA, k_BKLA, v_BKLA = to_heads((q_BHSA, k_BKLA, v_BKLA), ulysses)
        out_BHSA = _selected(q_BHSA, k_BKLA, v_BKLA, choice.seen_BSL[:, None], self.scores.scale)
        if choice.loss is not None:
            out_BHSA = attach(out_BHSA, _loss(choice.loss, q_BHSA.detach(), k_BKLA.detach()))
        return out_BHSA if ulysses is None else to_positions(out_BHSA, ulysses)


def _compute_loss(loss: Callable[[Tensor, Tensor], Tensor], q_BHSA: Tensor, k_BKLA: Tensor) -> Tensor:
    return loss(q_BHSA, k_BKLA)


_loss: Callable[..., Tensor] = torch.compiler.disable(_compute_loss)  # pyright: ignore[reportAssignmentType]


def _masked(q_BHSA: Tensor, k_BKLA: Tensor, v_BKLA: Tensor, seen_B1SL: Tensor, scale: float | None) -> Tensor:
    grouped = q_BHSA.shape[1] != k_BKLA.shape[1]
    return F.scaled_dot_product_attention(q_BHSA, k_BKLA, v_BKLA, attn_mask=seen_B1SL, scale=scale, enable_gqa=grouped)


_selected: Callable[..., Tensor] = torch.compiler.disable(_masked)  # pyright: ignore[reportAssignmentType]


@builds(SparseLatentAttentionLayer)
def _sparse_attention(layer: SparseLatentAttentionLayer, settings: BlockSettings) -> Built:
    module = SparseLatentAttention(settings.arch, settings.kernel, settings.axes, layer, settings.rows)
    return module, call_of(module)
