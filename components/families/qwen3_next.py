"""`model qwen3_next { … }`: Qwen3-Next (Qwen Team 2025)."""

from typing import ClassVar

from xtrain.blocks.block import BlockPiece
from xtrain.blocks.feed_forward import ExpertsLayer, SwiGLULayer
from xtrain.components.families._delta_nets import DeltaNetExpertFamily, delta_net_blocks, delta_net_names
from xtrain.contracts.models import layers_with_experts
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.delta_net import DELTA_HARMLESS, DELTA_KEYS, DELTA_ONLY
from xtrain.dsl.schema.model import FAMILIES, MixedTransformer, attention_biases
from xtrain.dsl.schema.model_config import (
    ATTENTION_BIAS,
    HARMLESS,
    MIXED_KEYS,
    ConfigKey,
    ModelConfig,
    keys,
)
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


@FAMILIES.register()
@frozen
class Qwen3Next(DeltaNetExpertFamily, MixedTransformer):
    """`model qwen3_next { … }`: a gated delta net, or gated attention that rotates a part of each head, and the experts
    of qwen2_moe."""

    family: str = named("qwen3_next")
    attention_bias: bool = attention_biases()
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="qwen3_next",
        architectures=("Qwen3NextForCausalLM",),
        keys=keys(
            ConfigKey("kv_heads", "num_key_value_heads", 2),
            ConfigKey("head_dim", "head_dim", 256),
            ConfigKey("experts", "num_experts", 512, also="num_local_experts"),
            ConfigKey("experts_per_token", "num_experts_per_tok", 10),
            ConfigKey("expert_ffn", "moe_intermediate_size", 512),
            ConfigKey("shared_ffn", "shared_expert_intermediate_size", 512),
            ConfigKey("router.normalise", "norm_topk_prob", default=True),
            *MIXED_KEYS,
            *DELTA_KEYS,
            ATTENTION_BIAS,
        ),
        constant={"qk_norm": True, "shared_experts": 0, "router.score": "softmax"},
        only=DELTA_ONLY,
        # The last two are of the auxiliary loss in training, whose weight here is `router { aux_loss }`.
        harmless=HARMLESS | DELTA_HARMLESS | {"output_router_logits", "router_aux_loss_coef"},
    )

    @classmethod
    def names_in_files(cls, arch: Architecture) -> StoredNames:
        return delta_net_names(arch, by_group=True)

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        experts, dense = ExpertsLayer("mlp", gated_ffn=arch.own["shared_ffn"]), SwiGLULayer("mlp")
        has = layers_with_experts(arch)
        bias = arch.own.get("attention_bias", False)
        return delta_net_blocks(arch, lambda layer: experts if has[layer] else dense, bias=bias)
