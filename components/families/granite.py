"""`model granite { … }`: Granite 3 and the dense models of Granite 4 (IBM 2024)."""

from typing import Any, ClassVar, Final

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, pre_norm
from xtrain.blocks.feed_forward import SwiGLULayer
from xtrain.contracts.models import PlannedModel
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import FAMILIES, ModelEnds, TransformerSettings, attention_biases, mlp_biases
from xtrain.dsl.schema.model_config import (
    ATTENTION_BIAS,
    HARMLESS,
    MLP_BIAS,
    ONLY,
    ConfigKey,
    ModelConfig,
    head_width,
    keys,
)
from xtrain.dsl.schema.setting import AUTO, Auto, positive, setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


def _factor(text: str) -> Any:
    return setting(text, default=1.0, check=positive, resuming="meaning")


FACTOR_KEYS: Final = (
    ATTENTION_BIAS,
    ConfigKey("head_dim", "head_dim", default=head_width, null=head_width),
    ConfigKey("embedding_scale", "embedding_multiplier", default=1.0),
    ConfigKey("residual_scale", "residual_multiplier", default=1.0),
    ConfigKey("score_scale", "attention_multiplier", default=1.0),
    ConfigKey("logit_divisor", "logits_scaling", default=1.0),
)


@frozen
class GraniteSettings(TransformerSettings):
    """Settings of every family of Granite."""

    embedding_scale: float = _factor("factor of embeddings")
    residual_scale: float = _factor("factor of the outputs of both layers of a block, before they are added")
    score_scale: float | Auto = setting(
        "factor of query-key products; auto: 1 / √head_dim", default=AUTO, check=positive, resuming="meaning"
    )
    logit_divisor: float = _factor("logits are divided by this")
    attention_bias: bool = attention_biases()

    def auto(self) -> dict[str, tuple[Any, str]]:
        width = self.dim // self.heads if isinstance(self.head_dim, Auto) else self.head_dim
        return {**super().auto(), "score_scale": (max(1, width) ** -0.5, f"1 / √head_dim, {width}")}

    @classmethod
    def ends(cls, arch: Architecture) -> ModelEnds:
        scale, divisor = arch.own["embedding_scale"], arch.own["logit_divisor"]
        return ModelEnds(
            embedding_scale=None if scale == 1 else scale, norm_scale=1 / divisor if arch.has_logits else 1.0
        )

    @classmethod
    def attention_layer(cls, arch: Architecture, *, rope: bool = True) -> AttentionLayer:
        own = arch.own
        bias = own.get("attention_bias", False)
        scale = own["score_scale"]
        return AttentionLayer("self_attn", qk_norm=arch.qk_norm, bias=bias, output_bias=bias, scale=scale, rope=rope)


@FAMILIES.register()
@frozen
class Granite(GraniteSettings, PlannedModel):
    """`model granite { … }`: llama with factors of embeddings, attention scores, residual branches and logits."""

    family: str = named("granite")
    mlp_bias: bool = mlp_biases()
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="granite",
        architectures=("GraniteForCausalLM",),
        scores=None,
        keys=keys(*FACTOR_KEYS, MLP_BIAS, ConfigKey("ffn", "intermediate_size", default=11008)),
        heads_divide=True,
        constant={"qk_norm": False},
        only=ONLY,
        harmless=HARMLESS,
    )
    stored: ClassVar[StoredNames | None] = StoredNames()

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        mlp = SwiGLULayer("mlp", bias=arch.own.get("mlp_bias", False))
        return pre_norm(cls.attention_layer(arch), mlp, scale=arch.own["residual_scale"])
