"""Models as they are published: what their `config.json` says of their shape, and how many parameters their files have.

python tests/support/published_models.py            # whether docs/families.md is as it is said now
python tests/support/published_models.py --write    # write its tables anew

A number of parameters is that of the publisher's files: `metadata.total_size` of `model.safetensors.index.json` in
bytes, by 2 bytes a parameter in bf16, or what huggingface.co shows of the headers of the files; of gpt-oss that of its
files as GGUF, which list the same tensors. A tied head counts once. Of a model with images it is that of its text.
Numbers that are not trained, such as biases of routers and factors of blocks, count too.
Layers that predict further tokens, which transformers does not load, do not count.
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from reference_models import CONFIGS

from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.model import FAMILIES
from xtrain.plan.architecture import buffers
from xtrain.plan.estimates import Parameters
from xtrain.plan.findings import Findings
from xtrain.plan.parameters import count_parameters
from xtrain.planner.derive.model import derive_architecture

PAGE: Final = Path(__file__).parents[2] / "docs" / "families.md"
BLOCK: Final = re.compile(r"(?P<begin><!-- models (?P<name>\w+), [^>]*-->\n).*?(?P<end><!-- end -->)", re.DOTALL)
LLAMA31: Final = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 131072,
    "mlp_bias": False, "model_type": "llama", "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 128256,
}  # fmt: skip
QWEN: Final = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "initializer_range": 0.02, "rms_norm_eps": 1e-06, "torch_dtype": "bfloat16", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3: Final = {**QWEN, "attention_bias": False, "head_dim": 128, "max_position_embeddings": 40960,
                "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None}  # fmt: skip
QWEN3_MOE: Final = {
    **QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
    "num_key_value_heads": 4, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}  # fmt: skip
DENSE3: Final = {**QWEN3, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 8,
                 "tie_word_embeddings": False}  # fmt: skip
# Without its `quantization_config`: the files are mxfp4, in which numbers of experts share their scales.
OSS: Final = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "max_position_embeddings": 131072, "model_type": "gpt_oss",
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_key_value_heads": 8, "output_router_logits": False,
    "pad_token_id": 199999, "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
GEMMA3: Final = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3", "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
                      "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
                      "patch_size": 14, "vision_use_head": False},
}  # fmt: skip
GEMMA4: Final = {
    "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": True, "dtype": "bfloat16",
    "enable_moe_block": False, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "initializer_range": 0.02,
    "max_position_embeddings": 262144, "model_type": "gemma4_text", "moe_intermediate_size": None, "num_experts": None,
    "num_kv_shared_layers": 0, "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
    "sliding_window": 1024, "tie_word_embeddings": True, "top_k_experts": None,
    "use_bidirectional_attention": "vision", "use_cache": True, "use_double_wide_mlp": False, "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}  # fmt: skip
GEMMA4_INPUTS: Final = {  # what only E2B and E4B have
    "attention_k_eq_v": False, "hidden_size_per_layer_input": 256, "sliding_window": 512,
    "use_bidirectional_attention": None,
}  # fmt: skip
GEMMA4_PARTS: Final = (  # keys that Gemma 4 12B does not have
    *("enable_moe_block", "hidden_size_per_layer_input", "moe_intermediate_size", "num_experts", "top_k_experts"),
    "vocab_size_per_layer_input",
)
GEMMA4_IMAGES: Final = {
    "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None, "audio_token_id": 258881,
    "boa_token_id": 256000, "boi_token_id": 255999, "dtype": "bfloat16", "eoa_token_index": 258883,
    "eoi_token_id": 258882, "eos_token_id": [1, 106], "image_token_id": 258880, "initializer_range": 0.02,
    "model_type": "gemma4", "tie_word_embeddings": True, "video_token_id": 258884,
    "vision_config": {"hidden_size": 1152, "model_type": "gemma4_vision"}, "vision_soft_tokens_per_image": 280,
}  # fmt: skip
DELTA: Final = {
    "attention_bias": False, "attention_dropout": 0.0, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "moe_intermediate_size": 512,
    "num_attention_heads": 16, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip
PHI3: Final = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {},
    "embd_pdrop": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "phi3",
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
QWEN35: Final = {
    "attention_bias": False, "attention_dropout": 0.0, "full_attention_interval": 4, "head_dim": 256,
    "hidden_act": "silu", "initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "rms_norm_eps": 1e-06,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                        "rope_theta": 10000000, "rope_type": "default"},
    "use_cache": True, "vocab_size": 248320,
}  # fmt: skip
IMAGES: Final = {
    "image_token_id": 248056, "tie_word_embeddings": False, "video_token_id": 248057, "vision_start_token_id": 248053,
    "vision_end_token_id": 248054, "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5_vision"},
}  # fmt: skip


FALCON_H1: Final = {
    "architectures": ["FalconH1ForCausalLM"], "attention_bias": False, "attention_in_multiplier": 1.0,
    "hidden_act": "silu", "initializer_range": 0.02, "mamba_chunk_size": 128, "mamba_conv_bias": True,
    "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_expand": 2, "mamba_norm_before_gate": False,
    "mamba_proj_bias": False, "mamba_use_mlp": True, "max_position_embeddings": 131072, "mlp_bias": False,
    "model_type": "falcon_h1", "projectors_bias": False, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 100000000000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def vision(dim: int) -> int:
    """Parameters of Gemma 3 beside its text: a SigLIP of 4096 patches of 14 · 14 pixels, 1152 wide, whose matrices and
    norms have biases, and what projects its outputs to `dim`."""
    width, ffn, layers = 1152, 4304, 27
    patches = (3 * 14**2 + 1) * width + 4096 * width
    block = 4 * (width + 1) * width + (width + 1) * ffn + (ffn + 1) * width + 2 * 2 * width
    return patches + layers * block + 2 * width + width + width * dim


def gemma4_vision(dim: int) -> int:
    """Parameters of Gemma 4 beside its text: 27 blocks 1152 wide for patches of 16 · 16 pixels, 10,240 places in each
    direction, 72 numbers a head, a shift and a factor of each output, and what projects these to `dim`."""
    width, ffn, layers = 1152, 4304, 27
    patches = 3 * 16**2 * width + 2 * 10_240 * width
    block = 4 * width * width + 3 * width * ffn + 4 * width + 2 * 72
    return patches + layers * block + 2 * width + width * dim


def gemma4_senses(dim: int, heads: int, local: int, full: int) -> int:
    """Parameters of Gemma 4 E2B and E4B beside those that compute texts: both towers, as many as transformers' classes
    have, their projections to `dim`, and keys and values of `local` blocks with and `full` without the window that
    use shared ones."""
    towers = 167_364_608 + 304_824_608 + (768 + 1536) * dim
    return towers + sum(count * (2 * heads * width * dim + width) for count, width in ((local, 256), (full, 512)))


def qwen_vision(dim: int) -> int:
    """Parameters of Qwen3.5 beside its text: 27 blocks 1152 wide for patches of two times 16 · 16 pixels, 2304 places,
    and what projects four outputs together to `dim`."""
    width, ffn, layers = 1152, 4304, 27
    patches = (3 * 2 * 16**2 + 1) * width + 2304 * width
    block = (width + 1) * 4 * width + (width + 1) * ffn + (ffn + 1) * width + 2 * 2 * width
    joined = 4 * width
    return patches + layers * block + 2 * width + (joined + 1) * joined + (joined + 1) * dim


def further(dim: int, heads: int, kv_heads: int, feed_forward: int) -> int:
    """Parameters of the layer of Qwen3-Next and Qwen3.5 that predicts further tokens: heads are 256 wide."""
    width = 256
    attention = 3 * dim * heads * width + 2 * dim * kv_heads * width + 2 * width
    return 2 * dim * dim + 3 * dim + attention + 2 * dim + feed_forward


def with_shared(dim: int, experts: int, width: int) -> int:
    """Parameters of a router, experts and a shared expert with a gate."""
    return experts * dim + (experts + 1) * 3 * dim * width + dim


# Name → `config.json`, and parameters.
PUBLISHED: Final[dict[str, tuple[dict[str, Any], int]]] = {
    "Llama-3.1-8B": ({**LLAMA31, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
            "num_hidden_layers": 32}, 8_030_261_248),
    "Llama-3.1-70B": ({**LLAMA31, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
            "num_hidden_layers": 80}, 70_553_706_496),
    "Llama-3.2-1B": ({**LLAMA31, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192,
            "num_attention_heads": 32, "num_hidden_layers": 16,
            "rope_scaling": {**LLAMA31["rope_scaling"], "factor": 32.0}, "tie_word_embeddings": True}, 1_235_814_400),
    "Llama-3.2-3B": ({**LLAMA31, "head_dim": 128, "hidden_size": 3072, "intermediate_size": 8192,
            "num_attention_heads": 24, "num_hidden_layers": 28,
            "rope_scaling": {**LLAMA31["rope_scaling"], "factor": 32.0}, "tie_word_embeddings": True}, 3_212_749_824),
    "Mistral-7B-v0.3": ({"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
            "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "use_cache": True, "vocab_size": 32768}, 7_248_023_552),
    "Qwen2.5-7B": ({**QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
            "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
            "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rope_theta": 1000000.0,
            "sliding_window": 131072, "tie_word_embeddings": False, "use_mrope": False, "vocab_size": 152064},
        7_615_616_512),
    "Qwen3-0.6B": ({**QWEN3, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024,
            "intermediate_size": 3072, "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28,
            "num_key_value_heads": 8, "tie_word_embeddings": True}, 596_049_920),
    "Qwen3-4B": ({**DENSE3, "hidden_size": 2560, "intermediate_size": 9728, "max_window_layers": 36,
            "num_attention_heads": 32, "num_hidden_layers": 36, "tie_word_embeddings": True}, 4_022_468_096),
    "Qwen3-8B": ({**DENSE3, "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 36,
            "num_attention_heads": 32, "num_hidden_layers": 36}, 8_190_735_360),
    "Qwen3-14B": ({**DENSE3, "hidden_size": 5120, "intermediate_size": 17408, "max_window_layers": 40,
            "num_attention_heads": 40, "num_hidden_layers": 40}, 14_768_307_200),
    "Qwen3-32B": ({**DENSE3, "hidden_size": 5120, "intermediate_size": 25600, "max_window_layers": 64,
            "num_attention_heads": 64, "num_hidden_layers": 64}, 32_762_123_264),
    "Qwen3-30B-A3B": ({**QWEN3_MOE, "hidden_size": 2048, "intermediate_size": 6144, "max_window_layers": 48,
            "moe_intermediate_size": 768, "num_attention_heads": 32, "num_hidden_layers": 48}, 30_532_122_624),
    "Qwen3-235B-A22B": ({**QWEN3_MOE, "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 94,
            "moe_intermediate_size": 1536, "num_attention_heads": 64, "num_hidden_layers": 94}, 235_093_634_560),
    "Qwen1.5-MoE-A2.7B": ({**QWEN, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
            "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 8192,
            "max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16,
            "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16,
            "output_router_logits": False, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False},
        14_315_784_192),
    "Mixtral-8x7B-v0.1": ({"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
            "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
            "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32000}, 46_702_792_704),
    # Its own file has keys of fp8 weights and of code beside them, which a folder with bf16 weights has not.
    "DeepSeek-V3": ({"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
            "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
            "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
            "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
            "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
            "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
            "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128,
            "vocab_size": 129280}, 671_026_419_200),
    # The digits of both follow from the config, and agree with transformers' models. Published as 685B with the layer
    # that predicts further tokens, and as 744B.
    "DeepSeek-V3.2": ({"architectures": ["DeepseekV32ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
            "hidden_size": 7168, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
            "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
            "max_position_embeddings": 163840, "model_type": "deepseek_v32", "moe_intermediate_size": 2048,
            "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
            "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
            "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
            "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128,
            "vocab_size": 129280}, 671_877_944_064),
    "GLM-5": ({"architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "dtype": "bfloat16", "eos_token_id": [154820, 154827, 154829], "ep_size": 1, "first_k_dense_replace": 3,
            "head_dim": 64, "hidden_act": "silu", "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32,
            "index_topk": 2048, "indexer_rope_interleave": True, "initializer_range": 0.02,
            "intermediate_size": 12288, "kv_lora_rank": 512, "max_position_embeddings": 202752,
            "model_type": "glm_moe_dsa", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1,
            "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
            "num_experts_per_tok": 8, "num_hidden_layers": 78, "num_key_value_heads": 64,
            "num_nextn_predict_layers": 1, "pad_token_id": 154820, "pretraining_tp": 1, "q_lora_rank": 2048,
            "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
            "rope_interleave": True, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
            "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1,
            "topk_method": "noaux_tc", "use_cache": True, "v_head_dim": 256, "vocab_size": 154880}, 743_911_218_432),
    # Published as 229B, of which a token uses 10B; the digits follow from the config.
    "MiniMax-M2": ({"architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0, "attn_type_list": [1] * 62,
            "auto_map": {}, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
            "intermediate_size": 1536, "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0,
            "layernorm_mlp_beta": 1.0, "max_position_embeddings": 196608, "mlp_intermediate_size": 8192,
            "model_type": "minimax_m2", "mtp_transformer_layers": 1, "num_attention_heads": 48,
            "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
            "num_mtp_modules": 3, "output_router_logits": False, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06,
            "rope_theta": 5000000, "rotary_dim": 64, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
            "scoring_func": "sigmoid", "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid",
            "sliding_window": None, "tie_word_embeddings": False, "use_cache": True, "use_mtp": True,
            "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064}, 228_689_764_864),
    "Phi-4": ({**PHI3, "hidden_size": 5120, "intermediate_size": 17920, "max_position_embeddings": 16384,
            "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 10,
            "original_max_position_embeddings": 16384, "rope_scaling": None, "rope_theta": 250000,
            "tie_word_embeddings": False, "vocab_size": 100352}, 14_659_507_200),
    # With other divisors, of which there are as many.
    "Phi-4-mini": ({**PHI3, "full_attn_mod": 1, "hidden_size": 3072, "intermediate_size": 8192, "interpolate_factor": 1,
            "lm_head_bias": False, "max_position_embeddings": 131072, "num_attention_heads": 24,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75, "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48,
                "type": "longrope"}, "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True,
            "vocab_size": 200064}, 3_836_021_760),
    "GLM-4-9B-0414": ({"architectures": ["Glm4ForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 13696, "max_position_embeddings": 32768,
            "model_type": "glm4", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2,
            "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 151552},
        9_400_279_040),
    # Published as 8.4B, and a vision tower of 0.4B; the digits follow from this config.
    "Ministral-3-8B, text": ({"architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10,
            "model_type": "mistral3", "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
            "spatial_merge_size": 2, "text_config": {"attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu",
                "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
                "max_position_embeddings": 262144, "model_type": "ministral3", "num_attention_heads": 32,
                "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_parameters": {
                    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
                    "rope_type": "yarn", "type": "yarn"}, "sliding_window": None, "tie_word_embeddings": False,
                "use_cache": True, "vocab_size": 131072}, "vision_config": {"model_type": "pixtral"},
            "vision_feature_layer": -1}, 8_489_553_920),
    # Published as 1T, of which a token uses 32B; the digits follow from the config.
    "Kimi-K2-Instruct": ({"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001,
            "bos_token_id": 163584, "eos_token_id": 163585, "ep_size": 1, "first_k_dense_replace": 1,
            "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
            "kv_lora_rank": 512, "max_position_embeddings": 131072, "model_type": "kimi_k2",
            "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384,
            "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
            "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
            "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
            "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 50000.0,
            "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
            "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True,
            "v_head_dim": 128, "vocab_size": 163840}, 1_026_408_232_448),
    "OLMo-2-0325-32B": ({"architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
            "intermediate_size": 27648, "max_position_embeddings": 4096, "model_type": "olmo2",
            "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 100277,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "use_cache": False, "vocab_size": 100352}, 32_234_279_936),
    "SmolLM3-3B": ({"architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
            "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
            "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36,
            "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06,
            "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "torch_dtype": "bfloat16",
            "use_cache": False, "use_sliding_window": False, "vocab_size": 128256}, 3_075_098_624),
    "Gemma-3-1B": ({"architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid",
            "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
            "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
            "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
            "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
            "use_cache": True, "vocab_size": 262144}, 999_885_952),
    "Gemma-3-4B, text": ({**GEMMA3, "text_config": {"hidden_size": 2560, "intermediate_size": 10240,
                "model_type": "gemma3_text", "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}},
        4_300_079_472 - vision(2560)),
    "Gemma-3-27B, text": ({**GEMMA3, "text_config": {"head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
                "model_type": "gemma3_text", "num_attention_heads": 32, "num_hidden_layers": 62,
                "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}},
        27_432_406_640 - vision(5376)),
    "Gemma-4-26B-A4B, text": ({**GEMMA4_IMAGES, "text_config": {**GEMMA4, "enable_moe_block": True,
                "hidden_size": 2816, "intermediate_size": 2112, "moe_intermediate_size": 704,
                "num_attention_heads": 16, "num_experts": 128, "num_global_key_value_heads": 2,
                "num_hidden_layers": 30, "num_key_value_heads": 8, "top_k_experts": 8,
                "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5}},
        25_805_936_206 - gemma4_vision(2816)),
    "Gemma-4-31B, text": ({**GEMMA4_IMAGES, "text_config": {**GEMMA4, "hidden_size": 5376, "intermediate_size": 21504,
                "num_attention_heads": 32, "num_global_key_value_heads": 4, "num_hidden_layers": 60,
                "num_key_value_heads": 16, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10}},
        31_273_088_876 - gemma4_vision(5376)),
    "Gemma-4-12B, text": ({**GEMMA4_IMAGES, "architectures": ["Gemma4UnifiedForConditionalGeneration"],
            "model_type": "gemma4_unified", "vision_config": {"model_type": "gemma4_unified_vision"},
            "text_config": {**{name: GEMMA4[name] for name in GEMMA4 if name not in GEMMA4_PARTS},
                "hidden_size": 3840, "intermediate_size": 15360, "model_type": "gemma4_unified_text",
                "num_attention_heads": 16, "num_global_key_value_heads": 1, "num_hidden_layers": 48,
                "num_key_value_heads": 8, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8}},
        11_907_350_320),
    "Gemma-4-E2B, text": ({**GEMMA4_IMAGES, "text_config": {**GEMMA4, **GEMMA4_INPUTS, "hidden_size": 1536,
                "intermediate_size": 6144, "num_attention_heads": 8, "num_hidden_layers": 35, "num_key_value_heads": 1,
                "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
                "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7}},
        5_123_178_051 - gemma4_senses(1536, 1, 16, 4)),
    "Gemma-4-E4B, text": ({**GEMMA4_IMAGES, "text_config": {**GEMMA4, **GEMMA4_INPUTS, "hidden_size": 2560,
                "intermediate_size": 10240, "num_attention_heads": 8, "num_hidden_layers": 42, "num_key_value_heads": 2,
                "num_kv_shared_layers": 18,
                "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7}},
        7_996_156_490 - gemma4_senses(2560, 2, 15, 3)),
    "OLMoE-1B-7B": ({"architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "clip_qkv": None, "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 1024, "max_position_embeddings": 4096,
            "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
            "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16,
            "output_router_logits": False, "pad_token_id": 1, "rope_scaling": None, "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
            "vocab_size": 50304}, 6_919_161_856),
    "dots.llm1": ({"architectures": ["Dots1ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "eos_token_id": 151643, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 32768,
            "max_window_layers": 62, "model_type": "dots1", "moe_intermediate_size": 1408, "moe_layer_freq": 1,
            "n_routed_experts": 128, "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 32,
            "num_experts_per_tok": 6, "num_hidden_layers": 62, "num_key_value_heads": 32, "rms_norm_eps": 1e-05,
            "rope_scaling": None, "rope_theta": 10000000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
            "sliding_window": None, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 152064},
        142_774_381_696),
    "EXAONE-4.0-32B": ({"architectures": ["Exaone4ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
            "eos_token_id": 361, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
            "intermediate_size": 27392, "max_position_embeddings": 131072, "model_type": "exaone4",
            "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 0,
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16, "rms_norm_eps": 1e-05,
            "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                             "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 102400},
        32_003_216_384),
    "ERNIE-4.5-0.3B": ({"architectures": ["Ernie4_5ForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 131072,
            "model_type": "ernie4_5", "num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2,
            "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True, "vocab_size": 103424}, 360_748_032),
    "gpt-oss-20b": ({**OSS, "layer_types": ["sliding_attention", "full_attention"] * 12, "num_hidden_layers": 24,
            "num_local_experts": 32}, 20_914_757_184),
    "gpt-oss-120b": ({**OSS, "layer_types": ["sliding_attention", "full_attention"] * 18, "num_hidden_layers": 36,
            "num_local_experts": 128}, 116_829_156_672),
    "OLMo-3-32B": ({"architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
            "intermediate_size": 27648, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
            "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 40,
            "num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
            "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
                "original_max_position_embeddings": 8192, "rope_type": "yarn"}, "rope_theta": 500000,
            "sliding_window": 4096, "tie_word_embeddings": False, "use_cache": False, "vocab_size": 100278},
        32_233_522_176),
    "Seed-OSS-36B": ({"architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.1,
            "attention_out_bias": False, "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 27648,
            "max_position_embeddings": 524288, "mlp_bias": False, "model_type": "seed_oss", "num_attention_heads": 80,
            "num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 1, "residual_dropout": 0.1,
            "rms_norm_eps": 1e-06, "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 155136},
        36_151_104_512),
    "Granite-3.3-8B": ({"architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attention_multiplier": 0.0078125, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12800,
            "logits_scaling": 16.0, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "granite",
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
            "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000.0,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 49159},
        8_170_864_640),
    # The card says 32 billion; transformers' own model of this config has this number.
    "Granite-4.0-H-Small": ({"architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.1, "intermediate_size": 768,
            "layer_types": [["mamba", "attention"][layer % 10 == 5] for layer in range(40)], "logits_scaling": 16.0,
            "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64,
            "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128,
            "mamba_proj_bias": False, "max_position_embeddings": 131072, "model_type": "granitemoehybrid",
            "num_attention_heads": 32, "num_experts_per_tok": 10, "num_hidden_layers": 40, "num_key_value_heads": 8,
            "num_local_experts": 72, "position_embedding_type": "nope", "residual_multiplier": 0.22,
            "rms_norm_eps": 1e-05, "rope_theta": 10000, "shared_intermediate_size": 1536, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 100352}, 32_207_337_984),
    # The card says 0.5 billion; transformers' own model of this config has this number.
    "Falcon-H1-0.5B": ({**FALCON_H1, "embedding_multiplier": 5.656854249492381, "head_dim": 64, "hidden_size": 1024,
            "intermediate_size": 2048, "key_multiplier": 0.39062499999999994, "lm_head_multiplier": 0.0390625,
            "attention_out_multiplier": 0.9375, "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_n_groups": 1,
            "mamba_n_heads": 24, "mamba_rms_norm": False, "max_position_embeddings": 16384,
            "mlp_multipliers": [0.8838834764831844, 0.5859375], "num_attention_heads": 8, "num_hidden_layers": 36,
            "num_key_value_heads": 2, "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.3535533905932738, 0.25,
            0.3535533905932738, 0.5, 0.3535533905932738], "ssm_out_multiplier": 0.23570226039551587,
            "vocab_size": 32784}, 521_411_104),
    # The sum of its file's header. Without its multipliers, which change no count.
    "Falcon-H1-1.5B": ({**FALCON_H1, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 4608,
            "mamba_d_ssm": 3072, "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_n_heads": 48,
            "mamba_rms_norm": True, "num_attention_heads": 8, "num_hidden_layers": 24, "num_key_value_heads": 2,
            "vocab_size": 65537}, 1_554_863_488),
    # The card says 34 billion; transformers' own model of this config has this number.
    "Falcon-H1-34B": ({**FALCON_H1, "embedding_multiplier": 5.656854249492381, "head_dim": 128, "hidden_size": 5120,
            "intermediate_size": 21504, "key_multiplier": 0.011048543456039804, "lm_head_multiplier": 0.0078125,
            "attention_out_multiplier": 0.0375, "mamba_d_head": 128, "mamba_d_ssm": 4096, "mamba_d_state": 256,
            "mamba_n_groups": 2, "mamba_n_heads": 32, "mamba_rms_norm": True, "max_position_embeddings": 262144,
            "mlp_multipliers": [0.1767766952966369, 0.011160714285714284], "num_attention_heads": 20,
            "num_hidden_layers": 72, "num_key_value_heads": 4, "ssm_in_multiplier": 0.25,
            "ssm_multipliers": [0.3535533905932738, 0.25, 0.1767766952966369, 0.5, 0.3535533905932738],
            "ssm_out_multiplier": 0.08838834764831845, "vocab_size": 261120}, 33_642_516_224),
    # The card says 31.6 billion; transformers' own model of this config has this number, with biases of routers.
    "Nemotron-3-Nano-30B-A3B": ({"architectures": ["NemotronHForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "bos_token_id": 1, "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2,
            "expand": 2, "head_dim": 128, "hidden_dropout": 0.0, "hidden_size": 2688,
            "hybrid_override_pattern": "MEMEM" + "*EMEMEM" * 4 + "*EMEMEMEM*EMEMEMEME", "initializer_range": 0.02,
            "intermediate_size": 1856, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
            "mamba_num_heads": 64, "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32",
            "max_position_embeddings": 262144, "mlp_bias": False, "mlp_hidden_act": "relu2",
            "model_type": "nemotron_h", "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
            "n_group": 1, "n_groups": 8, "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05,
            "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52,
            "num_key_value_heads": 2, "num_logits_to_keep": 1, "pad_token_id": 0, "partial_rotary_factor": 1.0,
            "rescale_prenorm_residual": True, "residual_in_fp32": False, "rope_theta": 10000,
            "routed_scaling_factor": 2.5, "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False,
            "time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001, "topk_group": 1,
            "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True, "use_conv_bias": True,
            "use_mamba_kernels": True, "vocab_size": 131072}, 31_577_940_288),
    # Without its layer that predicts further tokens; INTELLECT-3, of the same shape, has this number.
    "GLM-4.5-Air": ({"architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 10944,
            "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1,
            "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
            "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1, "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
            "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
            "topk_group": 1, "torch_dtype": "bfloat16", "use_cache": True, "use_qk_norm": False, "vocab_size": 151552},
        106_852_251_264),
    "Qwen3-Next-80B-A3B": ({**DELTA, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
            "decoder_sparse_step": 1, "full_attention_interval": 4, "intermediate_size": 5120,
            "max_position_embeddings": 262144, "mlp_only_layers": [], "norm_topk_prob": True, "num_experts": 512,
            "num_experts_per_tok": 10, "num_hidden_layers": 48, "output_router_logits": False,
            "partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 10000000,
            "router_aux_loss_coef": 0.001, "use_sliding_window": False, "vocab_size": 151936},
        81_324_862_720 - further(2048, 16, 2, with_shared(2048, 512, 512))),
    "Qwen3.8-27B, text": ({**IMAGES, "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
            "text_config": {**QWEN35, "hidden_size": 5120, "intermediate_size": 17408, "linear_num_value_heads": 48,
                "model_type": "qwen3_5_text", "num_attention_heads": 24, "num_hidden_layers": 64,
                "num_key_value_heads": 4, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16}},
        27_781_427_952 - qwen_vision(5120) - further(5120, 24, 4, 3 * 5120 * 17408)),
    "Qwen3.5-35B-A3B, text": ({**IMAGES, "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe", "text_config": {**DELTA, **QWEN35, "model_type": "qwen3_5_moe_text",
                "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40, "router_aux_loss_coef": 0.001,
                "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10}},
        35_951_822_704 - qwen_vision(2048) - further(2048, 16, 2, with_shared(2048, 256, 512))),
    "Qwen3.5-397B-A17B, text": ({**IMAGES, "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe", "text_config": {**DELTA, **QWEN35, "hidden_size": 4096,
                "linear_num_value_heads": 64, "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 1024,
                "num_attention_heads": 32, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 60,
                "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 1024,
                "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 15}},
        403_397_928_944 - qwen_vision(4096) - further(4096, 32, 2, with_shared(4096, 512, 1024))),
}  # fmt: skip
SPEC: Final = """experiment size {{ seed = 1, budget = 1 steps }}
model "{folder}" {{ weights = none }}
tokenizer bytes
dataset code {{ source = python_stdlib() }}
batch {{ sequence = 64 }}
optimizer adamw {{ lr = 1e-3 }}
"""


def counted(name: str, folder: Path) -> tuple[str, Parameters, int]:
    """The family and the parameters of a published model, as a plan of its `config.json` counts them, and biases of
    routers, which files have beside them."""
    config, _ = PUBLISHED[name]
    model = folder / name
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(config))
    (folder / f"{name}.xtrain").write_text(SPEC.format(folder=model))
    spec = load_spec(folder / f"{name}.xtrain").require()
    found = Findings(spec)
    shape = derive_architecture(spec, found)
    assert not found.failed, found.diagnostics.render()
    biases = sum(each.size for each in buffers(shape.architecture))
    return shape.architecture.family, count_parameters(shape.architecture), biases


def of_published() -> Iterator[tuple[str, ...]]:
    yield "model", "family", "parameters", "of which a token uses"
    with tempfile.TemporaryDirectory() as folder:
        for name, (_, published) in PUBLISHED.items():
            family, count, biases = counted(name, Path(folder))
            total = count.total + biases
            assert total == published, f"{name} has {published:,} parameters, and its plan {total:,}"
            yield name, f"`{family}`", f"{total:,}", f"{count.active:,}"


def of_compared() -> Iterator[tuple[str, ...]]:
    yield "family", "random models that are compared"
    for family in sorted(CONFIGS):
        assert FAMILIES[family].config is not None
        yield f"`{family}`", "; ".join(CONFIGS[family])


def page() -> str:
    """docs/families.md with the tables as they are said now."""

    def table(found: re.Match[str]) -> str:
        head, *rows = {"published": of_published, "compared": of_compared}[found["name"]]()
        lines = "".join(f"| {' | '.join(line)} |\n" for line in (head, ("---",) * len(head), *rows))
        return f"{found['begin']}{lines}{found['end']}"

    return BLOCK.sub(table, PAGE.read_text())


if __name__ == "__main__":
    text = page()
    if "--write" in sys.argv:
        PAGE.write_text(text)
    elif text != PAGE.read_text():
        sys.exit("docs/families.md: python tests/support/published_models.py --write")
