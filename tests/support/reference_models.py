"""Tiny models of transformers, saved by it, and what it computes of the rows of a step."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

# Of every model; the vocabulary is one that no even number of ranks divides, and has the ids of the bytes.
SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 263}
DENSE = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # of the config's own vocabulary they are too large
GATED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "truncate": False, "original_max_position_embeddings": 16}
OSS = {**DENSE, **EXPERTS, **IDS, "swiglu_limit": 2.0, "max_position_embeddings": 64, "rope_theta": 500.0, "rope": YARN}
LATENT = {
    **SIZES, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 20,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10, "moe_intermediate_size": 24,
    "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1, "max_position_embeddings": 64,
}  # fmt: skip


def before_scaling(positions: int) -> dict[str, int]:
    """Keys of a context of 64 positions, and of `positions` before it was longer."""
    return {"original_max_position_embeddings": positions, "max_position_embeddings": 64}


# A score of zero in all index heads is rare with so many.
INDEXED = {**LATENT, "index_n_heads": 12, "index_head_dim": 8, "index_topk": 7}
INDEXED_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
    "mscale_all_dim": 0.7}  # fmt: skip
LITE = {name: value for name, value in LATENT.items() if name != "first_k_dense_replace"}
GROUPED = {
    **DENSE, "num_hidden_layers": 3, "head_dim": 8, "moe_intermediate_size": 24, "n_routed_experts": 8,
    "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
}  # fmt: skip
DELTA = {
    **DENSE, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6, "layer_types": ["linear_attention", "full_attention"], "max_position_embeddings": 64,
    "initializer_range": 0.1,
}  # fmt: skip
GEMMA4 = {
    **DENSE, **IDS, "num_key_value_heads": 4, "head_dim": 8, "global_head_dim": 12, "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"],
    "rope": {"rope_type": "proportional", "partial_rotary_factor": 0.5}, "rope_theta": 500.0,
}  # fmt: skip
GEMMA4_E = {  # as Gemma 4 E2B has it
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": False,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 12,
    "rms_norm_eps": 1e-2,
    "vocab_size_per_layer_input": 264,
}
GEMMA4_UNIFIED = {name: value for name, value in GEMMA4.items() if name != "hidden_size_per_layer_input"}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
MAMBA = {
    **DENSE, **IDS, "head_dim": 8, "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2,
    "n_routed_experts": 4, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 20,
    "num_experts_per_tok": 2, "initializer_range": 0.1,
}  # fmt: skip
GRANITE_MAMBA = {
    **DENSE, **IDS, **EXPERTS, "intermediate_size": 24, "shared_intermediate_size": 20, "mamba_n_heads": 8,
    "mamba_n_groups": 2, "mamba_d_state": 8, "layer_types": ["linear_attention", "full_attention"],
    "initializer_range": 0.1, "embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.2,
    "logits_scaling": 3.0, "max_position_embeddings": 64,
}  # fmt: skip
FALCON = {
    **DENSE, **IDS, "mamba_n_heads": 4, "mamba_d_ssm": 48, "mamba_n_groups": 2, "mamba_d_state": 8,
    "initializer_range": 0.1, "max_position_embeddings": 64, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.4,
    "key_multiplier": 0.7, "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.6, "ssm_in_multiplier": 0.8,
    "ssm_out_multiplier": 1.4, "ssm_multipliers": [0.9, 1.2, 0.7, 1.5, 1.1], "mlp_multipliers": [1.3, 0.6],
}  # fmt: skip
# Family → name → keys of its config: a plain one, and two with what is odd.
CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "plain": DENSE,
        "odd heads, tied": {**DENSE, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1,
            "head_dim": 10, "tied": True},
        "every head its own": {**DENSE, "num_key_value_heads": 4, "rope_theta": 500.0, "rms_norm_eps": 1e-3},
        "biased, scaled by yarn": {**DENSE, "attention_bias": True, "mlp_bias": True, "max_position_embeddings": 64,
            "rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
        "scaled as llama3": {**DENSE, "max_position_embeddings": 64, "rope_theta": 500.0, "rope": {
                "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16}},
    },
    "qwen3": {"plain": {**DENSE, "head_dim": 8},
        "wide heads, tied": {**DENSE, "head_dim": 20, "tied": True, "rope_theta": 1e6},
        "odd heads": {**DENSE, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 6},
        "biased": {**DENSE, "head_dim": 8, "attention_bias": True},
        "windows": {**DENSE, "head_dim": 8, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}},
    "qwen2": {"plain": DENSE, "odd heads, tied": {**DENSE, "hidden_size": 36, "num_attention_heads": 3,
            "num_key_value_heads": 1, "tied": True}, "every head its own": {**DENSE, "num_key_value_heads": 4,
            "max_position_embeddings": 64, "rope": {"rope_type": "linear", "factor": 3.0}},
        "windows": {**DENSE, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}},
    "olmo2": {"plain": DENSE, "odd heads, tied": {**DENSE, "hidden_size": 36, "num_attention_heads": 3,
            "num_key_value_heads": 1, "tied": True},
        "every head its own": {**DENSE, "num_key_value_heads": 4, "attention_bias": True, "rms_norm_eps": 1e-3}},
    "olmo3": {"plain": {**DENSE, **IDS, "num_hidden_layers": 4, "sliding_window": 7, "rope_theta": 500.0},
        "odd heads, tied": {**DENSE, **IDS, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1,
            "sliding_window": 2, "layer_types": ["full_attention", "sliding_attention"], "local_theta": 100.0,
            "tied": True},
        "biased, scaled by yarn": {**DENSE, **IDS, "num_key_value_heads": 4, "attention_bias": True,
            "rms_norm_eps": 1e-3, "sliding_window": 9, "max_position_embeddings": 64,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}},
    "seed_oss": {"plain": {**DENSE, "head_dim": 8},
        "odd heads, tied": {**DENSE, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 6, "tied": True},
        "every bias": {**DENSE, "num_key_value_heads": 4, "head_dim": 12, "attention_out_bias": True, "mlp_bias": True,
            "rms_norm_eps": 1e-3, "rope_theta": 500.0}},
    "phi3": {
        "plain": {**DENSE, **IDS, "rope": {"partial_rotary_factor": 0.5}},
        "odd heads, tied": {**DENSE, **IDS, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1,
            "sliding_window": 7, "tied": True, **before_scaling(2), "rope": {"rope_type": "longrope", "factor": 2.0,
                "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5], "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0]}},
        "short, in part": {**DENSE, **IDS, "num_key_value_heads": 4, "rms_norm_eps": 1e-3, **before_scaling(64),
            "rope": {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0, 1.5, 2.5], "partial_rotary_factor":
                0.75, "long_factor": [2.0, 4.0, 8.0]}, "max_position_embeddings": 256},
    },
    "glm4": {
        "plain": {**DENSE, **IDS, "head_dim": 8},
        "odd heads, tied": {**DENSE, **IDS, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1,
            "head_dim": 10, "rope": {"partial_rotary_factor": 1.0}, "tied": True},
        "no bias, scaled": {**DENSE, **IDS, "num_key_value_heads": 4, "head_dim": 12, "attention_bias": False,
            "rms_norm_eps": 1e-3, "max_position_embeddings": 64, "rope": {"rope_type": "linear", "factor": 3.0,
                "partial_rotary_factor": 0.5}},
    },
    "granite": {
        "plain": {**DENSE, "embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.2,
            "logits_scaling": 3.0},
        "odd heads, tied": {**DENSE, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1,
            "head_dim": 10, "attention_multiplier": 0.5, "residual_multiplier": 1.5, "tied": True},
        "every bias": {**DENSE, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True,
            "embedding_multiplier": 0.5, "logits_scaling": 0.5, "rms_norm_eps": 1e-3, "rope_theta": 500.0,
            "max_position_embeddings": 64, "rope": {"rope_type": "linear", "factor": 3.0}},
    },
    "glm4_moe": {
        "plain": {**GROUPED, "attention_bias": True},
        "odd heads, tied": {**GROUPED, "num_hidden_layers": 2, "hidden_size": 36, "num_attention_heads": 3,
            "num_key_value_heads": 1, "head_dim": 10, "rope": {"partial_rotary_factor": 0.6}, "use_qk_norm": True,
            "n_routed_experts": 5, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "num_experts_per_tok": 2,
            "first_k_dense_replace": 0, "norm_topk_prob": False, "tied": True},
        "normed, scaled by yarn": {**GROUPED, "head_dim": 12, "use_qk_norm": True, "attention_bias": True,
            "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-3, "rope": {"rope_type": "yarn", "factor": 4.0,
                "original_max_position_embeddings": 16, "partial_rotary_factor": 0.5}},
    },
    "qwen3_next": {
        "plain": {**DELTA, **GATED, "norm_topk_prob": True},
        "odd heads": {**DELTA, **GATED, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1,
            "linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_key_head_dim": 6,
            "linear_value_head_dim": 10, "linear_conv_kernel_dim": 3, "num_experts": 5, "attention_bias": True,
            "layer_types": ["full_attention", "linear_attention"]},
        "dense between, tied": {**DELTA, **GATED, "num_hidden_layers": 3, "decoder_sparse_step": 2, "tied": True,
            "linear_key_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_value_heads": 2,
            "norm_topk_prob": False},
    },
    "qwen3_5": {
        "plain": DELTA,
        "odd heads, tied": {**DELTA, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1,
            "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 5,
            "linear_value_head_dim": 7, "linear_conv_kernel_dim": 2, "tied": True,
            "layer_types": ["full_attention", "linear_attention"]},
        "four key heads": {**DELTA, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
        "scaled by yarn": {**DELTA, "num_hidden_layers": 3, "attention_bias": True, "rms_norm_eps": 1e-3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"], "rope": {"rope_type": "yarn",
                "factor": 4.0, "original_max_position_embeddings": 16, "partial_rotary_factor": 0.5}},
    },
    "qwen3_5_moe": {
        "plain": {**DELTA, **GATED},
        "odd heads, tied": {**DELTA, **GATED, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1,
            "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 5,
            "linear_value_head_dim": 4, "num_experts": 5, "tied": True},
        "attention alone": {**DELTA, **GATED, "attention_bias": True, "layer_types": ["full_attention"] * 2,
            "shared_expert_intermediate_size": 12},
        "in blocks": {**DELTA, **GATED, "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    },
    "granitemoehybrid": {
        "plain": GRANITE_MAMBA,
        "odd heads, tied": {**GRANITE_MAMBA, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1,
            "mamba_n_heads": 9, "mamba_n_groups": 3, "mamba_d_state": 7, "mamba_d_conv": 3, "mamba_conv_bias": False,
            "mamba_proj_bias": True, "num_local_experts": 5, "position_embedding_type": "rope", "tied": True,
            "attention_bias": True, "layer_types": ["full_attention", "linear_attention"], "rms_norm_eps": 1e-3},
        "no experts": {**GRANITE_MAMBA, "num_local_experts": 0, "mamba_n_groups": 4, "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"], "mamba_d_head": 8},
    },
    "falcon_h1": {
        "plain": FALCON,
        "odd heads, tied": {**FALCON, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1,
            "head_dim": 10, "mamba_n_heads": 9, "mamba_d_ssm": 45, "mamba_n_groups": 3, "mamba_d_state": 7,
            "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_proj_bias": True, "projectors_bias": True,
            "attention_bias": True, "mlp_bias": True, "tied": True, "mamba_rms_norm": True, "rms_norm_eps": 1e-3},
        "gated norm": {**FALCON, "num_hidden_layers": 3, "mamba_d_ssm": None, "mamba_n_groups": 4,
            "mamba_rms_norm": True, "mamba_norm_before_gate": False, "rope_theta": 1e6},
    },
    "nemotron_h": {
        "plain": {**MAMBA, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
        "odd heads": {**MAMBA, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10,
            "mamba_num_heads": 9, "n_groups": 3, "mamba_head_dim": 5, "ssm_state_size": 7, "conv_kernel": 3,
            "n_routed_experts": 6, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 3, "norm_topk_prob": False,
            "routed_scaling_factor": 2.5, "use_conv_bias": False, "use_bias": True, "layer_norm_epsilon": 1e-4,
            "layers_block_type": ["moe", "linear_attention", "linear_attention", "full_attention", "moe"]},
        "no experts": {**MAMBA, "n_groups": 1, "mamba_num_heads": 3, "layer_norm_epsilon": 1e-3,
            "num_attention_heads": 3, "num_key_value_heads": 1, "n_routed_experts": 5,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
        "in blocks": {**MAMBA, "head_dim": 16, "mamba_head_dim": 16, "intermediate_size": 64,
            "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
        "bounded steps": {**MAMBA, "time_step_min": 0.2, "mamba_num_heads": 8, "n_groups": 4, "conv_kernel": 2,
            "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention"]},
    },
    "smollm3": {
        "plain": {**DENSE, **IDS, "num_hidden_layers": 4},
        "odd heads": {
            **DENSE, **IDS, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1,
            "no_rope_layers": [0, 1], "mlp_bias": True,  # where there are no positions, biases of keys have no gradient
        },
        "two of three, tied": {**DENSE, **IDS, "num_hidden_layers": 3, "no_rope_layers": [0, 1, 0], "tied": True},
        "windows": {
            **DENSE, **IDS, "num_hidden_layers": 4, "no_rope_layer_interval": 2, "use_sliding_window": True,
            "sliding_window": 5,
        },
        "windows with positions": {
            **DENSE, **IDS, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
    },
    "qwen2_moe": {
        "plain": {**DENSE, **GATED, "norm_topk_prob": True},
        "odd heads": {**DENSE, **GATED, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1,
            "num_experts": 5},
        "dense between, tied": {**DENSE, **GATED, "num_hidden_layers": 3, "decoder_sparse_step": 2, "qkv_bias": False,
            "tied": True},
        "windows": {**DENSE, **GATED, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 6,
            "max_window_layers": 2},
    },
    "deepseek_v3": {
        "plain": LATENT,
        "odd heads, tied": {**LATENT, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3,
            "q_lora_rank": None, "v_head_dim": 18, "n_routed_experts": 5, "n_shared_experts": 2, "n_group": 1,
            "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 0, "norm_topk_prob": False,
            "rope_interleave": False, "tied": True},
        "biased, scaled by yarn": {**LATENT, "v_head_dim": 12, "attention_bias": True, "routed_scaling_factor": 1.0,
            "rms_norm_eps": 1e-3, "rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                "mscale": 1.0, "mscale_all_dim": 0.7}},
        "one group": {**LATENT, "num_hidden_layers": 2, "q_lora_rank": None, "v_head_dim": 5, "n_group": 1,
            "topk_group": 1, "rope": {"rope_type": "linear", "factor": 3.0}},
    },
    "deepseek_v32": {
        "plain": INDEXED,
        "odd heads, tied": {**INDEXED, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3,
            "v_head_dim": 18, "n_routed_experts": 5, "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
            "num_experts_per_tok": 2, "first_k_dense_replace": 0, "norm_topk_prob": False, "index_n_heads": 13,
            "index_head_dim": 4, "index_topk": 3, "tied": True},
        "biased, scaled by yarn": {**INDEXED, "v_head_dim": 12, "attention_bias": True, "routed_scaling_factor": 1.0,
            "rms_norm_eps": 1e-3, "index_head_dim": 10, "index_topk": 12, "rope": INDEXED_YARN},
    },
    "glm_moe_dsa": {
        "plain": {**INDEXED, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "full"]},
        "odd heads, tied": {**INDEXED, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3,
            "v_head_dim": 18, "n_routed_experts": 5, "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
            "num_experts_per_tok": 2, "first_k_dense_replace": 0, "index_n_heads": 13, "index_head_dim": 6,
            "index_topk": 3, "tied": True},
        "two of three shared, scaled by yarn": {**INDEXED, "num_hidden_layers": 6, "v_head_dim": 12,
            "attention_bias": True, "rms_norm_eps": 1e-3, "index_topk": 12, "index_topk_freq": 3,
            "index_skip_topk_offset": 1, "rope": INDEXED_YARN},
    },
    "glm4_moe_lite": {
        "plain": {**LITE, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        "odd heads, tied": {**LITE, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3,
            "q_lora_rank": None, "v_head_dim": 18, "n_routed_experts": 5, "n_shared_experts": 2, "n_group": 1,
            "topk_group": 1, "num_experts_per_tok": 2, "mlp_layer_types": ["sparse", "sparse"], "norm_topk_prob": False,
            "rope_interleave": False, "tied": True},
        "biased, scaled by yarn": {**LITE, "v_head_dim": 12, "attention_bias": True, "routed_scaling_factor": 1.0,
            "rms_norm_eps": 1e-3, "mlp_layer_types": ["dense", "dense", "sparse"], "rope": {"rope_type": "yarn",
                "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.7}},
    },
    "mistral": {"plain": {**DENSE, "sliding_window": 7}, "odd heads, tied": {**DENSE, "num_attention_heads": 3,
            "num_key_value_heads": 1, "head_dim": 10, "tied": True, "sliding_window": 16},
        "windows of two, wide heads": {**DENSE, "head_dim": 20, "sliding_window": 2, "rope_theta": 500.0},
        "no window": {**DENSE, "sliding_window": None}},
    "ministral3": {
        "plain": {**DENSE, "head_dim": 8, "max_position_embeddings": 64,
            "rope": {**YARN, "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "odd heads, tied": {**DENSE, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10, "tied": True,
            "sliding_window": 16, "max_position_embeddings": 64, "rope": {"rope_type": "yarn", "factor": 8.0,
                "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.1}},
        "no growth": {**DENSE, "num_key_value_heads": 4, "head_dim": 12, "max_position_embeddings": 64,
            "rms_norm_eps": 1e-3, "rope_theta": 500.0, "rope": {**YARN, "llama_4_scaling_beta": 0.0}},
    },
    "mixtral": {"plain": {**DENSE, **EXPERTS}, "windows": {**DENSE, **EXPERTS, "sliding_window": 5},
        "odd heads": {**DENSE, **EXPERTS, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 12},
        "all experts a token, tied": {**DENSE, "num_local_experts": 3, "num_experts_per_tok": 3, "tied": True}},
    "minimax_m2": {
        "plain": {**DENSE, **EXPERTS, **IDS, "head_dim": 8, "intermediate_size": 24, "rope":
            {"partial_rotary_factor": 0.5}},
        "odd heads, tied": {**DENSE, **IDS, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1,
            "head_dim": 10, "intermediate_size": 20, "num_local_experts": 5, "num_experts_per_tok": 3, "tied": True,
            "rope": {"partial_rotary_factor": 0.6}},
        "all rotated, scaled by yarn": {**DENSE, **EXPERTS, **IDS, "num_key_value_heads": 4, "head_dim": 12,
            "rms_norm_eps": 1e-3, "intermediate_size": 16, "max_position_embeddings": 64, "rope": {"rope_type": "yarn",
                "factor": 4.0, "original_max_position_embeddings": 16}},
    },
    "qwen3_moe": {
        "plain": {**DENSE, **EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True},
        "dense between": {**DENSE, **EXPERTS, "num_hidden_layers": 3, "moe_intermediate_size": 24,
            "norm_topk_prob": True, "mlp_only_layers": [1], "attention_bias": True},
        "windows": {**DENSE, **EXPERTS, "moe_intermediate_size": 16, "use_sliding_window": True, "sliding_window": 6},
        "scores as they are, tied": {**DENSE, **EXPERTS, "moe_intermediate_size": 12, "head_dim": 14, "tied": True},
        "odd heads": {**DENSE, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 6,
            "num_local_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": True},
    },
    "gemma3": {
        "plain": {**DENSE, **IDS, "head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8, "rope_theta": 500.0,
            "layer_types": ["sliding_attention", "full_attention"], "tied": True},
        "wide heads, capped logits": {**DENSE, **IDS, "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 20,
            "num_hidden_layers": 3, "layer_types": None, "sliding_window_pattern": 3, "final_logit_softcapping": 2.0,
            "attention_bias": True, "rms_norm_eps": 1e-3, "tied": True},
        "odd heads, scaled positions": {**DENSE, **IDS, "hidden_size": 36, "num_attention_heads": 3,
            "num_key_value_heads": 1, "head_dim": 10, "sliding_window": 16, "query_pre_attn_scalar": 7,
            "rope_theta": 5e4, "local_theta": 100.0, "layer_types": ["full_attention", "sliding_attention"],
            "rope": {"rope_type": "linear", "factor": 8.0}},
        "no window": {**DENSE, **IDS, "head_dim": 8, "query_pre_attn_scalar": 8, "layer_types": ["full_attention"] * 2,
            "final_logit_softcapping": 30.0, "tied": True},
    },
    "gemma4": {
        "plain": {**GEMMA4, "tied": True},
        "odd heads, capped logits": {**GEMMA4, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1,
            "head_dim": 10, "global_head_dim": 6, "sliding_window": 16, "attention_k_eq_v": False, "rope":
                {"rope_type": "proportional", "partial_rotary_factor": 0.7},
            "final_logit_softcapping": 2.0, "local_theta": 100.0, "num_hidden_layers": 3, "rms_norm_eps": 1e-3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"], "attention_bias": True},
        "no window": {**GEMMA4, "layer_types": ["full_attention"] * 2, "num_global_key_value_heads": None,
            "rope": {"rope_type": "default"}, "tied": True},
        "per-layer inputs, shared keys": {**GEMMA4, **GEMMA4_E, "tied": True},
        "one shared block, odd heads": {**GEMMA4, **GEMMA4_E, "hidden_size": 36, "num_attention_heads": 3,
            "num_key_value_heads": 1, "head_dim": 10, "global_head_dim": 6, "sliding_window": 2,
            "hidden_size_per_layer_input": 7, "vocab_size_per_layer_input": 300, "attention_bias": True,
            "num_hidden_layers": 3, "num_kv_shared_layers": 1, "use_double_wide_mlp": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"], "final_logit_softcapping": 2.0},
        "per-layer inputs alone, no window": {**GEMMA4, "layer_types": ["full_attention"] * 2,
            "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 270, "tied": True},
    },
    "gemma4_unified": {
        "plain": {**GEMMA4_UNIFIED, "num_hidden_layers": 3, "layer_types": None, "tied": True},
        "odd heads": {**GEMMA4_UNIFIED, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3,
            "num_global_key_value_heads": 1, "head_dim": 10, "global_head_dim": 14, "sliding_window": 2,
            "final_logit_softcapping": 3.0, "rms_norm_eps": 1e-3},
        "no window": {**GEMMA4_UNIFIED, "layer_types": ["full_attention"] * 2, "attention_k_eq_v": False,
            "rope": {"rope_type": "default"}, "tied": True},
    },
    "olmoe": {
        "plain": {**DENSE, **IDS, "intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
        "odd heads, tied": {**DENSE, **IDS, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1,
            "intermediate_size": 20, "num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True, "tied": True},
        "every head its own, biased": {**DENSE, **IDS, "num_key_value_heads": 4, "intermediate_size": 16,
            "num_experts": 4, "num_experts_per_tok": 4, "attention_bias": True, "rms_norm_eps": 1e-3},
    },
    "ernie4_5": {
        "plain": {**DENSE, **IDS, "head_dim": 8},
        "odd heads, tied": {**DENSE, **IDS, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1,
            "head_dim": 10, "tied": True},
        "every bias, scaled": {**DENSE, **IDS, "num_key_value_heads": 4, "head_dim": 12, "use_bias": True,
            "rms_norm_eps": 1e-3, "max_position_embeddings": 64, "rope": {"rope_type": "linear", "factor": 3.0}},
    },
    "exaone4": {
        "plain": {**DENSE, **IDS, "num_hidden_layers": 4, "sliding_window": 7, "layer_types": None},
        "odd heads, tied": {**DENSE, **IDS, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1,
            "head_dim": 10, "sliding_window": 2, "layer_types": ["full_attention", "sliding_attention"], "tied": True},
        "no window": {**DENSE, **IDS, "num_key_value_heads": 4, "sliding_window": None, "rms_norm_eps": 1e-3,
            "layer_types": ["full_attention"] * 2, "rope_theta": 500.0},
    },
    "dots1": {
        "plain": {**GROUPED, **IDS, "norm_topk_prob": True},
        "odd heads, tied": {**GROUPED, **IDS, "num_hidden_layers": 2, "hidden_size": 36, "num_attention_heads": 3,
            "num_key_value_heads": 1, "head_dim": 10, "n_routed_experts": 5, "n_group": 1, "topk_group": 1,
            "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 0, "tied": True},
        "windows, biased": {**GROUPED, **IDS, "sliding_window": 6, "max_window_layers": 1, "attention_bias": True,
            "layer_types": None, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-3},
    },
    "gemma4_moe": {
        "plain": {**GEMMA4, **GEMMA4_EXPERTS, "tied": True},
        "odd heads": {**GEMMA4, **GEMMA4_EXPERTS, "hidden_size": 36, "num_attention_heads": 3,
            "num_key_value_heads": 3, "num_global_key_value_heads": 1, "head_dim": 10, "global_head_dim": 14,
            "num_experts": 5, "top_k_experts": 3,
            "sliding_window": 2, "layer_types": ["full_attention"] * 2, "final_logit_softcapping": 3.0},
        "all experts a token, tied": {**GEMMA4, **GEMMA4_EXPERTS, "num_hidden_layers": 3, "layer_types": None,
            "num_experts": 3, "top_k_experts": 3, "attention_k_eq_v": False, "num_key_value_heads": 2, "tied": True},
    },
    "gpt_oss": {
        "plain": {**OSS, "head_dim": 8, "sliding_window": 7},
        "odd heads": {**OSS, "num_hidden_layers": 3, "hidden_size": 36, "num_attention_heads": 3,
            "num_key_value_heads": 1, "head_dim": 10, "sliding_window": 2, "num_local_experts": 5,
            "num_experts_per_tok": 3},
        "no bias, tied": {**OSS, "head_dim": 20, "attention_bias": False,
            "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16, "swiglu_limit": 0.5,
            "swiglu_alpha": 1.3, "tied": True},
        "in blocks": {**OSS, "head_dim": 8, "intermediate_size": 64, "sliding_window": 7},
        "no window, not scaled": {**OSS, "head_dim": 8, "layer_types": ["full_attention"] * 2, "num_key_value_heads": 4,
            "rope": {}},
    },
}  # fmt: skip
# Steps of its states have a bound, which transformers forgets where it continues a text.
UNBOUNDED = ("nemotron_h", "bounded steps")
# Family → its `model_type`, where that is another name.
TYPES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_moe": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}


GLM4_NORMS = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}


def make(family: str, name: str, folder: Path, **saving: Any) -> Any:
    """A random model in fp32, saved into a folder. saving: arguments of `save_pretrained`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = dict(CONFIGS[family][name])
    keys["tie_word_embeddings"] = keys.pop("tied", False)
    rope = {"rope_type": "default", "rope_theta": keys.pop("rope_theta", 10_000.0), **keys.pop("rope", {})}
    if family in ("gemma3", "gemma4", "gemma4_moe", "gemma4_unified", "olmo3"):  # of layers of each type
        local = {"rope_type": "default", "rope_theta": keys.pop("local_theta", 10_000.0)}
        rope = {"full_attention": rope, "sliding_attention": local}
    config = AutoConfig.for_model(TYPES.get(family, family), **{"initializer_range": 0.2, **keys}, rope_parameters=rope)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms that are 1 would hide that they are not read
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # states that decay slowly, over several chunks
                parameter.sub_(4)
            elif name.endswith("conv1d.weight"):  # queries and keys whose length is not close to zero
                parameter.mul_(3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
            elif name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand_like(buffer))
    model.save_pretrained(folder, **saving)
    if (
        keys.get("layer_types") is None and family != "nemotron_h"
    ):  # which then follow from other keys, as in the files of version 4
        file = folder / "config.json"
        saved = {key: value for key, value in json.loads(file.read_text()).items() if key != "layer_types"}
        file.write_text(json.dumps(saved))
    return model


def coded(folder: Path, coding: str) -> dict[str, torch.Tensor]:
    """Give a folder the matrices of its experts, or all of its blocks, as codes, and return the values of these."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = json.loads((folder / "config.json").read_text())
    tensors = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    values = {name: each.bfloat16() for name, each in tensors.items()}
    for name, value in tensors.items():
        if coding == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = value.shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 124, blocks.shape[:-1], dtype=torch.uint8)
            values |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        elif (coding == "fp8" and name.endswith("_proj.weight")) or name.endswith("_mqa.weight"):
            scales = torch.rand([-(-extent // 16) for extent in value.shape]) / 100 + 0.01
            whole = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)[: len(value), : value.shape[1]]
            codes = (value / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
            values |= {name: codes, f"{name}_scale_inv": scales}
            tensors[name] = codes.float() * whole
    config["quantization_config"] = {"quant_method": coding, "weight_block_size": [16, 16]}
    if coding == "mxfp4":
        for name in [each.removesuffix("_blocks") for each in values if each.endswith("_blocks")]:
            tensors[name] = convert_moe_packed_tensors(values[f"{name}_blocks"], values[f"{name}_scales"])
            del values[name]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(values, folder / "model.safetensors")
    return {name: each.bfloat16() for name, each in tensors.items()}


class Whole(TorchFunctionMode):
    """Leaves numbers in fp64 that a model would round to fp32: of delta nets the gradients are otherwise further from
    the exact ones than the limit. every: also makes those fp64 that have another format."""

    def __init__(self, *, every: bool = False) -> None:
        super().__init__()
        self.every = every

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and (self.every or args[0].dtype == torch.float64):
            if func is torch.Tensor.float:
                return args[0].double()
            if func in (torch.Tensor.to, torch.Tensor.type):
                args = tuple(torch.float64 if each is torch.float32 else each for each in args)
                kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in kwargs.items()}
        return func(*args, **kwargs)


def gradients(model: Any, rows: list[dict[str, np.ndarray]]) -> tuple[float, dict[str, np.ndarray]]:
    """The loss of the rows of a step and its gradients, by their names in xtrain; each document goes through the model
    by itself.

    rows: of each microbatch `ids` and `labels` [B, S], and `bounds` of documents over B · S positions.
    """
    model.zero_grad()
    total, count = torch.zeros(()), 0
    for each in rows:
        ids, labels = (torch.from_numpy(each[name]).flatten() for name in ("ids", "labels"))
        for begin, end in zip(each["bounds"][:-1], each["bounds"][1:], strict=True):
            wanted = labels[begin:end]
            count += int((wanted >= 0).sum())
            with Whole():
                logits = model(ids[None, begin:end], use_cache=False).logits[0]
            total = total + F.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
    loss = total / count
    loss.backward()
    found = ((name, each.grad) for name, each in model.named_parameters() if each.grad is not None)
    return loss.item(), {name: value.numpy() for name, value in in_our_names(model, found)}


def in_our_names(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a model by their names in xtrain: experts are stacked [E, in, out], with gate and up apart."""
    interleaved = model.config.model_type == "gpt_oss"
    for name, value in tensors:
        name = (
            name.removeprefix("model.")
            .replace(".mlp.router.", ".mlp.gate.")
            .replace(".mlp.e_score", ".mlp.gate.e_score")
        )
        if model.config.model_type == "nemotron_h":
            yield from _of_nemotron(name, value, model.config)
            continue
        if model.config.model_type == "falcon_h1":
            yield from _of_falcon(name, value, model.config)
            continue
        if model.config.model_type == "granitemoehybrid":
            yield from _of_granite(name, value, model.config)
            continue
        if ".experts." in name and name.rpartition(".")[2] in ("gate_up_proj", "down_proj") and not interleaved:
            value = value.transpose(1, 2)
        if model.config.model_type == "glm4":
            name = re.sub(r"(?<=\.)\w+_layernorm", lambda norm: GLM4_NORMS.get(norm[0], norm[0]), name)
        if model.config.model_type.startswith("gemma4"):
            name = re.sub(
                r"(?<=\d\.)(experts\.|router\.|pre_feedforward_layernorm_2\.|layer_scalar|per_layer_).*",
                _of_gemma4,
                GEMMA4_INPUTS.get(name, name),
            )
        if ".linear_attn." in name:
            yield from _of_delta_net(name, value, model.config)
        elif name.endswith(".mlp.gate_up_proj.weight"):
            for each, part in zip(("gate_proj", "up_proj"), value.chunk(2), strict=True):
                yield name.replace("gate_up_proj", each), part
        elif name.endswith(".qkv_proj.weight"):
            heads, keys = model.config.num_attention_heads, model.config.num_key_value_heads
            width = len(value) // (heads + 2 * keys)
            for each, part in zip("qkv", value.split([heads * width, keys * width, keys * width]), strict=True):
                yield name.replace("qkv_proj", f"{each}_proj"), part
        elif "experts.gate_up_proj" in name:
            parts = (value[..., ::2], value[..., 1::2]) if interleaved else value.chunk(2, dim=2)
            for each, part in zip(("gate_proj", "up_proj"), parts, strict=True):
                yield name.replace("gate_up_proj", each), part
        else:
            yield name, value


GEMMA4_INPUTS = {
    "embed_tokens_per_layer.weight": "layers.0.per_layer_inputs.table.weight",
    "per_layer_model_projection.weight": "layers.0.per_layer_inputs.projection.weight",
    "per_layer_projection_norm.weight": "layers.0.per_layer_inputs.norm.weight",
}


def _of_gemma4(name: re.Match[str]) -> str:
    """Name in xtrain of a tensor of a block."""
    if name[0].startswith("per_layer_inputs."):
        return name[0]
    names = {
        "per_layer_input_gate.weight": "per_layer_input.gate.weight",
        "per_layer_projection.weight": "per_layer_input.projection.weight",
        "layer_scalar": "layer_scalar.factor",
        "router.proj.weight": "moe.gate.weight",
        "router.scale": "moe.gate.norm.weight",
    }
    names |= {"router.per_expert_scale": "moe.gate.factors", "pre_feedforward_layernorm_2.weight": "moe.norm.weight"}
    return names.get(name[0], f"moe.{name[0]}")


def _of_delta_net(name: str, value: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of a delta net, apart: of Qwen3-Next the rows of a key head and its value heads are side by side."""
    start, _, tensor = name.rpartition("linear_attn.")
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    each = [config.linear_key_head_dim] * 2 + [config.linear_value_head_dim * heads // keys] * 2
    if tensor in ("in_proj_qkvz.weight", "in_proj_ba.weight"):
        sizes, names = ([heads // keys] * 2, "ba") if "ba" in tensor else (each, "qkvz")
        parts = (part.flatten(0, 1) for part in value.unflatten(0, (keys, -1)).split(sizes, dim=1))
    elif tensor in ("in_proj_qkv.weight", "conv1d.weight"):
        names, parts = "qkv", value.split([keys * size for size in each[:3]])
    elif tensor.startswith("in_proj_"):
        names, parts = tensor[len("in_proj_")], (value,)
    else:
        yield name, value
        return
    kind = "conv" if tensor.startswith("conv") else "proj"
    for each_name, part in zip(names, parts, strict=True):
        yield f"{start}linear_attn.{each_name}_{kind}.weight", part


def _of_granite(name: str, value: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of a Granite with mixers, whose SwiGLUs have gate and up in one matrix."""
    shared = "mlp.shared_experts." if config.num_local_experts else "mlp."
    for theirs, ours in {
        "block_sparse_moe.router": "mlp.gate",
        "block_sparse_moe.": "mlp.",
        "shared_mlp.": shared,
    }.items():
        name = name.replace(theirs, ours)
    if ".mamba." in name:
        inner, vectors = config.mamba_n_heads * config.mamba_d_head, config.mamba_n_groups * config.mamba_d_state
        yield from _of_mixer(name, value, inner, vectors, config.mamba_n_heads)
    elif name.endswith("input_linear.weight"):
        for each, part in zip(("gate_proj", "up_proj"), value.chunk(2), strict=True):
            yield name.replace("input_linear", each), part
    elif "experts.gate_up_proj" in name:
        for each, part in zip(("gate_proj", "up_proj"), value.transpose(1, 2).chunk(2, dim=2), strict=True):
            yield name.replace("gate_up_proj", each), part
    else:
        yield (
            name.replace("output_linear", "down_proj"),
            value.transpose(1, 2) if value.dim() == 3 and ".experts." in name else value,
        )


def _of_falcon(name: str, value: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of a Falcon-H1, with the matrices of a mixer apart."""
    theirs = {"final_layernorm": "norm", "feed_forward": "mlp", "pre_ff_layernorm": "post_attention_layernorm"}
    for each, ours in theirs.items():
        name = name.replace(each, ours)
    if ".mamba." in name:
        inner, vectors = config.mamba_n_heads * config.mamba_d_head, config.mamba_n_groups * config.mamba_d_state
        yield from _of_mixer(name, value, inner, vectors, config.mamba_n_heads)
    else:
        yield name, value


def _of_mixer(
    name: str, value: torch.Tensor, inner: int, vectors: int, heads: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of a Mamba-2 mixer, whose matrices are apart."""
    start, _, inside = name.rpartition(".mamba.")
    tensor, _, ending = inside.rpartition(".")
    sizes = {"x": inner, "b": vectors, "c": vectors}
    if tensor == "in_proj":
        sizes = {"z": inner, **sizes, "dt": heads}
    elif tensor != "conv1d":
        yield name, value
        return
    for each, part in zip(sizes, value.split(list(sizes.values())), strict=True):
        yield f"{start}.mamba.{each}_{'conv' if tensor == 'conv1d' else 'proj'}.{ending}", part


def _of_nemotron(name: str, value: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of a Nemotron-H, whose blocks have one layer each, and a mixer's matrices apart."""
    name = {"embeddings.weight": "embed_tokens.weight", "norm_f.weight": "norm.weight"}.get(name, name)
    if ".mixer." not in name:
        yield re.sub(r"^(layers\.\d+)\.norm\.", r"\1.input_layernorm.", name), value
        return
    start, _, inside = name.partition(".mixer.")
    kind = config.layers_block_type[int(start.split(".")[1])]
    module = {"linear_attention": "mamba", "full_attention": "self_attn"}.get(kind, "mlp")
    if module == "mamba":
        inner, vectors = config.mamba_num_heads * config.mamba_head_dim, config.n_groups * config.ssm_state_size
        yield from _of_mixer(f"{start}.mamba.{inside}", value, inner, vectors, config.mamba_num_heads)
    else:
        yield f"{start}.{module}.{inside}", value.transpose(1, 2) if value.dim() == 3 else value
