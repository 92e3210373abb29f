"""`model olmoe { … }`: OLMoE (Muennighoff et al. 2024, arXiv 2409.02060)."""

from typing import ClassVar

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, pre_norm
from xtrain.blocks.feed_forward import ExpertsLayer
from xtrain.contracts.models import PlannedModel
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import FAMILIES, ExpertTransformer, attention_biases
from xtrain.dsl.schema.model_config import ATTENTION_BIAS, HARMLESS, ONLY, ConfigKey, ModelConfig, Only, keys
from xtrain.dsl.schema.setting import Auto
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


@FAMILIES.register()
@frozen
class Olmoe(ExpertTransformer, PlannedModel):
    """`model olmoe { … }`: mixtral with an RMSNorm on all heads of queries and one on all keys."""

    family: str = named("olmoe")
    attention_bias: bool = attention_biases()
    has_qk_norm: ClassVar[bool] = True
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="olmoe",
        architectures=("OlmoeForCausalLM",),
        scores=None,
        keys=keys(
            ConfigKey("norm_eps", "rms_norm_eps", 1e-5),
            ConfigKey("experts", "num_experts", 64, also="num_local_experts"),
            ConfigKey("experts_per_token", "num_experts_per_tok", 8),
            ConfigKey("expert_ffn", "intermediate_size", 2048),
            ConfigKey("router.normalise", "norm_topk_prob", default=False),
            ATTENTION_BIAS,
        ),
        constant={"qk_norm": True, "shared_experts": 0, "router.score": "softmax"},
        only={**ONLY, "clip_qkv": Only((None,)), "sliding_window": Only((None,))},
        # Keys of the auxiliary loss in training, whose weight here is `router { aux_loss }`.
        harmless=HARMLESS | {"output_router_logits", "router_aux_loss_coef"},
        heads_divide=True,
    )
    stored: ClassVar[StoredNames | None] = StoredNames()

    def unfit(self) -> tuple[str, str, str] | None:
        if not isinstance(self.head_dim, Auto) and self.head_dim * self.heads != self.dim:
            message = f"heads {self.heads} of head_dim {self.head_dim} are not as wide as dim {self.dim}"
            return "head_dim", message, "leave out `head_dim`"
        return super().unfit()

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        bias = arch.own.get("attention_bias", False)
        attention = AttentionLayer("self_attn", qk_norm=arch.qk_norm, wide_norm=True, bias=bias, output_bias=bias)
        return pre_norm(attention, ExpertsLayer("mlp"))
