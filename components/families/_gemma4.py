"""Settings, blocks, config keys and stored names of the text part of Gemma 4 (Gemma Team 2026)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from attrs import evolve, field

from xtrain.blocks.attention import AttentionLayer
from xtrain.blocks.block import BlockPiece, Chain, FactorLayer, NormLayer, Residual
from xtrain.blocks.feed_forward import SwiGLULayer
from xtrain.components.families._with_images import language_model
from xtrain.contracts.models import PlannedModel, layer_windows
from xtrain.dsl.schema.family_parts import FULL, WINDOWED, local_theta_setting, write_window, write_window_types
from xtrain.dsl.schema.model import (
    ModelEnds,
    TransformerSettings,
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
    LocalRope,
    ModelConfig,
    Only,
    Slides,
    WholeModel,
    WrongKey,
    keys,
    layer_count,
    window_keys,
)
from xtrain.dsl.schema.setting import AUTO, Auto, at_least, positive, setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, ParameterSpec
from xtrain.plan.weight_files import Alternatives, StoredNames

UNIFIED = "gemma4_unified_text"
_MOE = "enable_moe_block"
_BY_LAYER = "per_layer_config"  # settings of single layers, as version 5.24 of transformers saves them
_FACTOR = "layer_scalar.factor"


def _slides(config: Config, layers: int) -> Slides:
    """Return for each layer whether it has the window: all but every sixth layer and the last one."""
    return [bool((layer + 1) % 6) and layer + 1 < layers for layer in range(layers)]


def _length(config: Config) -> Any:
    return config.get("sliding_window", 1024 if config.get("model_type") == UNIFIED else 512)


_WINDOW, _FULL_LAYERS = window_keys(_slides, _length)


def _last_is_full(key: ConfigKey) -> ConfigKey:
    """Return a key that is computed as if the last layer had no window, which transformers sees to."""
    compute = key.computed
    assert compute is not None

    def computed(config: Config) -> Any:
        types = config.get("layer_types")
        if isinstance(types, list) and types:
            config = {**config, "layer_types": [*types[:-1], FULL]}
        return compute(config)

    return evolve(key, computed=computed)


def _heads(name: str, alone: str, default: Any) -> Any:
    """Return the function that computes a size of layers without the window. name: its key for all layers. alone: its
    key for these layers; default: value of that key if absent; None: the value for all layers."""

    def computed(config: Config) -> Any:
        layers, everywhere = layer_count(config), config.get(name, {"head_dim": 256}.get(name, 4))
        if _BY_LAYER not in config:
            found = config.get(alone, default) if name == "head_dim" or config.get("attention_k_eq_v") else None
            return everywhere if found is None else found
        full = _last_is_full(_FULL_LAYERS).computed
        assert full is not None
        numbers, given = full(config), {} if config[_BY_LAYER] is None else config[_BY_LAYER]
        if layers is None or isinstance(numbers, WrongKey):
            return everywhere
        entries = {str(layer): each for layer, each in given.items()} if isinstance(given, Mapping) else {}
        own = [entries.get(str(layer), {}) for layer in numbers or range(layers)]
        mapped = isinstance(given, Mapping) and isinstance(own[0], Mapping) and own[0].keys() <= _SIZES
        others = entries.keys() - set(map(str, numbers or range(layers)))
        if not mapped or others or any(each != own[0] for each in own):
            wanted = "the same head_dim and num_key_value_heads for each layer of full attention, and no other layer"
            return WrongKey(_BY_LAYER, wanted)
        return own[0].get(name, everywhere)

    return computed


_SIZES = {"head_dim", "num_key_value_heads"}


def _write_key_heads(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys with the key/value heads of layers without the window. The usual key counts only if keys are
    values."""
    heads = settings["full_kv_heads"]
    if settings["full_key_values"] or heads == settings["kv_heads"]:
        return {"num_global_key_value_heads": heads}
    windowed = settings.get("window") is not None
    full = settings.get("full_layers", ()) if windowed else range(settings["layers"])
    sizes = {"head_dim": settings["full_head_dim"], "num_key_value_heads": heads}
    return {_BY_LAYER: {str(layer): sizes for layer in full}}


@frozen(kw_only=True)
class Gemma4Names(StoredNames):
    """Stored names of Gemma 4. ends: end of a parameter's name → its end in files."""

    ends: Mapping[str, str] = field(factory=dict)

    def of(self, parameter: ParameterSpec) -> Alternatives:
        ways = super().of(parameter)
        if parameter.expert:  # whose forms other than one by one keep the names of modules
            return tuple(tuple(evolve(part, name=self._renamed(part.name)) for part in parts) for parts in ways)
        end = next((end for end in self.ends if parameter.name.endswith(f".{end}")), None)
        if end is None:
            return ways
        name = f"model.{parameter.name.removesuffix(end)}{self.ends[end]}"
        return ((evolve(ways[0][0], name=name),),)


IMAGES = language_model("vision_tower", "embed_vision", "audio_tower", "embed_audio")
WHOLE = WholeModel(
    model_type="gemma4",
    architectures=("Gemma4ForConditionalGeneration",),
    part="text_config",
    replaces=("tie_word_embeddings",),
    harmless=HARMLESS
    | {f"{kind}_token_id" for kind in ("audio", "boa", "boi", "eoa", "eoi", "image", "video")}
    | {"audio_config", "eoa_token_index", "initializer_range", "vision_config", "vision_soft_tokens_per_image"}
    | {"audio_ms_per_token", "audio_soft_tokens_per_image"},
)


CONFIG: Final = ModelConfig(
    model_type="gemma4_text",
    architectures=("Gemma4ForCausalLM",),
    scores=None,
    keys=keys(
        ConfigKey("kv_heads", "num_key_value_heads", 4),
        ConfigKey("head_dim", "head_dim", 256),
        ConfigKey("ffn", "intermediate_size", 9216),
        ConfigKey("vocab", "vocab_size", 262_144),
        ConfigKey("tie_embeddings", "tie_word_embeddings", default=True),
        ATTENTION_BIAS,
        ConfigKey("logit_cap", "final_logit_softcapping", default=None, null=None),
        evolve(_last_is_full(_WINDOW), writes=write_window),
        evolve(_last_is_full(_FULL_LAYERS), writes=write_window_types),
        ConfigKey("full_head_dim", "global_head_dim", computed=_heads("head_dim", "global_head_dim", 512)),
        ConfigKey(
            "full_kv_heads",
            "num_global_key_value_heads",
            computed=_heads("num_key_value_heads", "num_global_key_value_heads", None),
            writes=_write_key_heads,
        ),
        ConfigKey("full_key_values", "attention_k_eq_v", default=False),
    ),
    rope_theta=1e6,
    rope={FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25}},
    local_rope=LocalRope("local_theta", "", 10_000.0, full=FULL, local=WINDOWED),
    constant={"qk_norm": True},
    only={
        **{name: only for name, only in ONLY.items() if name != "hidden_act"},
        "hidden_activation": Only(("gelu_pytorch_tanh",)),
        "use_bidirectional_attention": Only((None, "vision")),
    },
    # Sizes of what `only` excludes, and sizes of single layers, which the keys of other heads read.
    harmless=HARMLESS | {"moe_intermediate_size", "num_experts", "top_k_experts"} | {_BY_LAYER},
    whole=WHOLE,
)


_OF_INPUTS: Final = ("hidden_size_per_layer_input", "num_kv_shared_layers")


def config_of(*own: ConfigKey, experts: bool, inputs: int | None = 256, **constant: Any) -> ModelConfig:
    """Return the config of a family. own: further keys. experts: there are some. inputs: width of per-layer inputs if
    no key gives it; None: the keys of the family give it, and shared keys and values. constant: settings that no key
    determines.

    Models with experts and with per-layer inputs, or with shared keys and values, are of no family: transformers' code
    computes them.
    """

    def accepts(config: Config) -> bool:
        others = inputs is not None and (config.get(_OF_INPUTS[0], inputs) or config.get(_OF_INPUTS[1]))
        return not others and bool(config.get(_MOE)) is experts

    without = {} if inputs is None else dict.fromkeys(_OF_INPUTS, Only((0,)))
    idle = set() if inputs is None else {"use_double_wide_mlp", "vocab_size_per_layer_input"}
    return evolve(
        CONFIG,
        keys=(*CONFIG.keys, *own),
        constant={**CONFIG.constant, **constant},
        only={**CONFIG.only, **without, _MOE: Only((experts,))},
        harmless=CONFIG.harmless | idle,
        accepts=accepts,
    )


NAMES: Final = Gemma4Names(
    enclosed=IMAGES.enclosed, beside=IMAGES.beside, buffers=(_FACTOR,), ends={_FACTOR: "layer_scalar"}
)


@frozen
class Gemma4Family(TransformerSettings, PlannedModel):
    """Base of the families of Gemma 4."""

    attention_bias: bool = attention_biases()
    window: int | None = window_setting()
    full_layers: tuple[int, ...] = full_layers_setting()
    local_theta: float = local_theta_setting(10_000.0)
    full_head_dim: int | Auto = setting(
        "width of a head in blocks without a window; auto: head_dim", default=AUTO, check=at_least(2), resuming="width"
    )
    full_kv_heads: int | Auto = setting(
        "number of key and value heads in blocks without a window; auto: kv_heads",
        default=AUTO,
        check=at_least(1),
        resuming="width",
    )
    full_key_values: bool = setting(
        "in blocks without a window, values are the keys before their norm and positions",
        default=False,
        resuming="shape",
    )
    logit_cap: float | None = setting(
        "cap of logits l: cap · tanh(l / cap); none: no cap", default=None, check=positive, example="30"
    )
    has_qk_norm: ClassVar[bool] = True

    def auto(self) -> dict[str, tuple[Any, str]]:
        width = self.dim // self.heads if isinstance(self.head_dim, Auto) else self.head_dim
        heads = self.heads if isinstance(self.kv_heads, Auto) else self.kv_heads
        own = {"full_head_dim": (max(1, width), f"head_dim {width}"), "full_kv_heads": (heads, f"kv_heads {heads}")}
        return {**super().auto(), **own}

    def unfit(self) -> tuple[str, str, str] | None:
        width, heads = self.full_head_dim, self.full_kv_heads
        if not isinstance(width, Auto) and width % 2:
            message = f"full_head_dim {width} is odd, and rotary positions turn pairs"
            return "full_head_dim", message, f"use full_head_dim {width + 1}"
        if not isinstance(heads, Auto) and self.heads % heads:
            message = f"full_kv_heads {heads} do not divide heads {self.heads}"
            return "full_kv_heads", message, "use a number that divides heads"
        return super().unfit()

    @classmethod
    def ends(cls, arch: Architecture) -> ModelEnds:
        return ModelEnds(embedding_scale=arch.dim**0.5, logit_cap=arch.own["logit_cap"])

    @classmethod
    def feed_forward(cls, arch: Architecture) -> BlockPiece:
        """Return the pieces between the residual stream and the last norm of a block."""
        return Chain.of(NormLayer("pre_feedforward_layernorm"), SwiGLULayer("mlp", activation="gelu_tanh"))

    @classmethod
    def attentions(cls, arch: Architecture) -> tuple[AttentionLayer, AttentionLayer]:
        """Return the attention of blocks without and with the window."""
        own = arch.own
        bias = own.get("attention_bias", False)
        full = AttentionLayer(
            "self_attn",
            qk_norm=arch.qk_norm,
            bias=bias,
            output_bias=bias,
            scale=1.0,
            value_norm=True,
            head_width=own["full_head_dim"],
            heads_of_keys=own["full_kv_heads"],
            key_values=own["full_key_values"],
        )
        local = evolve(full, window=own.get("window"), theta=own["local_theta"], key_values=False)
        return full, evolve(local, head_width=None, heads_of_keys=None)

    @classmethod
    def block_of(cls, attention: BlockPiece, feed_forward: BlockPiece, *more: BlockPiece) -> BlockPiece:
        """Compose a block. more: pieces between the feed-forward layer and the factor."""
        return Chain.of(
            Residual.of(NormLayer("input_layernorm"), attention, NormLayer("post_attention_layernorm")),
            Residual.of(feed_forward, NormLayer("post_feedforward_layernorm")),
            *more,
            FactorLayer("layer_scalar"),
        )

    @classmethod
    def blocks(cls, arch: Architecture) -> tuple[BlockPiece, ...]:
        of_full, of_local = (cls.block_of(each, cls.feed_forward(arch)) for each in cls.attentions(arch))
        return tuple(of_full if window is None else of_local for window in layer_windows(arch))
