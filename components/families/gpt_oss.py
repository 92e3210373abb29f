"""`model gpt_oss { … }`: gpt-oss (OpenAI 2025, arXiv 2508.10925)."""

from typing import Any, ClassVar

from attrs import evolve

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, pre_norm
from xtrain.blocks.feed_forward import ExpertsLayer
from xtrain.contracts.models import PlannedModel, layer_windows
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.family_parts import write_window, write_window_types
from xtrain.dsl.schema.model import (
    FAMILIES,
    ExpertTransformer,
    attention_biases,
    full_layers_setting,
    window_setting,
)
from xtrain.dsl.schema.model_config import (
    ATTENTION_BIAS,
    HARMLESS,
    ONLY,
    Config,
    ConfigKey,
    ModelConfig,
    Slides,
    WrongKey,
    keys,
    window_keys,
)
from xtrain.dsl.schema.setting import positive, setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


def _every_second(config: Config, layers: int) -> Slides:
    return [layer % 2 == 0 for layer in range(layers)]


def _window(config: Config) -> Any:
    window = config.get("sliding_window", 128)
    # transformers masks no window if it is null.
    return WrongKey("sliding_window", "a number of positions") if window is None else window


WINDOW, LAYERS = window_keys(_every_second, _window)


@FAMILIES.register()
@frozen
class GptOss(ExpertTransformer, PlannedModel):
    """`model gpt_oss { … }`: experts with biases and clamped values, attention with sinks, and windows in some
    blocks."""

    family: str = named("gpt_oss")
    attention_bias: bool = attention_biases()
    window: int | None = window_setting()
    full_layers: tuple[int, ...] = full_layers_setting()
    swiglu_limit: float = setting(
        "limits of activations in experts: gates are at most this, the values they multiply within ± this",
        default=7.0,
        check=positive,
        resuming="meaning",
    )
    swiglu_alpha: float = setting(
        "factor of the gates inside their sigmoid", default=1.702, check=positive, resuming="meaning"
    )
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="gpt_oss",
        architectures=("GptOssForCausalLM",),
        keys=keys(
            ConfigKey("norm_eps", "rms_norm_eps", 1e-5),
            ConfigKey("kv_heads", "num_key_value_heads", 8),
            ConfigKey("head_dim", "head_dim", 64),
            evolve(ATTENTION_BIAS, default=True),
            ConfigKey("experts", "num_local_experts", 128, also="num_experts"),
            ConfigKey("experts_per_token", "num_experts_per_tok", 4),
            ConfigKey("expert_ffn", "intermediate_size", 2880),
            ConfigKey("swiglu_limit", "swiglu_limit", 7.0),
            ConfigKey("swiglu_alpha", "swiglu_alpha", 1.702),
            evolve(WINDOW, writes=write_window),
            evolve(LAYERS, writes=write_window_types),
        ),
        rope_theta=150_000.0,
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        # A softmax over the chosen experts equals a softmax over all, renormalized over the chosen ones.
        constant={"qk_norm": False, "shared_experts": 0, "router.score": "softmax", "router.normalise": True},
        only=ONLY,
        # Keys of the auxiliary loss in training, whose weight here is `router { aux_loss }`, and keys that no class
        # reads.
        harmless=HARMLESS
        | {"output_router_logits", "router_aux_loss_coef", "experts_per_token", "initial_context_length"},
    )
    stored: ClassVar[StoredNames | None] = StoredNames(
        modules={"mlp.gate": "mlp.router"}, experts=("interleaved", "mxfp4")
    )

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        own = arch.own
        bias = own.get("attention_bias", False)
        attention = AttentionLayer("self_attn", qk_norm=arch.qk_norm, bias=bias, output_bias=bias, sinks=True)
        experts = ExpertsLayer("mlp", matrix_bias=True, limit=own["swiglu_limit"], alpha=own["swiglu_alpha"])
        return tuple(pre_norm(evolve(attention, window=window), experts) for window in layer_windows(arch))
