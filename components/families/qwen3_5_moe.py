"""`model qwen3_5_moe { … }`: the text part of Qwen3.5 with experts (Qwen Team 2026)."""

from typing import ClassVar

from xtrain.blocks.block import BlockPiece
from xtrain.blocks.feed_forward import ExpertsLayer
from xtrain.components.families._delta_nets import (
    DeltaNetExpertFamily,
    delta_net_blocks,
    delta_net_names,
    qwen3_5_whole,
)
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.delta_net import DELTA_HARMLESS, DELTA_KEYS, DELTA_ONLY, ROPE_HARMLESS
from xtrain.dsl.schema.model import FAMILIES, attention_biases
from xtrain.dsl.schema.model_config import ATTENTION_BIAS, HARMLESS, ConfigKey, ModelConfig, Only, keys
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


@FAMILIES.register()
@frozen
class Qwen35Moe(DeltaNetExpertFamily):
    """`model qwen3_5_moe { … }`: qwen3_5 with experts instead of the SwiGLU, and a shared expert with its own gate for
    every token."""

    family: str = named("qwen3_5_moe")
    attention_bias: bool = attention_biases()
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="qwen3_5_moe_text",
        architectures=("Qwen3_5MoeForCausalLM",),
        scores=None,
        keys=keys(
            ConfigKey("kv_heads", "num_key_value_heads", 2),
            ConfigKey("head_dim", "head_dim", 256),
            ConfigKey("experts", "num_experts", 256, also="num_local_experts"),
            ConfigKey("experts_per_token", "num_experts_per_tok", 8),
            ConfigKey("expert_ffn", "moe_intermediate_size", 512),
            ConfigKey("shared_ffn", "shared_expert_intermediate_size", 512),
            *DELTA_KEYS,
            ATTENTION_BIAS,
        ),
        rope_harmless=ROPE_HARMLESS,
        constant={"qk_norm": True, "shared_experts": 0, "router.score": "softmax", "router.normalise": True},
        only={**DELTA_ONLY, "mlp_only_layers": Only(([], None))},
        # `router_aux_loss_coef` and the key before it are of the auxiliary loss in training, whose weight here is
        # `router { aux_loss }`.
        harmless=HARMLESS
        | DELTA_HARMLESS
        | {"output_router_logits", "router_aux_loss_coef", "intermediate_size"}
        | {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"},
        whole=qwen3_5_whole("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    )

    @classmethod
    def names_in_files(cls, arch: Architecture) -> StoredNames:
        return delta_net_names(arch, by_group=False)

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        experts, bias = ExpertsLayer("mlp", gated_ffn=arch.own["shared_ffn"]), arch.own.get("attention_bias", False)
        return delta_net_blocks(arch, lambda layer: experts, bias=bias)
