"""`model mixtral { … }`: Mixtral (Jiang et al. 2024, arXiv 2401.04088)."""

from typing import ClassVar

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, pre_norm
from xtrain.blocks.feed_forward import ExpertsLayer
from xtrain.contracts.models import PlannedModel
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import FAMILIES, ExpertTransformer, window_setting
from xtrain.dsl.schema.model_config import HARMLESS, ONLY, WINDOW, ConfigKey, ModelConfig, Only, head_width, keys
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


@FAMILIES.register()
@frozen
class Mixtral(ExpertTransformer, PlannedModel):
    """`model mixtral { … }`: llama with experts instead of the SwiGLU."""

    family: str = named("mixtral")
    window: int | None = window_setting()
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="mixtral",
        architectures=("MixtralForCausalLM",),
        keys=keys(
            ConfigKey("norm_eps", "rms_norm_eps", 1e-5),
            ConfigKey("kv_heads", "num_key_value_heads", 8),
            ConfigKey("head_dim", "head_dim", default=head_width, null=head_width),
            ConfigKey("experts", "num_local_experts", 8),
            ConfigKey("experts_per_token", "num_experts_per_tok", 2),
            ConfigKey("expert_ffn", "intermediate_size"),
            WINDOW,
        ),
        rope_theta=1e6,
        constant={"qk_norm": False, "shared_experts": 0, "router.score": "softmax", "router.normalise": True},
        only={**ONLY, "router_jitter_noise": Only((0.0, 0))},
        # Keys of the auxiliary loss in training, whose weight here is `router { aux_loss }`.
        harmless=HARMLESS | {"output_router_logits", "router_aux_loss_coef"},
    )
    stored: ClassVar[StoredNames | None] = StoredNames(
        modules={"mlp": "block_sparse_moe"}, matrices={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    )

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        attention = AttentionLayer("self_attn", qk_norm=arch.qk_norm, window=arch.own.get("window"))
        return pre_norm(attention, ExpertsLayer("mlp"))
