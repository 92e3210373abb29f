"""`model olmo2 { … }`: OLMo 2 (Walsh et al. 2024, arXiv 2501.00656)."""

from typing import ClassVar

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, post_norm
from xtrain.blocks.feed_forward import SwiGLULayer
from xtrain.contracts.models import PlannedModel
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import FAMILIES, TransformerSettings, attention_biases
from xtrain.dsl.schema.model_config import (
    ATTENTION_BIAS,
    HARMLESS,
    ONLY,
    ConfigKey,
    LlamaCpp,
    ModelConfig,
    keys,
)
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


@FAMILIES.register()
@frozen
class Olmo2(TransformerSettings, PlannedModel):
    """`model olmo2 { … }`: RMSNorm after attention and SwiGLU, and over all heads of queries and of keys together."""

    family: str = named("olmo2")
    attention_bias: bool = attention_biases()
    has_qk_norm: ClassVar[bool] = True
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="olmo2",
        architectures=("Olmo2ForCausalLM",),
        llama_cpp=LlamaCpp("olmo2"),
        keys=keys(
            ConfigKey("norm_eps", "rms_norm_eps", 1e-5),
            ConfigKey("ffn", "intermediate_size"),
            ATTENTION_BIAS,
        ),
        constant={"qk_norm": True},
        only=ONLY,
        harmless=HARMLESS,
    )
    stored: ClassVar[StoredNames | None] = StoredNames()

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        bias = arch.own.get("attention_bias", False)
        attention = AttentionLayer("self_attn", qk_norm=arch.qk_norm, wide_norm=True, bias=bias, output_bias=bias)
        return post_norm(attention, SwiGLULayer("mlp"))
