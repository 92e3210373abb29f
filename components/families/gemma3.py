"""`model gemma3 { … }`: the text part of Gemma 3 (Gemma Team 2025, arXiv 2503.19786)."""

from typing import Any, ClassVar

from attrs import evolve

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, sandwich_norm
from xtrain.blocks.feed_forward import SwiGLULayer
from xtrain.components.families._with_images import VISION
from xtrain.contracts.models import PlannedModel, layer_windows
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.family_parts import FULL, WINDOWED, local_theta_setting, write_window, write_window_types
from xtrain.dsl.schema.model import (
    FAMILIES,
    ModelEnds,
    TransformerSettings,
    attention_biases,
    full_layers_setting,
    window_setting,
)
from xtrain.dsl.schema.model_config import (
    ATTENTION_BIAS,
    HARMLESS,
    OFF,
    ONLY,
    Config,
    ConfigKey,
    LocalRope,
    ModelConfig,
    Only,
    Slides,
    WholeModel,
    WrongKey,
    window_keys,
)
from xtrain.dsl.schema.setting import AUTO, Auto, at_least, positive, setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.weight_files import StoredNames


def _slides(config: Config, layers: int) -> Slides:
    """Return for each layer whether it has the window: all but the last of each `sliding_window_pattern` layers."""
    pattern = config.get("sliding_window_pattern", 6)
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
        return WrongKey("sliding_window_pattern", "a whole number above 0")
    return [bool((layer + 1) % pattern) for layer in range(layers)]


def _length(config: Config) -> Any:
    window = config.get("sliding_window", 4096)
    if window is None and config.get("layer_types") is None:
        return WrongKey("sliding_window", "a whole number, as some layers have the window")
    return window


_WINDOW, _FULL_LAYERS = window_keys(_slides, _length)


@FAMILIES.register()
@frozen
class Gemma3(TransformerSettings, PlannedModel):
    """`model gemma3 { … }`: norms before and after attention and a GELU-gated feed-forward layer; blocks with a window
    use different RoPE frequencies."""

    family: str = named("gemma3")
    attention_bias: bool = attention_biases()
    window: int | None = window_setting()
    full_layers: tuple[int, ...] = full_layers_setting()
    local_theta: float = local_theta_setting(10_000.0)
    score_width: int | Auto = setting(
        "attention scores are divided by the square root of this; auto: head_dim", default=AUTO, check=at_least(1)
    )
    score_cap: float | None = setting(
        "cap of attention scores s: cap · tanh(s / cap); none: no cap",
        default=None,
        check=positive,
        example="50",
    )
    logit_cap: float | None = setting(
        "cap of logits l: cap · tanh(l / cap); none: no cap", default=None, check=positive, example="30"
    )
    has_qk_norm: ClassVar[bool] = True
    config: ClassVar[ModelConfig | None] = ModelConfig(
        model_type="gemma3_text",
        architectures=("Gemma3ForCausalLM",),
        scores="Gemma3TextForSequenceClassification",
        keys=(
            ConfigKey("dim", "hidden_size"),
            ConfigKey("layers", "num_hidden_layers"),
            ConfigKey("heads", "num_attention_heads", 8),
            ConfigKey("kv_heads", "num_key_value_heads", 4),
            ConfigKey("head_dim", "head_dim", 256),
            ConfigKey("ffn", "intermediate_size"),
            ConfigKey("vocab", "vocab_size", 262_208),
            ConfigKey("norm_eps", "rms_norm_eps", 1e-6),
            ConfigKey("tie_embeddings", "tie_word_embeddings", default=True),
            ConfigKey("init_std", "initializer_range", 0.02),
            ATTENTION_BIAS,
            ConfigKey("score_width", "query_pre_attn_scalar", 256),
            ConfigKey("logit_cap", "final_logit_softcapping", default=None, null=None),
            evolve(_WINDOW, writes=write_window),
            evolve(_FULL_LAYERS, writes=write_window_types),
        ),
        rope_theta=1e6,
        local_rope=LocalRope("local_theta", "rope_local_base_freq", 10_000.0, full=FULL, local=WINDOWED),
        heads_divide=True,
        # transformers has a key for this cap but does not use it.
        constant={"qk_norm": True, "score_cap": None},
        only={
            **{name: only for name, only in ONLY.items() if name != "hidden_act"},
            "hidden_activation": Only(("gelu_pytorch_tanh",)),
            "attn_logit_softcapping": Only((None,), words="null, as transformers ignores it, and others do not"),
            "use_bidirectional_attention": OFF,
        },
        # The first key and `layer_types` determine the layers with a window; the others change nothing.
        harmless=HARMLESS | {"sliding_window_pattern", "_sliding_window_pattern", "cache_implementation"},
        # Models with images; the vision tower and its projector are skipped.
        whole=WholeModel(
            model_type="gemma3",
            architectures=("Gemma3ForConditionalGeneration",),
            part="text_config",
            replaces=("tie_word_embeddings",),
            null=("final_logit_softcapping",),
            harmless=HARMLESS
            | {"boi_token_index", "eoi_token_index", "image_token_index", "initializer_range", "mm_tokens_per_image"}
            | {"boi_token_id", "eoi_token_id", "image_token_id", "vision_config"},
        ),
    )  # fmt: skip
    stored: ClassVar[StoredNames | None] = VISION

    def auto(self) -> dict[str, tuple[Any, str]]:
        width = self.dim // self.heads if isinstance(self.head_dim, Auto) else self.head_dim
        return {**super().auto(), "score_width": (max(1, width), f"head_dim {width}")}

    @classmethod
    def ends(cls, arch: Architecture) -> ModelEnds:
        return ModelEnds(embedding_scale=arch.dim**0.5, norm_plus_one=True, logit_cap=arch.own["logit_cap"])

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        own = arch.own
        bias = own.get("attention_bias", False)
        attention = AttentionLayer(
            "self_attn",
            qk_norm=arch.qk_norm,
            plus_one=True,
            bias=bias,
            output_bias=bias,
            scale=own["score_width"] ** -0.5,
            cap=own["score_cap"],
        )
        local = evolve(attention, window=own.get("window"), theta=own["local_theta"])
        mlp = SwiGLULayer("mlp", activation="gelu_tanh")
        full, slides = (sandwich_norm(each, mlp, plus_one=True) for each in (attention, local))
        return tuple(full if window is None else slides for window in layer_windows(arch))
