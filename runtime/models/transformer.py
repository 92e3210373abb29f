"""The decoder-only transformer of the `llama` and `qwen3` families: RMSNorm, rotary positions, grouped heads, SwiGLU.

Shapes: B rows, S positions, D dim, H query heads, K key/value heads, A head width, F ffn, V vocabulary.
Module names are those of Hugging Face's files, without the leading `model.`.
"""

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn

from ...planner.architecture import Architecture
from .attention import KERNELS, AttentionKernel, Packing
from .loss import LossTerms, token_losses


class RMSNorm(nn.Module):
    """x / rms(x) · weight (Zhang and Sennrich 2019), computed in at least fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16:
            return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@frozen(eq=False)
class Rotation:
    """Cosine and sine of every position's angles, each [B, 1, S, A]; made once a forward for all blocks."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, positions_BS: Tensor, width: int, theta: float, dtype: torch.dtype) -> "Rotation":
        # Angles in fp64 when the model is, else fp32: a bf16 angle is wrong by whole turns at long positions.
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        half = torch.arange(0, width, 2, device=positions_BS.device, dtype=exact)
        angle = positions_BS.to(exact)[:, None, :, None] * (theta ** (-half / width))
        angle = torch.cat((angle, angle), dim=-1)
        return cls(cos=angle.cos().to(dtype), sin=angle.sin().to(dtype))

    def __call__(self, x_BHSA: Tensor) -> Tensor:
        left, right = x_BHSA.chunk(2, dim=-1)
        return x_BHSA * self.cos + torch.cat((-right, left), dim=-1) * self.sin


class Attention(nn.Module):
    def __init__(self, arch: Architecture, kernel: AttentionKernel) -> None:
        super().__init__()
        self.head_dim, self.kernel = arch.head_dim, kernel
        queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        self.q_proj = nn.Linear(arch.dim, queries, bias=False)
        self.k_proj = nn.Linear(arch.dim, keys, bias=False)
        self.v_proj = nn.Linear(arch.dim, keys, bias=False)
        self.o_proj = nn.Linear(queries, arch.dim, bias=False)
        self.q_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else nn.Identity()

    def forward(self, x_BSD: Tensor, rotate: Rotation, packing: Packing) -> Tensor:
        def heads(flat: Tensor) -> Tensor:
            return flat.unflatten(-1, (-1, self.head_dim))

        # The number of heads is read off the tensor, so a layer that holds only some of them needs no change.
        q_BHSA = rotate(self.q_norm(heads(self.q_proj(x_BSD))).transpose(1, 2))
        k_BKSA = rotate(self.k_norm(heads(self.k_proj(x_BSD))).transpose(1, 2))
        v_BKSA = heads(self.v_proj(x_BSD)).transpose(1, 2)
        out_BHSA = self.kernel(q_BHSA, k_BKSA, v_BKSA, packing)
        return self.o_proj(out_BHSA.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer 2020)."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, ffn, bias=False)
        self.up_proj = nn.Linear(dim, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))


class Block(nn.Module):
    def __init__(self, arch: Architecture, kernel: AttentionKernel) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(arch.dim, arch.norm_eps)
        self.self_attn = Attention(arch, kernel)
        self.post_attention_layernorm = RMSNorm(arch.dim, arch.norm_eps)
        self.mlp = SwiGLU(arch.dim, arch.ffn)

    def forward(self, x_BSD: Tensor, rotate: Rotation, packing: Packing) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rotate, packing)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class Transformer(nn.Module):
    """Token ids to summed losses, or to logits where no labels are given.

    `layers` is a dict by layer number, so that a part of the model keeps the names of the whole.
    """

    def __init__(self, arch: Architecture, *, kernel: str, z_loss: float = 0.0, chunk_bytes: int = 2**30) -> None:
        super().__init__()
        self.arch, self.z_loss, self.chunk_bytes = arch, z_loss, chunk_bytes
        self.embed_tokens = nn.Embedding(arch.vocab, arch.dim)
        self.layers = nn.ModuleDict({str(i): Block(arch, KERNELS[kernel]) for i in range(arch.layers)})
        self.norm = RMSNorm(arch.dim, arch.norm_eps)
        self.lm_head = nn.Linear(arch.dim, arch.vocab, bias=False)
        if arch.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def hidden(self, input_ids_BS: Tensor, positions_BS: Tensor, packing: Packing) -> Tensor:
        """The normed residual stream [B, S, D] that the head reads."""
        x_BSD = self.embed_tokens(input_ids_BS)
        rotate = Rotation.of(positions_BS, self.arch.head_dim, self.arch.rope_theta, x_BSD.dtype)
        for block in self.layers.values():
            x_BSD = block(x_BSD, rotate, packing)
        return self.norm(x_BSD)

    def forward(
        self, input_ids_BS: Tensor, positions_BS: Tensor, packing: Packing, labels_BS: Tensor | None = None
    ) -> LossTerms | Tensor:
        """`LossTerms` (sums over valid tokens) with labels, else logits [B, S, V].

        The head runs inside this forward, so that sharded weights are whole when the chunked loss reads them.
        """
        hidden_BSD = self.hidden(input_ids_BS, positions_BS, packing)
        if labels_BS is None:
            return self.lm_head(hidden_BSD)
        return token_losses(
            hidden_BSD.flatten(0, 1),
            self.lm_head.weight,
            labels_BS.flatten(),
            z_weight=self.z_loss,
            chunk_bytes=self.chunk_bytes,
        )
