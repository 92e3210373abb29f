"""`model mistral { … }`: Mistral (Jiang et al. 2023, arXiv 2310.06825)."""

from typing import ClassVar

from attrs import evolve

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, pre_norm
from xtrain.blocks.feed_forward import SwiGLULayer
from xtrain.components.families._with_images import MISTRAL3, VISION
from xtrain.contracts.models import PlannedModel
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import FAMILIES, TransformerSettings, window_setting
from xtrain.dsl.schema.model_config import (
    HARMLESS,
    ONLY,
    WINDOW,
    ConfigKey,
    LlamaCpp,
    ModelConfig,
    head_width,
    keys,
    query_heads,
)
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


@FAMILIES.register()
@frozen
class Mistral(TransformerSettings, PlannedModel):
    """`model mistral { … }`: llama with a window."""

    family: str = named("mistral")
    window: int | None = window_setting()
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="mistral",
        architectures=("MistralForCausalLM",),
        llama_cpp=LlamaCpp("llama", pairs=True),
        keys=keys(
            ConfigKey("kv_heads", "num_key_value_heads", 8, null=query_heads),
            ConfigKey("head_dim", "head_dim", default=head_width, null=head_width),
            ConfigKey("ffn", "intermediate_size", 14336),
            evolve(WINDOW, default=4096),
        ),
        constant={"qk_norm": False},
        only=ONLY,
        harmless=HARMLESS,
        whole=MISTRAL3,
    )
    stored: ClassVar[StoredNames | None] = VISION

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        attention = AttentionLayer("self_attn", qk_norm=arch.qk_norm, window=arch.own.get("window"))
        return pre_norm(attention, SwiGLULayer("mlp"))
