"""`model dots1 { … }`: dots.llm1 (rednote-hilab 2025, arXiv 2506.05767)."""

from typing import ClassVar

from attrs import evolve

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece
from xtrain.contracts.models import PlannedModel, dense_then_experts, layer_windows
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.family_parts import (
    AUXILIARY,
    GROUPED_ONLY,
    GroupedExpertTransformer,
    write_window,
    write_window_types,
)
from xtrain.dsl.schema.model import FAMILIES, attention_biases, full_layers_setting, window_setting
from xtrain.dsl.schema.model_config import (
    ATTENTION_BIAS,
    HARMLESS,
    ONLY,
    Config,
    ConfigKey,
    ModelConfig,
    Slides,
    keys,
    later_layers,
    query_heads,
    window_keys,
)
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


def _slides(config: Config, layers: int) -> Slides:
    return later_layers({"max_window_layers": 62, **config}, layers)


_WINDOW, _FULL_LAYERS = window_keys(_slides, lambda config: config.get("sliding_window", 4096))


@FAMILIES.register()
@frozen
class Dots1(GroupedExpertTransformer, PlannedModel):
    """`model dots1 { … }`: the attention of qwen3, and the experts of deepseek_v3."""

    family: str = named("dots1")
    attention_bias: bool = attention_biases()
    window: int | None = window_setting()
    full_layers: tuple[int, ...] = full_layers_setting()
    has_qk_norm: ClassVar[bool] = True
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="dots1",
        architectures=("Dots1ForCausalLM",),
        scores=None,
        keys=keys(
            ConfigKey("kv_heads", "num_key_value_heads", default=32, null=query_heads),
            ConfigKey("ffn", "intermediate_size", 10944, when=lambda config: bool(config.get("first_k_dense_replace"))),
            ConfigKey("first_dense", "first_k_dense_replace", 0, null=0),
            ConfigKey("experts", "n_routed_experts", also="num_local_experts"),
            ConfigKey("experts_per_token", "num_experts_per_tok"),
            ConfigKey("expert_ffn", "moe_intermediate_size", 1408),
            ConfigKey("shared_experts", "n_shared_experts"),
            ConfigKey("expert_groups", "n_group", 1, null=1),
            ConfigKey("groups_per_token", "topk_group", 1, null=1),
            ConfigKey("expert_scale", "routed_scaling_factor", 1.0),
            ConfigKey("router.normalise", "norm_topk_prob", default=False, null=False),
            ATTENTION_BIAS,
            evolve(_WINDOW, writes=write_window),
            evolve(_FULL_LAYERS, writes=write_window_types),
        ),
        constant={"qk_norm": True, "router.score": "sigmoid"},
        only={**ONLY, **GROUPED_ONLY},
        harmless=HARMLESS | AUXILIARY | {"max_window_layers"},  # the key and `layer_types` determine windows
    )
    stored: ClassVar[StoredNames | None] = StoredNames(buffers=("e_score_correction_bias",))

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        bias, windows = arch.own.get("attention_bias", False), layer_windows(arch)
        attention = AttentionLayer("self_attn", qk_norm=arch.qk_norm, bias=bias, output_bias=bias)
        of_windows = {each: dense_then_experts(arch, evolve(attention, window=each)) for each in set(windows)}
        return tuple(of_windows[window][layer] for layer, window in enumerate(windows))
