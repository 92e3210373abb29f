"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), with the keys and values of all heads written out; but
for texts that are generated, which keep the narrow vectors.

Shapes: B rows, S positions, D dim, H heads of this rank, A width of a head, N, P widths of the parts of queries and
keys without and with rotary positions, V width of a value, R widths of the narrow vectors, L positions in a cache, C
width of what it has of each, R + P.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from xtrain.planner.architecture import Architecture
from xtrain.planner.blocks.latent_attention import LatentAttentionLayer
from xtrain.runtime.models.attention import AttentionKernel, AttentionModule
from xtrain.runtime.models.cache import LayerCache
from xtrain.runtime.models.document_layout import DocumentLayout
from xtrain.runtime.models.layers import Linear, RMSNorm, Rotation
from xtrain.runtime.parallel.attention_blocks import Scores
from xtrain.runtime.parallel.axes import Axes
from xtrain.runtime.parallel.tensor import column_parallel_input, local

NORM_EPS = 1e-6  # of the norms of narrow vectors, whatever that of the others is


class LatentAttention(AttentionModule):
    """As a `LatentAttentionLayer` says it. Narrow vectors are computed by each rank for its own positions, and are what
    tensor parallel gathers."""

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
        # Heads stay the inner dimension in memory: so does the result, as the last product wants it.
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
        """Whether a cache has narrow vectors in place of keys and values, as `LatentAttentionLayer.cached` says."""
        matrix = self.kv_b_proj
        return type(matrix) is Linear and matrix.quantised is None and matrix.fp8 is None

    def _newest(self, q_BSHN: Tensor, q_BSHP: Tensor, known_B1LC: Tensor, packing: DocumentLayout) -> Tensor:
        """Values [B, 1, H, V] of the newest position (section 2.1.2 of the paper): as q · (K · c) is (q · K) · c, keys
        are never written out, and values only once they are summed over positions."""
        matrix_HXR = local(self.kv_b_proj.weight).unflatten(0, (-1, sum(self.expanded)))
        key_HNR, value_HVR = matrix_HXR.split(self.expanded, dim=1)
        q_BHSR = torch.einsum("bshn,hnr->bhsr", q_BSHN, key_HNR)
        q_BHSC = torch.cat((q_BHSR, q_BSHP.transpose(1, 2)), dim=-1)
        # What comes of the part with positions as values is left out: kernels are faster where both are one tensor.
        out_BHSC = self.kernel(q_BHSC, known_B1LC, known_B1LC, packing, self.scores)
        return torch.einsum("bhsr,hvr->bshv", out_BHSC[..., : self.narrow[0]], value_HVR)

    def _queries(self, x_BSD: Tensor) -> Tensor:
        tensor = self.axes.tensor
        if self.q_a_proj is None or self.q_a_layernorm is None or self.q_b_proj is None:
            assert self.q_proj is not None
            return self.q_proj(column_parallel_input(x_BSD, tensor))
        return self.q_b_proj(column_parallel_input(self.q_a_layernorm(self.q_a_proj(x_BSD)), tensor))

    def _heads(self, flat_BSH: Tensor, widths: tuple[int, int]) -> tuple[Tensor, ...]:
        """Both parts of every head, [B, S, H, …]."""
        return flat_BSH.unflatten(-1, (-1, sum(widths))).split(widths, dim=-1)

    def _turned(self, x_BSHP: Tensor, rotate: Rotation) -> Tensor:
        """By its positions. Neighbours that are turned together are put into halves, as `Rotation` takes them: products
        of queries and keys stay the same."""
        if self.interleaved:
            x_BSHP = x_BSHP.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(x_BSHP.transpose(1, 2)).transpose(1, 2)

    def _padded(self, x_BSHA: Tensor) -> Tensor:
        missing = self.width - x_BSHA.shape[-1]
        return F.pad(x_BSHA, (0, missing)) if missing else x_BSHA
