"""`model ernie4_5 { … }`: ERNIE 4.5 without experts (Baidu 2025)."""

from typing import ClassVar

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, pre_norm
from xtrain.blocks.feed_forward import SwiGLULayer
from xtrain.contracts.models import PlannedModel
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import FAMILIES, TransformerSettings
from xtrain.dsl.schema.model_config import HARMLESS, ONLY, ConfigKey, ModelConfig, head_width, keys, query_heads
from xtrain.dsl.schema.setting import setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


@FAMILIES.register()
@frozen
class Ernie45(TransformerSettings, PlannedModel):
    """`model ernie4_5 { … }`: llama whose rotary positions turn adjacent pairs of numbers."""

    family: str = named("ernie4_5")
    linear_bias: bool = setting("biases on all matrices of a block", default=False, resuming="shape")
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="ernie4_5",
        architectures=("Ernie4_5ForCausalLM",),
        scores=None,
        keys=keys(
            ConfigKey("norm_eps", "rms_norm_eps", 1e-5),
            ConfigKey("kv_heads", "num_key_value_heads", default=2, null=query_heads),
            ConfigKey("head_dim", "head_dim", default=128, null=head_width),
            ConfigKey("ffn", "intermediate_size", 3072),
            ConfigKey("tie_embeddings", "tie_word_embeddings", default=True),
            ConfigKey("linear_bias", "use_bias", default=False, null=False),
        ),
        rope_theta=500_000.0,
        constant={"qk_norm": False},
        only=ONLY,
        harmless=HARMLESS,
    )
    stored: ClassVar[StoredNames | None] = StoredNames()

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        bias = arch.own["linear_bias"]
        attention = AttentionLayer("self_attn", qk_norm=arch.qk_norm, bias=bias, output_bias=bias, interleaved=True)
        return pre_norm(attention, SwiGLULayer("mlp", bias=bias))
