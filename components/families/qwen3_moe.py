"""`model qwen3_moe { … }`: Qwen3 with experts (Yang et al. 2025, arXiv 2505.09388)."""

from typing import ClassVar

from attrs import evolve

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, pre_norm
from xtrain.blocks.feed_forward import ExpertsLayer, SwiGLULayer
from xtrain.contracts.models import PlannedModel, layers_with_experts
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import FAMILIES, MixedTransformer, attention_biases, window_setting
from xtrain.dsl.schema.model_config import (
    ATTENTION_BIAS,
    HARMLESS,
    MIXED_KEYS,
    ONLY,
    WINDOW,
    ConfigKey,
    LlamaCpp,
    ModelConfig,
    head_width,
    keys,
    switched_window,
    write_switched_window,
)
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


@FAMILIES.register()
@frozen
class Qwen3Moe(MixedTransformer, PlannedModel):
    """`model qwen3_moe { … }`: qwen3 with experts instead of the SwiGLU in all or some blocks."""

    family: str = named("qwen3_moe")
    attention_bias: bool = attention_biases()
    window: int | None = window_setting()
    has_qk_norm: ClassVar[bool] = True
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        llama_cpp=LlamaCpp("qwen3moe"),
        keys=keys(
            ConfigKey("kv_heads", "num_key_value_heads", 4),
            ATTENTION_BIAS,
            ConfigKey("head_dim", "head_dim", default=head_width, null=head_width),
            ConfigKey("experts", "num_experts", 128, also="num_local_experts"),
            ConfigKey("experts_per_token", "num_experts_per_tok", 8),
            ConfigKey("expert_ffn", "moe_intermediate_size", 768),
            ConfigKey("router.normalise", "norm_topk_prob", default=False),
            *MIXED_KEYS,
            evolve(WINDOW, computed=switched_window, writes=write_switched_window),
        ),
        constant={"qk_norm": True, "shared_experts": 0, "router.score": "softmax"},
        only=ONLY,
        # Keys that enable the window, keys that no class reads, and keys of the auxiliary loss in training, whose
        # weight here is `router { aux_loss }`.
        harmless=HARMLESS | {"use_sliding_window", "max_window_layers", "output_router_logits", "router_aux_loss_coef"},
    )
    stored: ClassVar[StoredNames | None] = StoredNames()

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        bias, window = arch.own.get("attention_bias", False), arch.own.get("window")
        attention = AttentionLayer("self_attn", qk_norm=arch.qk_norm, bias=bias, output_bias=bias, window=window)
        experts, dense = pre_norm(attention, ExpertsLayer("mlp")), pre_norm(attention, SwiGLULayer("mlp"))
        return tuple(experts if has else dense for has in layers_with_experts(arch))
