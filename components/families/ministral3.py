"""`model ministral3 { … }`: Ministral 3 (Mistral AI 2025), also as the text part of a model with images."""

from typing import ClassVar

from attrs import evolve

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, pre_norm
from xtrain.blocks.feed_forward import SwiGLULayer
from xtrain.components.families._with_images import MISTRAL3, VISION
from xtrain.contracts.models import PlannedModel
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import FAMILIES, TransformerSettings, window_setting
from xtrain.dsl.schema.model_config import HARMLESS, ONLY, WINDOW, ConfigKey, ModelConfig, head_width, keys, query_heads
from xtrain.dsl.schema.setting import not_negative, setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


@FAMILIES.register()
@frozen
class Ministral3(TransformerSettings, PlannedModel):
    """`model ministral3 { … }`: mistral with queries that grow beyond the positions before scaling."""

    family: str = named("ministral3")
    window: int | None = window_setting()
    query_growth: float = setting(
        "queries at position p are multiplied by 1 + query_growth · ln(1 + ⌊p / rope.original⌋)",
        default=0.0,
        check=not_negative,
        resuming="meaning",
    )
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="ministral3",
        architectures=("Ministral3ForCausalLM",),
        keys=keys(
            ConfigKey("norm_eps", "rms_norm_eps", 1e-5),
            ConfigKey("kv_heads", "num_key_value_heads", 8, null=query_heads),
            ConfigKey("head_dim", "head_dim", default=128, null=head_width),
            ConfigKey("ffn", "intermediate_size", 14336),
            WINDOW,
        ),
        rope_theta=1e6,
        rope={
            "type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        rope_keys=(ConfigKey("query_growth", "llama_4_scaling_beta", default=0.0, null=0.0),),
        rope_harmless=frozenset(("llama_4_scaling_beta", "max_position_embeddings")),
        rope_always=True,
        constant={"qk_norm": False},
        only=ONLY,
        harmless=HARMLESS,
        whole=evolve(MISTRAL3, unnamed=False),
    )
    stored: ClassVar[StoredNames | None] = VISION

    def unfit(self) -> tuple[str, str, str] | None:
        if self.query_growth and "original" not in self.rope.reads:
            message = f"queries grow beyond `rope.original` positions, which scaling {self.rope.scaling} does not have"
            return "query_growth", message, "use `rope { scaling = yarn, … }`, or query_growth 0"
        return super().unfit()

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        window, growth = arch.own.get("window"), arch.own["query_growth"]
        attention = AttentionLayer("self_attn", qk_norm=arch.qk_norm, window=window, growth=growth)
        return pre_norm(attention, SwiGLULayer("mlp"))
