"""`model llama { … }`: Llama (Grattafiori et al. 2024, arXiv 2407.21783)."""

from typing import ClassVar

from attrs import frozen

from ...dsl.schema.component import named
from ...dsl.schema.model import FAMILIES, TransformerSettings
from ...dsl.schema.model_config import HARMLESS, KEYS, OFF, ONLY, ConfigKey, ModelConfig, head_width, query_heads
from ...planner.architecture import Architecture
from ...planner.blocks.attention import AttentionLayer
from ...planner.blocks.block import BlockPiece
from ...planner.blocks.feed_forward import SwiGLULayer
from ...planner.blocks.norm import pre_norm
from ...planner.weights.stored import StoredNames


@FAMILIES.register()
@frozen
class Llama(TransformerSettings):
    """`model llama { … }`: grouped-query attention, SwiGLU, RMSNorm before both."""

    family: str = named("llama")
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="llama",
        architectures=("LlamaForCausalLM",),
        keys=(
            *KEYS,
            ConfigKey("kv_heads", "num_key_value_heads", default=query_heads, null=query_heads),
            ConfigKey("head_dim", "head_dim", default=head_width, null=head_width),
            ConfigKey("ffn", "intermediate_size"),
        ),
        constant={"qk_norm": False},
        only={**ONLY, "attention_bias": OFF, "mlp_bias": OFF},
        harmless=HARMLESS,
    )
    stored: ClassVar[StoredNames] = StoredNames()

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        return pre_norm(AttentionLayer("self_attn", qk_norm=arch.qk_norm), SwiGLULayer("mlp"))
