"""Plans of published models that transformers' own code computes count as many parameters as were published."""

import json
from pathlib import Path
from typing import Any

import pytest
from code_models import SINGLE
from small_runs import plan_of

GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024}
NEOX = {"model_type": "gpt_neox", "tie_word_embeddings": False, "max_position_embeddings": 2048}
# Name → (keys of its config, parameters).
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "gpt2": ({**GPT2, "n_embd": 768, "n_layer": 12, "n_head": 12}, 124_439_808),
    "gpt2-xl": ({**GPT2, "n_embd": 1600, "n_layer": 48, "n_head": 25}, 1_557_611_200),
    "gpt-neo-125m": ({"model_type": "gpt_neo", "hidden_size": 768, "num_layers": 12, "num_heads": 12,
        "attention_types": [[["global", "local"], 6]], "vocab_size": 50257, "window_size": 256}, 125_198_592),
    "gpt-j-6b": ({"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64,
        "vocab_size": 50400, "tie_word_embeddings": False}, 6_050_882_784),
    "gpt-neox-20b": ({**NEOX, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
        "intermediate_size": 24576, "vocab_size": 50432}, 20_554_567_680),
    "pythia-160m": ({**NEOX, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "vocab_size": 50304}, 162_322_944),
    "opt-125m": ({"model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "ffn_dim": 3072, "word_embed_proj_dim": 768, "vocab_size": 50272}, 125_239_296),
    "bloom-560m": ({"model_type": "bloom", "hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880},
        559_214_592),
    "falcon-7b": ({"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
        "multi_query": True, "parallel_attn": True, "bias": False, "vocab_size": 65024}, 6_921_720_704),
    "phi-2": ({"model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 51200, "partial_rotary_factor": 0.4}, 2_779_683_840),
    "Phi-3-mini-4k": ({"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 32064, "pad_token_id": 32000}, 3_821_079_552),
    "starcoder2-3b": ({"model_type": "starcoder2", "hidden_size": 3072, "intermediate_size": 12288,
        "num_hidden_layers": 30, "num_attention_heads": 24, "num_key_value_heads": 2, "vocab_size": 49152,
        "use_bias": True}, 3_030_371_328),
    "mamba-130m": ({"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16,
        "vocab_size": 50280}, 129_135_360),
    "gemma-2-2b": ({"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000}, 2_614_341_888),
    "command-r": ({"model_type": "cohere", "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
        "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 256000}, 34_980_831_232),
    "OLMoE-1B-7B": ({"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 50304}, 6_919_161_856),
    "Mixtral-8x7B": ({"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 32000}, 46_702_792_704),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gpt2" else pytest.mark.slow) for name in PUBLISHED]
)
@pytest.mark.usefixtures("inspected_here")
def test_published_models_have_their_parameters(name: str, tmp_path: Path):
    config, parameters = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = plan_of(f'"{tmp_path}" {{ code = transformers, weights = none }}', more=SINGLE)
    assert plan.parameters.total == parameters
