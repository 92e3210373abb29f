"""Small models with experts."""

from typing import Any

import torch
from torch import Tensor, nn

from xtrain.blocks.feed_forward import ExpertsLayer
from xtrain.plan.architecture import Architecture
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.moe import MoE

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, weights as they are": {"router_normalise": False},
    "sigmoid, biased, with shared experts": {"router_score": "sigmoid", "router_bias_speed": 0.01, "shared_experts": 2},
    "sigmoid, weights as they are": {"router_score": "sigmoid", "router_normalise": False},
}  # fmt: skip


def architecture(**changes: Any) -> Architecture:
    fields = {
        "family": "qwen3_moe", "dim": 16, "layers": 3, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 24, "vocab": 32,
        "rope_theta": 1e4, "norm_eps": 1e-6, "tie_embeddings": False, "qk_norm": True, "init_std": 0.02,
        "experts": 8, "experts_per_token": 3, "expert_ffn": 8, "router_aux_loss": 0.3, "router_z_loss": 0.2,
        "router_score": "softmax", "router_normalise": True, "router_bias_speed": 0.0, "shared_experts": 0,
    }  # fmt: skip
    return Architecture(**(fields | changes))


def fill(module: nn.Module, seed: int = 0) -> None:
    """Values far from any symmetry, the same for the same seed; biases of a router as large as gaps between scores."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.randn(tensor.shape, dtype=torch.float64, generator=generator) * 0.4)


PLAIN = ExpertsLayer("mlp")
# With biases, and values that are clamped, as those of `fill` are large enough to be.
CLAMPED = ExpertsLayer("mlp", matrix_bias=True, limit=0.6, alpha=1.3)


def mixture(
    arch: Architecture, axes: Axes | None = None, *, rows: int = 5, seed: int = 0, layer: ExpertsLayer = PLAIN
) -> MoE:
    moe = MoE(arch, axes or Axes(), rows, layer).double()
    fill(moe, seed)
    return moe


def tokens(rows: int, positions: int, dim: int = 16, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Input [B, S, D] with gradient and which positions are real; the last third of the first row is not."""
    generator = torch.Generator().manual_seed(seed)
    x_BSD = torch.randn(rows, positions, dim, dtype=torch.float64, generator=generator).requires_grad_()
    real_BS = torch.ones(rows, positions, dtype=torch.bool)
    real_BS[0, -(positions // 3) :] = False
    return x_BSD, real_BS
