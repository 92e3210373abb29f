"""Supported keys of a transformers `config.json`."""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from attrs import evolve, field

from xtrain.lazy_attrs import frozen

Config = Mapping[str, Any]
REFUSED: Final = object()
MOST_FURTHER: Final = 8  # modules that predict further tokens
MOST_LAYERS: Final = 10_000  # a plan lists all layers
MOST_EXPERTS: Final = 10_000  # per block; files may store experts one by one


@frozen
class ConfigKey:
    """A key of `config.json` that determines a setting, or `router.normalise` of the block `router`.

    default: value if the key is absent, as in the class of transformers; null: value if it is null. Either may be a
    function of the other keys; REFUSED: there is none. also: another name of the key, in other versions of
    transformers. when: whether the model uses the key, given the other keys; None: always. read: converts the key's
    value (neither absent nor null) to the setting's; returns REFUSED for a value other than `words` describe. write:
    converts back, from the setting's value and the number of layers. computed: the value if it follows from several
    keys, whatever this one says; or a `WrongKey`. writes: these keys again, from all settings by name.
    """

    setting: str
    name: str
    default: Any = REFUSED
    null: Any = REFUSED
    also: str = ""
    when: Callable[[Config], bool] | None = None
    read: Callable[[Any], Any] | None = None
    words: str = ""
    write: Callable[[Any, int], Any] | None = None
    computed: Callable[[Config], Any] | None = None
    writes: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.also) if self.also else (self.name,)


@frozen
class WrongKey:
    """A key with which the model would compute something that the family does not support. wanted: the required
    value."""

    name: str
    wanted: str


@frozen
class Only:
    """A key that must have one of these values if present: others would change the computation in a way that the family
    does not support. An exported config gets the first value. words: the required value in words, if `fits` checks
    it."""

    values: tuple[Any, ...] = ()
    fits: Callable[[Any], bool] | None = None
    words: str = ""

    def __call__(self, value: Any) -> bool:
        if self.fits is not None:
            return self.fits(value)
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.values)


@frozen
class LocalRope:
    """Rotary positions of windowed layers that have their own base, without scaling.

    setting: the setting of that base; key: its key in version 4 of transformers, empty if it has none; default: its
    value if absent. full, local: keys of `rope_parameters` (version 5) for layers without and with the window.
    """

    setting: str
    key: str
    default: float
    full: str
    local: str


@frozen(kw_only=True)
class WholeModel:
    """A model that contains one of the family as a part; its other parts are ignored.

    model_type, architectures: values of these keys of its `config.json`. part: key of the object with the family's
    keys. replaces: keys that override those of the part. null: keys that must be null, because only the part computes
    with them. harmless: keys that do not affect the part. unnamed: a part without `model_type` is of the family.
    """

    model_type: str
    architectures: tuple[str, ...]
    part: str
    replaces: tuple[str, ...] = ()
    null: tuple[str, ...] = ()
    harmless: frozenset[str] = frozenset()
    unnamed: bool = True


class LlamaCpp(NamedTuple):
    """Form of a family's models in llama.cpp. pairs: its RoPE turns neighbouring rows, which transformers stores half a
    head apart. biases: it computes attention with biases, where a family has them by a setting."""

    name: str
    pairs: bool = False
    biases: bool = False


@frozen(kw_only=True)
class ModelConfig:
    """The part of `config.json` that a family supports.

    model_type, architectures: values of these keys; aliases: other model types that compute the same, whose exports are
    of `model_type`. scores: the value of `architectures` if the model has a reward head
    instead of logits, unless it is the usual one; None: transformers has no such class. keys: keys that determine
    settings. rope_theta: default base of the frequencies. rope_keys: keys of `rope_parameters` or `rope_scaling` that
    determine settings of the family outside `rope { … }`. rope_harmless: keys there that may have any value.
    rope_always: transformers computes with scaled positions alone, so that files of others have yarn of factor 1.
    original: default of `original_max_position_embeddings`, if it is a key outside `rope_parameters` and all scaling is
    longrope, whatever its name; 0: it is not.
    local_rope: set if that base does not apply to all layers. rope: default of `rope_parameters`; empty: no scaling.
    constant: settings that no key determines, with their values. only: keys with restricted values. harmless: keys that
    may have any value. whole: a model that contains one of the family as a part. heads_divide: transformers requires a
    width divisible by the number of heads. llama_cpp: None: its GGUF files are not written.
    """

    model_type: str
    architectures: tuple[str, ...]
    keys: tuple[ConfigKey, ...]
    rope_theta: float = 10_000.0
    local_rope: LocalRope | None = None
    rope: Mapping[str, Any] = field(factory=dict)
    rope_keys: tuple[ConfigKey, ...] = ()
    constant: Mapping[str, Any] = field(factory=dict)
    only: Mapping[str, Only] = field(factory=dict)
    harmless: frozenset[str] = frozenset()
    whole: WholeModel | None = None
    accepts: Callable[[Config], bool] | None = None
    heads_divide: bool = False
    scores: str | None = ""
    rope_harmless: frozenset[str] = frozenset()
    aliases: tuple[str, ...] = ()
    rope_always: bool = False
    original: int = 0
    llama_cpp: LlamaCpp | None = None

    @property
    def types(self) -> tuple[str, ...]:
        """Model types that the family computes."""
        return self.model_type, *self.aliases

    @property
    def classifier(self) -> str:
        """Class of transformers with a reward head; empty if there is none."""
        if self.scores is None:
            return ""
        return self.scores or self.architectures[0].replace("ForCausalLM", "ForSequenceClassification")


OFF: Final = Only((False, None))
AUTO_MAP: Final = "auto_map"  # classes of modeling files: harmless to families that compute the same
NO_DROPOUT: Final = Only((0.0, 0))


def head_width(config: Config) -> int | None:
    """Return dim / heads, if both are given."""
    dim, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return dim // heads if isinstance(dim, int) and isinstance(heads, int) and heads > 0 else None


def layer_count(config: Config) -> int | None:
    """Return the number of layers if it is valid, else None."""
    layers = config.get("num_hidden_layers")
    return layers if isinstance(layers, int) and 0 < layers <= MOST_LAYERS else None


WINDOW: Final = ConfigKey("window", "sliding_window", default=None, null=None)


def switched_window(config: Config, default: int | None = 4096) -> Any:
    """Return the window that `use_sliding_window` turns on; None: no window. default: its length if no key gives it."""
    if not isinstance(config.get("use_sliding_window"), bool | None):
        return WrongKey("use_sliding_window", "true or false")
    return config.get("sliding_window", default) if config.get("use_sliding_window") else None


def write_switched_window(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys that `switched_window` reads."""
    window = settings.get("window")
    return {"use_sliding_window": window is not None} | ({"sliding_window": window} if window is not None else {})


Slides = list[bool] | WrongKey
"""Per layer: True if the layer has the window."""


def window_keys(
    slides: Callable[[Config, int], Slides], length: Callable[[Config], Any] = switched_window
) -> tuple[ConfigKey, ConfigKey]:
    """Return the keys of a family that mixes layers with and without a window.

    slides: which layers have the window if `layer_types` does not say so. length: length of the window; None: no
    window.
    """

    def sliding(config: Config) -> Slides:
        layers, types, window = layer_count(config), config.get("layer_types"), length(config)
        if layers is None:
            return []
        if isinstance(window, WrongKey):
            return window
        if types is not None:
            return typed_layers(types, layers, FULL if window is None else (*FULL, "sliding_attention"))
        return [False] * layers if window is None else slides(config, layers)

    def window(config: Config) -> Any:
        found = sliding(config)
        return found if isinstance(found, WrongKey) else length(config) if any(found) else None

    def others(config: Config) -> list[int]:
        found = sliding(config)
        if isinstance(found, WrongKey) or not any(found):  # `window` says so
            return []
        return [layer for layer, slid in enumerate(found) if not slid]

    return (
        evolve(WINDOW, computed=window, writes=write_switched_window),
        ConfigKey("full_layers", "layer_types", computed=others, writes=_write_layer_types),
    )


FULL: Final = ("full_attention",)


def typed_layers(types: Any, layers: int, known: tuple[str, ...]) -> Slides:
    """Return the layers with a window, from `layer_types`. known: the supported types."""
    if not isinstance(types, list) or len(types) != layers or not all(each in known for each in map(str, types)):
        return WrongKey("layer_types", f"{' or '.join(known)} for each of the {layers} layers")
    return [each == "sliding_attention" for each in types]


def later_layers(config: Config, layers: int) -> Slides:
    """Return the layers from `max_window_layers` on as windowed."""
    first = window_bound(config)
    return first if isinstance(first, WrongKey) else [layer >= first for layer in range(layers)]


def window_bound(config: Config) -> int | WrongKey:
    """Return `max_window_layers`: the layer at which windows begin, or end."""
    found = config.get("max_window_layers", 28)
    whole = isinstance(found, int) and not isinstance(found, bool)
    return found if whole else WrongKey("max_window_layers", "the number of a layer")


def _write_layer_types(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the key `layer_types` if any layer has a window."""
    if settings.get("window") is None:
        return {}
    full = settings.get("full_layers", ())
    types = ("full_attention" if layer in full else "sliding_attention" for layer in range(settings["layers"]))
    return {"layer_types": list(types)}


def query_heads(config: Config) -> Any:
    return config.get("num_attention_heads")


CONTEXT: Final = "max_position_embeddings"
PARTIAL: Final = "partial_rotary_factor"  # share of a head's numbers that are rotated


def has_dense_blocks(config: Config) -> bool:
    """Return True if some blocks have no experts, by the keys of qwen2_moe and qwen3_moe."""
    return bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) != 1


QUANTISATION: Final = "quantization_config"


def stored_coding(config: Config) -> Any:
    """Return the form of the numbers of matrices in files: plain, mxfp4, or fp8 with scales of blocks."""
    given = config.get(QUANTISATION)
    if given is None:
        return "plain"
    if isinstance(given, Mapping) and given.get("quant_method") == "mxfp4":
        return "mxfp4"
    if isinstance(given, Mapping) and given.get("quant_method") == "fp8" and given.get("fmt", "e4m3") == "e4m3":
        block = given.get("weight_block_size")
        if isinstance(block, list) and len(block) == 2 and all(type(each) is int and each > 0 for each in block):
            return "fp8"
    return WrongKey(QUANTISATION, "mxfp4, or fp8 in e4m3 with a `weight_block_size`; give a folder in bf16 otherwise")


# Keys of every family, with the most common defaults.
KEYS: Final = (
    ConfigKey("coding", QUANTISATION, computed=stored_coding, writes=lambda values: {}),
    ConfigKey("dim", "hidden_size"),
    ConfigKey("layers", "num_hidden_layers"),
    ConfigKey("heads", "num_attention_heads"),
    ConfigKey("vocab", "vocab_size"),
    ConfigKey("norm_eps", "rms_norm_eps", 1e-6),
    ConfigKey("tie_embeddings", "tie_word_embeddings", default=False),
    ConfigKey("init_std", "initializer_range", 0.02),
)


HEADS: Final = (
    ConfigKey("kv_heads", "num_key_value_heads", default=query_heads, null=query_heads),
    ConfigKey("head_dim", "head_dim", default=head_width),
)


def keys(*own: ConfigKey) -> tuple[ConfigKey, ...]:
    """Return the keys of every family; own: keys of one family, which override common keys of the same setting."""
    return tuple({key.setting: key for key in (*KEYS, *HEADS, *own)}.values())


ONLY: Final = {
    "hidden_act": Only(("silu", "swish")),
    "attention_dropout": NO_DROPOUT,
    "is_encoder_decoder": OFF,
    "chunk_size_feed_forward": Only((0,)),
}
ATTENTION_BIAS: Final = ConfigKey("attention_bias", "attention_bias", default=False, null=False)
MLP_BIAS: Final = ConfigKey("mlp_bias", "mlp_bias", default=False, null=False)
# Keys of families in which some blocks may have no experts.
MIXED_KEYS: Final = (
    ConfigKey("expert_every", "decoder_sparse_step", 1),
    ConfigKey("dense_layers", "mlp_only_layers", default=[], null=[]),
    ConfigKey("ffn", "intermediate_size", when=has_dense_blocks),
)
# Generation settings that versions of transformers before 5 wrote into config.json: all of `GenerationConfig`, and some
# that only earlier versions have.
_GENERATION: Final = frozenset(
    """assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind bad_words_ids
    begin_suppress_tokens cache_config cache_implementation compile_config constraints continuous_batching_config
    decoder_start_token_id disable_compile diversity_penalty do_sample dola_layers early_stopping
    encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    force_words_ids forced_bos_token_id forced_decoder_ids forced_eos_token_id generation_config guidance_scale
    is_assistant length_penalty low_memory max_cache_len max_length max_matching_ngram_size max_new_tokens max_time
    min_length min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule
    num_beam_groups num_beams num_return_sequences output_logits output_scores penalty_alpha prefill_chunk_size
    prompt_lookup_num_tokens remove_invalid_values renormalize_logits repetition_penalty return_dict_in_generate
    sequence_bias speculation_type stop_strings suppress_tokens target_lookbehind temperature token_healing top_h top_k
    top_p typical_p use_mtp watermarking_config""".split()  # noqa: SIM905
)
# How to run the model, the task and tokenizer it was saved for, and who made the file.
_METADATA: Final = frozenset(
    """_attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _experts_implementation _flash_attn_2_enabled _from_model_config _name_or_path architectures attn_implementation
    bos_token bos_token_id chunk_size_feed_forward dtype eos_token eos_token_id experts_implementation finetuning_task
    gradient_checkpointing id2label is_decoder is_llama_config keys_to_ignore_at_inference label2id
    max_position_embeddings max_seq_len max_seq_length max_sequence_length model_max_length model_name model_type
    name_or_path num_labels output_attentions output_hidden_states output_past pad_token pad_token_id prefix
    pretraining_tp problem_type processor_class return_dict sep_token_id seq_length task_specific_params
    tf_legacy_loss tokenizer_class torch_dtype torchscript transformers.js_config transformers_version unk_token_id
    use_bfloat16 use_cache use_flash_attention use_flash_attention_2 use_flash_attn""".split()  # noqa: SIM905
)
HARMLESS: Final = _GENERATION | _METADATA
# Metadata of other families with which code of transformers may compute: the class, the row of padding, masks, tables
# and angles of positions, experts of a token.
_COMPUTED: Final = frozenset(
    """is_decoder max_position_embeddings max_seq_len max_seq_length max_sequence_length model_type pad_token_id
    pretraining_tp seq_length top_k""".split()  # noqa: SIM905
)
HARMLESS_TO_CODE: Final = HARMLESS - _COMPUTED
# Keys of any config with the values that have no effect.
USUAL: Final[Mapping[str, Only]] = {
    **dict.fromkeys(
        ("add_cross_attention", "is_encoder_decoder", "rope_interleaved", "tie_encoder_decoder", "use_mrope"), OFF
    ),
    "pruned_heads": Only(({}, None)),
}


def is_metadata(name: str, harmless: frozenset[str]) -> bool:
    """Return True if a key does not affect the computation. harmless: the harmless keys of its family."""
    return name in harmless or name.startswith("unsloth_")
