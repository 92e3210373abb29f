"""`model glm4_moe { … }`: GLM-4.5 to 4.7 (GLM-4.5 Team 2025, arXiv 2508.06471)."""

from typing import ClassVar

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece
from xtrain.contracts.models import PlannedModel, dense_then_experts
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.family_parts import (
    AUXILIARY,
    GROUPED_ONLY,
    GroupedExpertTransformer,
    rotary_share_key,
    rotary_share_setting,
    rotary_width,
    unfit_share,
)
from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.model_config import HARMLESS, ONLY, ConfigKey, ModelConfig, head_width, keys
from xtrain.dsl.schema.setting import setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


@FAMILIES.register()
@frozen
class Glm4Moe(GroupedExpertTransformer, PlannedModel):
    """`model glm4_moe { … }`: grouped-query attention that rotates a part of each head, and the experts of
    deepseek_v3."""

    family: str = named("glm4_moe")
    qkv_bias: bool = setting("biases on queries, keys and values", default=False, resuming="shape")
    rotary_share: float = rotary_share_setting(0.5)
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="glm4_moe",
        architectures=("Glm4MoeForCausalLM",),
        scores=None,
        keys=keys(
            ConfigKey("norm_eps", "rms_norm_eps", 1e-5),
            ConfigKey("kv_heads", "num_key_value_heads", default=8),
            ConfigKey("head_dim", "head_dim", default=head_width),
            ConfigKey("qkv_bias", "attention_bias", default=False),
            ConfigKey("qk_norm", "use_qk_norm", default=False),
            ConfigKey(
                "ffn", "intermediate_size", 10944, when=lambda config: config.get("first_k_dense_replace", 1) != 0
            ),
            ConfigKey("first_dense", "first_k_dense_replace", 1),
            ConfigKey("experts", "n_routed_experts", 128, also="num_local_experts"),
            ConfigKey("experts_per_token", "num_experts_per_tok", 8),
            ConfigKey("expert_ffn", "moe_intermediate_size", 1408),
            ConfigKey("shared_experts", "n_shared_experts", 1),
            ConfigKey("expert_groups", "n_group", 1),
            ConfigKey("groups_per_token", "topk_group", 1),
            ConfigKey("expert_scale", "routed_scaling_factor", 1.0),
            ConfigKey("router.normalise", "norm_topk_prob", default=True, null=False),
            rotary_share_key(0.5),
        ),
        constant={"router.score": "sigmoid"},
        only={**ONLY, **GROUPED_ONLY},
        # Layers that predict further tokens, which transformers does not compute.
        harmless=HARMLESS | AUXILIARY | {"num_nextn_predict_layers", "num_mtp_layers"},
    )
    stored: ClassVar[StoredNames | None] = StoredNames(
        buffers=("e_score_correction_bias",), further_tokens="eh_proj.weight"
    )

    def unfit(self) -> tuple[str, str, str] | None:
        return unfit_share(self, self.rotary_share) or super().unfit()

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        own = arch.own
        attention = AttentionLayer(
            "self_attn",
            qk_norm=arch.qk_norm,
            bias=own["qkv_bias"],
            rotary=rotary_width(arch.head_dim, own["rotary_share"]),
        )
        return dense_then_experts(arch, attention)
