"""Rotary positions: their angles are those of transformers, scaled in every way, far beyond the original context."""

from typing import Any

import pytest
import torch
from mixtures import architecture

from xtrain.dsl.schema.rope import ROPE_SCALINGS, Rope
from xtrain.runtime.nn.layers import Rotation

ORIGINAL = {"original_max_position_embeddings": 64}
DIVISORS: dict[str, Any] = {
    "short": tuple(1 + pair / 16 for pair in range(16)),
    "long": tuple(1.5 + pair for pair in range(16)),
}
FACTORS = {f"{name}_factor": list(divisors) for name, divisors in DIVISORS.items()}
SCALED: dict[str, tuple[Rope, dict[str, Any]]] = {
    "none": (Rope(), {"rope_type": "default"}),
    "linear": (Rope(scaling="linear", factor=3.0), {"rope_type": "linear", "factor": 3.0}),
    "dynamic": (Rope(scaling="dynamic", factor=2.0, original=512), {"rope_type": "dynamic", "factor": 2.0}),
    "llama3": (Rope(scaling="llama3", factor=8.0, original=64, low=1.5, high=3.0),
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0, **ORIGINAL}),
    "yarn": (Rope(scaling="yarn", factor=8.0, original=64), {"rope_type": "yarn", "factor": 8.0, **ORIGINAL}),
    "yarn, with all settings": (Rope(scaling="yarn", factor=4.0, original=64, beta_fast=8.0, beta_slow=2.0,
            truncate=False, attention_factor=1.3), {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0,
            "beta_slow": 2.0, "truncate": False, "attention_factor": 1.3, **ORIGINAL}),
    "longrope, short": (Rope(scaling="longrope", factor=4.0, original=512, **DIVISORS),
        {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 512, **FACTORS}),
    "longrope, long": (Rope(scaling="longrope", factor=8.0, original=64, **DIVISORS, divisors="long"),
        {"rope_type": "longrope", "factor": 8.0, **ORIGINAL, **FACTORS}),
    "proportional": (Rope(scaling="proportional", factor=2.0, share=0.5),
        {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5}),
    "yarn, equal bounds": (Rope(scaling="yarn", factor=8.0, original=64, beta_fast=1.0, beta_slow=1.0),
        {"rope_type": "yarn", "factor": 8.0, "beta_fast": 1.0, "beta_slow": 1.0, **ORIGINAL}),
}  # fmt: skip


def test_every_scaling_is_compared():
    assert {rope.scaling for rope, _ in SCALED.values()} == set(ROPE_SCALINGS)


@pytest.mark.parametrize("name", SCALED)
def test_cosines_and_sines_are_those_of_transformers(name: str):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope, keys = SCALED[name]
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=4, head_dim=32, max_position_embeddings=512,
        rope_parameters={**keys, "rope_theta": 5000.0},
    )  # fmt: skip
    positions_BS = torch.tensor([[0, 1, 2, 63, 64, 65, 300, 511], [0, 1, 0, 1, 2, 0, 17, 400]])
    cos_BSA, sin_BSA = LlamaRotaryEmbedding(config)(torch.zeros(1), positions_BS)
    arch = architecture(head_dim=32, rope_theta=5000.0, rope=rope)
    ours = Rotation.of(positions_BS, arch.angles, torch.float32)
    # Angles of up to 511 in fp32, whose last bit is 3e-5.
    torch.testing.assert_close(ours.cos[:, 0], cos_BSA, rtol=0, atol=1e-4)
    torch.testing.assert_close(ours.sin[:, 0], sin_BSA, rtol=0, atol=1e-4)
    near = slice(0, 3)  # where rounding hides nothing
    torch.testing.assert_close(ours.cos[:, 0, near], cos_BSA[:, near], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.sin[:, 0, near], sin_BSA[:, near], rtol=0, atol=1e-6)
