"""`model gemma4_moe { … }`: the text part of Gemma 4 with experts next to the feed-forward layer (Gemma Team 2026)."""

from typing import ClassVar

from attrs import evolve

from xtrain.blocks.block import BlockPiece, Chain, NormLayer, Sum
from xtrain.blocks.feed_forward import ExpertsLayer
from xtrain.components.families._gemma4 import NAMES, Gemma4Family, config_of
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import FAMILIES, ExpertTransformer
from xtrain.dsl.schema.model_config import ConfigKey, ModelConfig
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


@FAMILIES.register()
@frozen
class Gemma4Moe(Gemma4Family, ExpertTransformer):
    """`model gemma4_moe { … }`: gemma4 with experts next to the feed-forward layer of each block."""

    family: str = named("gemma4_moe")
    has_dense: ClassVar[bool] = True
    config: ClassVar[ModelConfig | None] = config_of(
        ConfigKey("experts", "num_experts"),
        ConfigKey("experts_per_token", "top_k_experts"),
        ConfigKey("expert_ffn", "moe_intermediate_size"),
        experts=True,
        **{"shared_experts": 0, "router.score": "softmax", "router.normalise": True},
    )
    stored: ClassVar[StoredNames | None] = evolve(
        NAMES,
        ends={
            **NAMES.ends,
            "moe.gate.weight": "router.proj.weight",
            "moe.gate.norm.weight": "router.scale",
            "moe.gate.factors": "router.per_expert_scale",
            "moe.norm.weight": "pre_feedforward_layernorm_2.weight",
        },
        modules={"moe.experts": "experts"},
        experts=("stacked",),
        peft_gathers=False,
    )

    @classmethod
    def feed_forward(cls, arch: Architecture) -> BlockPiece:
        dense = Chain.of(super().feed_forward(arch), NormLayer("post_feedforward_layernorm_1"))
        experts = ExpertsLayer("moe", activation="gelu_tanh", input_norm=True, router_norm=True, factors=True)
        return Sum.of(dense, Chain.of(experts, NormLayer("post_feedforward_layernorm_2")))
