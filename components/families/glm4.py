"""`model glm4 { … }`: GLM-4 of 2025 (Zhipu AI)."""

from typing import ClassVar

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, sandwich_norm
from xtrain.blocks.feed_forward import SwiGLULayer
from xtrain.components.families._joined import JoinedNames, gate_up
from xtrain.contracts.models import PlannedModel
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.family_parts import rotary_share_key, rotary_share_setting, rotary_width, unfit_share
from xtrain.dsl.schema.model import FAMILIES, TransformerSettings
from xtrain.dsl.schema.model_config import HARMLESS, ONLY, ConfigKey, ModelConfig, head_width, keys
from xtrain.dsl.schema.setting import setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames

# Ours → the norms in files, where the second norm of both layers has another name than in gemma3.
_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


@FAMILIES.register()
@frozen
class Glm4(TransformerSettings, PlannedModel):
    """`model glm4 { … }`: llama with norms after both layers too, and rotary positions on a part of each head, in
    adjacent pairs."""

    family: str = named("glm4")
    qkv_bias: bool = setting("biases on queries, keys and values", default=True, resuming="shape")
    rotary_share: float = rotary_share_setting(0.5)
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="glm4",
        architectures=("Glm4ForCausalLM",),
        keys=keys(
            ConfigKey("norm_eps", "rms_norm_eps", 1.5625e-07),
            ConfigKey("kv_heads", "num_key_value_heads", default=2),
            ConfigKey("head_dim", "head_dim", default=128, null=head_width),
            ConfigKey("ffn", "intermediate_size", 13696),
            ConfigKey("qkv_bias", "attention_bias", default=True),
            rotary_share_key(0.5),
        ),
        constant={"qk_norm": False},
        only=ONLY,
        harmless=HARMLESS,
    )
    stored: ClassVar[StoredNames | None] = StoredNames()

    def unfit(self) -> tuple[str, str, str] | None:
        return unfit_share(self, self.rotary_share) or super().unfit()

    @classmethod
    def names_in_files(cls, arch: Architecture) -> StoredNames:
        return JoinedNames(joined={"mlp": gate_up(arch)}, modules=_NORMS)

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        attention = AttentionLayer(
            "self_attn",
            qk_norm=arch.qk_norm,
            bias=arch.own["qkv_bias"],
            rotary=rotary_width(arch.head_dim, arch.own["rotary_share"]),
            interleaved=True,
        )
        return sandwich_norm(attention, SwiGLULayer("mlp"))
