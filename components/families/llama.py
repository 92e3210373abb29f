"""`model llama { … }`: Llama (Grattafiori et al. 2024, arXiv 2407.21783)."""

from typing import ClassVar

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, pre_norm
from xtrain.blocks.feed_forward import SwiGLULayer
from xtrain.contracts.models import PlannedModel
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import FAMILIES, TransformerSettings, attention_biases, mlp_biases
from xtrain.dsl.schema.model_config import (
    ATTENTION_BIAS,
    HARMLESS,
    MLP_BIAS,
    ONLY,
    ConfigKey,
    LlamaCpp,
    ModelConfig,
    head_width,
    keys,
)
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


@FAMILIES.register()
@frozen
class Llama(TransformerSettings, PlannedModel):
    """`model llama { … }`: grouped-query attention, SwiGLU, RMSNorm before both."""

    family: str = named("llama")
    attention_bias: bool = attention_biases()
    mlp_bias: bool = mlp_biases()
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="llama",
        architectures=("LlamaForCausalLM",),
        llama_cpp=LlamaCpp("llama", pairs=True, biases=True),
        keys=keys(
            ATTENTION_BIAS,
            MLP_BIAS,
            ConfigKey("head_dim", "head_dim", default=head_width, null=head_width),
            ConfigKey("ffn", "intermediate_size"),
        ),
        heads_divide=True,
        constant={"qk_norm": False},
        only=ONLY,
        harmless=HARMLESS,
    )
    stored: ClassVar[StoredNames | None] = StoredNames()

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        bias = arch.own.get("attention_bias", False)
        return pre_norm(
            AttentionLayer("self_attn", qk_norm=arch.qk_norm, bias=bias, output_bias=bias),
            SwiGLULayer("mlp", bias=arch.own.get("mlp_bias", False)),
        )
