"""`model deepseek_v3 { … }`: DeepSeek-V3 and R1 (arXiv 2412.19437)."""

from typing import Any, ClassVar

import attrs

from xtrain.blocks.block import BlockPiece
from xtrain.blocks.latent_attention import LatentAttentionLayer
from xtrain.components.families._with_images import language_model
from xtrain.contracts.models import PlannedModel, dense_then_experts
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.family_parts import AUXILIARY, GROUPED_ONLY, GroupedExpertTransformer
from xtrain.dsl.schema.model import FAMILIES, attention_biases
from xtrain.dsl.schema.model_config import (
    ATTENTION_BIAS,
    AUTO_MAP,
    HARMLESS,
    KEYS,
    ONLY,
    Config,
    ConfigKey,
    ModelConfig,
    WholeModel,
    WrongKey,
)
from xtrain.dsl.schema.rope import yarn_magnitude
from xtrain.dsl.schema.setting import AUTO, Auto, at_least, not_negative, setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


def _heads(config: Config) -> Any:
    """Return the number of heads. Keys and values have the same number; the older key for it must agree."""
    heads = config.get("num_attention_heads", 128)
    if config.get("num_key_value_heads", heads) not in (None, heads):
        return WrongKey("num_key_value_heads", "as many as num_attention_heads")
    return heads


def _rope_dim(config: Config) -> Any:
    """Return the RoPE width. transformers writes it a second time as `head_dim` and uses that for the frequencies."""
    width = config.get("qk_rope_head_dim", 64)
    return width if config.get("head_dim", width) in (None, width) else WrongKey("head_dim", "as qk_rope_head_dim")


def _has_dense(config: Config) -> bool:
    return config.get("first_k_dense_replace", 3) != 0


def latent_fields(arch: Architecture) -> dict[str, Any]:
    """Return the fields of the latent attention of an architecture."""
    own = arch.own
    magnitude = yarn_magnitude(arch.rope.factor, own["score_weight"]) if arch.rope.scaling == "yarn" else 1.0
    return {
        "name": "self_attn",
        **{name: own[name] for name in ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim", "interleaved")},
        "scale": (own["nope_dim"] + own["rope_dim"]) ** -0.5 * magnitude**2,
        "bias": own.get("attention_bias", False),
    }


@FAMILIES.register()
@frozen
class DeepseekV3(GroupedExpertTransformer, PlannedModel):
    """`model deepseek_v3 { … }`: latent attention, and grouped experts of which a token uses a few, chosen with biases;
    the first blocks may have a SwiGLU instead."""

    family: str = named("deepseek_v3")
    q_rank: int | None = setting(
        "width of the low-rank projection of queries; none: queries are projected directly from the residual stream",
        default=None,
        check=at_least(1),
        example="96",
        resuming="shape",
    )
    kv_rank: int = setting(
        "width of the low-rank projection of keys and values", check=at_least(1), example="64", resuming="shape"
    )
    nope_dim: int = setting(
        "width of the part of queries and keys without RoPE", check=at_least(1), example="32", resuming="width"
    )
    rope_dim: int = setting(
        "width of the part of queries and keys with RoPE; all heads share this part of the keys",
        check=at_least(2),
        example="16",
        resuming="width",
    )
    value_dim: int = setting("width of the values of a head", check=at_least(1), example="32", resuming="width")
    interleaved: bool = setting(
        "rotate pairs of adjacent elements by RoPE; false: pairs of one element from each half",
        default=True,
        resuming="meaning",
    )
    score_weight: float = setting(
        "with positions scaled by yarn: attention scores are multiplied by (0.1 · score_weight · ln(factor) + 1)²",
        default=0.0,
        check=not_negative,
        resuming="meaning",
    )
    attention_bias: bool = attention_biases()
    # They follow from the widths above, and heads have no norms.
    kv_heads: int | Auto = attrs.field(default=AUTO, init=False)
    head_dim: int | Auto = attrs.field(default=AUTO, init=False)
    qk_norm: bool | Auto = attrs.field(default=False, init=False)

    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="deepseek_v3",
        architectures=("DeepseekV3ForCausalLM",),
        keys=(
            *(key for key in KEYS if key.setting != "heads"),
            ConfigKey(
                "heads",
                "num_attention_heads",
                computed=_heads,
                writes=lambda values: dict.fromkeys(("num_attention_heads", "num_key_value_heads"), values["heads"]),
            ),
            ConfigKey("q_rank", "q_lora_rank", 1536, null=None),
            ConfigKey("kv_rank", "kv_lora_rank", 512),
            ConfigKey("nope_dim", "qk_nope_head_dim", 128),
            ConfigKey("rope_dim", "qk_rope_head_dim", computed=_rope_dim),
            ConfigKey("value_dim", "v_head_dim", 128),
            ConfigKey("interleaved", "rope_interleave", default=True, null=False),
            ATTENTION_BIAS,
            ConfigKey("ffn", "intermediate_size", 18432, when=_has_dense),
            ConfigKey("first_dense", "first_k_dense_replace", 3),
            ConfigKey("experts", "n_routed_experts", 256, also="num_local_experts"),
            ConfigKey("experts_per_token", "num_experts_per_tok", 8),
            ConfigKey("expert_ffn", "moe_intermediate_size", 2048),
            ConfigKey("shared_experts", "n_shared_experts", 1),
            ConfigKey("expert_groups", "n_group", 8),
            ConfigKey("groups_per_token", "topk_group", 4),
            ConfigKey("expert_scale", "routed_scaling_factor", 2.5),
            ConfigKey("router.normalise", "norm_topk_prob", default=True, null=False),
        ),
        rope_keys=(ConfigKey("score_weight", "mscale_all_dim", default=0.0, null=0.0),),
        constant={"router.score": "sigmoid"},
        only={**ONLY, **GROUPED_ONLY},
        # Repeated widths, server ranks, layers that predict further tokens (not computed by transformers), and keys of
        # the auxiliary losses in training, whose weight here is `router { aux_loss }`.
        harmless=HARMLESS
        | {"num_key_value_heads", "head_dim", "qk_head_dim", "ep_size", "num_nextn_predict_layers", "num_mtp_layers"}
        | AUXILIARY
        | {AUTO_MAP},
        aliases=("kimi_k2",),
        # Kimi K2.5 with images, whose text is a Kimi K2.
        whole=WholeModel(
            model_type="kimi_k25",
            architectures=("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"),
            part="text_config",
            replaces=("tie_word_embeddings",),
            harmless=HARMLESS
            | {f"{kind}_token_id" for kind in ("image", "video", "vision_start", "vision_end", "media_placeholder")}
            | {"vision_config", "projection_hidden_size", "projection_layer_norm_eps", "ignore_index"}
            | {"use_unified_vision_chunk", "video_placeholder", AUTO_MAP},
        ),
    )
    stored: ClassVar[StoredNames | None] = attrs.evolve(
        language_model("vision_tower", "mm_projector"),
        buffers=("e_score_correction_bias",),
        further_tokens="eh_proj.weight",
    )

    def resolved(self) -> tuple[dict[str, Any], dict[str, str]]:
        values, reasons = super().resolved()
        width = max(self.nope_dim + self.rope_dim, self.value_dim)
        return {**values, "kv_heads": self.heads, "head_dim": width, "qk_norm": False}, reasons

    def auto(self) -> dict[str, tuple[Any, str]]:
        own = ("kv_heads", "qk_norm")
        return {name: found for name, found in super().auto().items() if name not in own}

    def idle(self) -> dict[str, tuple[str, str]]:
        found = super().idle()
        if self.rope.scaling != "yarn":
            found["score_weight"] = ("positions are not scaled by yarn", "remove it")
        return found

    def unfit(self) -> tuple[str, str, str] | None:
        if self.rope_dim % 2:
            return "rope_dim", f"rope_dim {self.rope_dim} is odd, but rotary positions turn pairs", "use an even width"
        return super().unfit()

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        return dense_then_experts(arch, LatentAttentionLayer(**latent_fields(arch)))
