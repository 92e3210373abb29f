"""`model qwen2_moe { … }`: Qwen1.5-MoE and Qwen2-57B-A14B (Yang et al. 2024, arXiv 2407.10671)."""

from typing import Any, ClassVar

from attrs import evolve

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, pre_norm
from xtrain.blocks.feed_forward import ExpertsLayer, SwiGLULayer
from xtrain.contracts.models import PlannedModel, layer_windows, layers_with_experts
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.model import (
    FAMILIES,
    MixedTransformer,
    full_layers_setting,
    window_setting,
)
from xtrain.dsl.schema.model_config import (
    HARMLESS,
    MIXED_KEYS,
    ONLY,
    Config,
    ConfigKey,
    ModelConfig,
    Slides,
    WrongKey,
    keys,
    query_heads,
    window_bound,
    window_keys,
)
from xtrain.dsl.schema.setting import AUTO, Auto, at_least, setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


def _every_second(config: Config, layers: int) -> Slides:
    """Return the first of every two layers before `max_window_layers`."""
    end = window_bound(config)
    return end if isinstance(end, WrongKey) else [layer % 2 == 0 and layer < end for layer in range(layers)]


@FAMILIES.register()
@frozen
class Qwen2Moe(MixedTransformer, PlannedModel):
    """`model qwen2_moe { … }`: qwen2 with experts instead of the SwiGLU in all or some blocks, and a shared expert with
    its own gate for every token."""

    family: str = named("qwen2_moe")
    shared_ffn: int | Auto = setting(
        "width of the shared expert, which processes every token; auto: experts_per_token · expert_ffn",
        default=AUTO,
        check=at_least(1),
        resuming="shape",
    )
    window: int | None = window_setting()
    full_layers: tuple[int, ...] = full_layers_setting()
    qkv_bias: bool = setting("biases on queries, keys and values", default=True, resuming="shape")
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="qwen2_moe",
        architectures=("Qwen2MoeForCausalLM",),
        keys=keys(
            ConfigKey("kv_heads", "num_key_value_heads", default=16, null=query_heads),
            ConfigKey("experts", "num_experts", 60),
            ConfigKey("experts_per_token", "num_experts_per_tok", 4),
            ConfigKey("expert_ffn", "moe_intermediate_size", 1408),
            ConfigKey("shared_ffn", "shared_expert_intermediate_size", 5632),
            ConfigKey("router.normalise", "norm_topk_prob", default=False),
            ConfigKey("qkv_bias", "qkv_bias", default=True),
            *MIXED_KEYS,
            *window_keys(_every_second),
        ),
        constant={"qk_norm": False, "shared_experts": 0, "router.score": "softmax"},
        only=ONLY,
        # Keys that determine the layers with a window, and keys of the auxiliary loss in training, whose weight here is
        # `router { aux_loss }`.
        harmless=HARMLESS | {"use_sliding_window", "max_window_layers", "output_router_logits", "router_aux_loss_coef"},
    )
    stored: ClassVar[StoredNames | None] = StoredNames(peft_gathers=False)

    def auto(self) -> dict[str, tuple[Any, str]]:
        found = super().auto()
        width = found["expert_ffn"][0] if isinstance(self.expert_ffn, Auto) else self.expert_ffn
        why = f"experts_per_token {self.experts_per_token} · expert_ffn {width}"
        return {**found, "shared_ffn": (self.experts_per_token * width, why)}

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        attention = AttentionLayer("self_attn", qk_norm=arch.qk_norm, bias=arch.own["qkv_bias"])
        experts, dense = ExpertsLayer("mlp", gated_ffn=arch.own["shared_ffn"]), SwiGLULayer("mlp")
        return tuple(
            pre_norm(evolve(attention, window=window), experts if has else dense)
            for window, has in zip(layer_windows(arch), layers_with_experts(arch), strict=True)
        )
