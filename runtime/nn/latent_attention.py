"""Multi-head latent attention of a `LatentAttentionLayer` (DeepSeek-V2, arXiv 2405.04434)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from xtrain.blocks.latent_attention import LatentAttentionLayer
from xtrain.plan.architecture import Architecture
from xtrain.runtime.nn.attention import AttentionKernel, AttentionModule
from xtrain.runtime.nn.attention_blocks import Scores
from xtrain.runtime.nn.axes import Axes, column_parallel_input, local
from xtrain.runtime.nn.batch import DocumentLayout, LayerCache
from xtrain.runtime.nn.block import BlockInput, BlockSettings, Built, Call, Values, builds
from xtrain.runtime.nn.layers import Linear, RMSNorm, Rotation

NORM_EPS = 1e-6  # of the norms of narrow vectors, whatever the other norms have

# shapes: B rows, S positions, H heads, R width of narrow vectors, N and P widths of the parts of a query without and
# with positions, C = R + P, A width of heads in kernels, V width of a value


class ChosenPositions(NamedTuple):  # which compiled code can make
    """Positions that queries see. seen_BSL: bool, of whole rows. loss: given queries and keys of attention, returns the
    share of the step's objective of whatever chose; None: it has none."""

    seen_BSL: Tensor
    loss: Callable[[Tensor, Tensor], Tensor] | None = None


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
        self,
        x_BSD: Tensor,
        rotate: Rotation | None,
        packing: DocumentLayout,
        cache: LayerCache | None,
        values: Values,
        real_BS: Tensor,
    ) -> Tensor:
        assert rotate is not None
        tensor = self.axes.tensor
        narrow_BSR = column_parallel_input(self.kv_a_proj_with_mqa(x_BSD), tensor)
        latent_BSR, shared_BSP = narrow_BSR.split(self.narrow, dim=-1)
        latent_BSR = self.kv_a_layernorm(latent_BSR)
        k_BS1P = self._turned(shared_BSP[:, :, None], rotate)
        q_BSH, source_BSR = self._queries(x_BSD)
        q_BSHN, q_BSHP = self._heads(q_BSH, self.query)
        q_BSHP = self._turned(q_BSHP, rotate)
        choice = self.chosen(x_BSD, source_BSR, rotate, packing, cache, values, real_BS)
        if cache is not None and self.keeps_latent:
            (known_B1LC,) = cache.extended(self, torch.cat((latent_BSR[:, None], k_BS1P.transpose(1, 2)), dim=-1))
            if cache.filled:
                out_BSHV = self._newest(q_BSHN, q_BSHP, known_B1LC, packing, choice)
                return self.o_proj.row_parallel(out_BSHV.flatten(-2), tensor)
        k_BSHN, v_BSHV = self._heads(self.kv_b_proj(latent_BSR), self.expanded)
        # Heads stay the inner dimension in memory, also of the result, as the last product takes it.
        q_BSHA = torch.cat((q_BSHN, q_BSHP), dim=-1)
        k_BSHA = torch.cat((k_BSHN, k_BS1P.expand(-1, -1, k_BSHN.shape[2], -1)), dim=-1)
        q_BHSA, k_BHSA, v_BHSA = (self._padded(x).transpose(1, 2) for x in (q_BSHA, k_BSHA, v_BSHV))
        if cache is not None and not self.keeps_latent:
            k_BHSA, v_BHSA = cache.extended(self, k_BHSA, v_BHSA)
        out_BHSA = self.attended(q_BHSA, k_BHSA, v_BHSA, packing, choice)
        out_BSHV = out_BHSA.transpose(1, 2)[..., : self.expanded[1]]
        return self.o_proj.row_parallel(out_BSHV.flatten(-2), tensor)

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
        """Return the known positions that each query sees; None: all earlier ones of its document. x_BSD: this rank's
        positions between blocks. narrow_BSR: what queries are projected from, of all positions."""
        return None

    def attended(
        self, q_BHSA: Tensor, k_BKLA: Tensor, v_BKLA: Tensor, packing: DocumentLayout, choice: ChosenPositions | None
    ) -> Tensor:
        return self.kernel(q_BHSA, k_BKLA, v_BKLA, packing, self.scores)

    @property
    def keeps_latent(self) -> bool:
        """True if a cache has narrow vectors instead of keys and values, as in `LatentAttentionLayer.cached`."""
        matrix = self.kv_b_proj
        return type(matrix) is Linear and matrix.quantised is None and matrix.scaled is None

    def _newest(
        self,
        q_BSHN: Tensor,
        q_BSHP: Tensor,
        known_B1LC: Tensor,
        packing: DocumentLayout,
        choice: ChosenPositions | None,
    ) -> Tensor:
        """Return the values [B, 1, H, V] of the newest position (section 2.1.2 of the paper).

        As q · (K · c) = (q · K) · c, keys are never expanded, and values only after summing over positions.
        """
        matrix_HXR = local(self.kv_b_proj.weight).unflatten(0, (-1, sum(self.expanded)))
        key_HNR, value_HVR = matrix_HXR.split(self.expanded, dim=1)
        q_BHSR = torch.einsum("bshn,hnr->bhsr", q_BSHN, key_HNR)
        q_BHSC = torch.cat((q_BHSR, q_BSHP.transpose(1, 2)), dim=-1)
        # The values of the part with positions are dropped: kernels are faster if keys and values are one tensor.
        out_BHSC = self.attended(q_BHSC, known_B1LC, known_B1LC, packing, choice)
        return torch.einsum("bhsr,hvr->bshv", out_BHSC[..., : self.narrow[0]], value_HVR)

    def _queries(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries of all heads, and what they are projected from."""
        tensor = self.axes.tensor
        if self.q_a_proj is None or self.q_a_layernorm is None or self.q_b_proj is None:
            assert self.q_proj is not None
            whole_BSD = column_parallel_input(x_BSD, tensor)
            return self.q_proj(whole_BSD), whole_BSD
        narrow_BSR = column_parallel_input(self.q_a_layernorm(self.q_a_proj(x_BSD)), tensor)
        return self.q_b_proj(narrow_BSR), narrow_BSR

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


def call_of(module: LatentAttention) -> Call:
    """Return the call of a module in a block."""

    def call(x_BSD: Tensor, given: BlockInput) -> Tensor:
        return module(x_BSD, given.rotate, given.packing, given.cache, given.values, given.real_BS)

    return call


@builds(LatentAttentionLayer)
def _latent_attention(layer: LatentAttentionLayer, settings: BlockSettings) -> Built:
    module = LatentAttention(settings.arch, settings.kernel, settings.axes, layer)
    return module, call_of(module)
