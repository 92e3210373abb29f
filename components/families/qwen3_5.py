"""`model qwen3_5 { … }`: the text part of Qwen3.5 (Qwen Team 2026)."""

from typing import ClassVar

from xtrain.blocks.block import BlockPiece
from xtrain.blocks.feed_forward import SwiGLULayer
from xtrain.components.families._delta_nets import DeltaNetFamily, delta_net_blocks, delta_net_names, qwen3_5_whole
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.delta_net import DELTA_HARMLESS, DELTA_KEYS, DELTA_ONLY, ROPE_HARMLESS
from xtrain.dsl.schema.model import FAMILIES, attention_biases
from xtrain.dsl.schema.model_config import ATTENTION_BIAS, HARMLESS, ConfigKey, ModelConfig, keys
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


@FAMILIES.register()
@frozen
class Qwen35(DeltaNetFamily):
    """`model qwen3_5 { … }`: a gated delta net, or gated attention that rotates a part of each head, and a SwiGLU."""

    family: str = named("qwen3_5")
    attention_bias: bool = attention_biases()
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="qwen3_5_text",
        architectures=("Qwen3_5ForCausalLM",),
        scores="Qwen3_5TextForSequenceClassification",
        keys=keys(
            ConfigKey("kv_heads", "num_key_value_heads", 4),
            ConfigKey("head_dim", "head_dim", 256),
            ConfigKey("ffn", "intermediate_size", 12288),
            *DELTA_KEYS,
            ATTENTION_BIAS,
        ),
        rope_harmless=ROPE_HARMLESS,
        constant={"qk_norm": True},
        only=DELTA_ONLY,
        harmless=HARMLESS | DELTA_HARMLESS | {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"},
        whole=qwen3_5_whole("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    )

    @classmethod
    def names_in_files(cls, arch: Architecture) -> StoredNames:
        return delta_net_names(arch, by_group=False)

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        mlp, bias = SwiGLULayer("mlp"), arch.own.get("attention_bias", False)
        return delta_net_blocks(arch, lambda layer: mlp, bias=bias)
