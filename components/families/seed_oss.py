"""`model seed_oss { … }`: Seed-OSS (ByteDance Seed 2025)."""

from typing import ClassVar

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, pre_norm
from xtrain.blocks.feed_forward import SwiGLULayer
from xtrain.contracts.models import PlannedModel
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import FAMILIES, TransformerSettings, mlp_biases
from xtrain.dsl.schema.model_config import (
    HARMLESS,
    MLP_BIAS,
    ONLY,
    ConfigKey,
    ModelConfig,
    head_width,
    keys,
    query_heads,
)
from xtrain.dsl.schema.setting import setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


@FAMILIES.register()
@frozen
class SeedOss(TransformerSettings, PlannedModel):
    """`model seed_oss { … }`: llama with biases on queries, keys and values."""

    family: str = named("seed_oss")
    qkv_bias: bool = setting("biases on queries, keys and values", default=True, resuming="shape")
    output_bias: bool = setting("bias on the output of attention", default=False, resuming="shape")
    mlp_bias: bool = mlp_biases()
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="seed_oss",
        architectures=("SeedOssForCausalLM",),
        keys=keys(
            ConfigKey("kv_heads", "num_key_value_heads", default=8, null=query_heads),
            ConfigKey("head_dim", "head_dim", default=128, null=head_width),
            ConfigKey("ffn", "intermediate_size"),
            ConfigKey("qkv_bias", "attention_bias", default=True),
            ConfigKey("output_bias", "attention_out_bias", default=False),
            MLP_BIAS,
        ),
        constant={"qk_norm": False},
        only={name: only for name, only in ONLY.items() if name != "attention_dropout"},
        # The published configs have the dropout of their training, which a forward without dropout does not read.
        harmless=HARMLESS | {"attention_dropout", "residual_dropout"},
    )
    stored: ClassVar[StoredNames | None] = StoredNames()

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        own = arch.own
        return pre_norm(
            AttentionLayer("self_attn", qk_norm=arch.qk_norm, bias=own["qkv_bias"], output_bias=own["output_bias"]),
            SwiGLULayer("mlp", bias=own.get("mlp_bias", False)),
        )
