"""Keys of a transformers `config.json` that families of xtrain understand, and scaled rotary frequencies."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from attrs import evolve, field, fields_dict, frozen

from xtrain.dsl.schema.setting import AUTO, Auto, at_least, not_negative, positive, setting


@frozen
class Rope:
    """`rope { … }` inside `model`: scaling of rotary positions to a longer context."""

    scaling: Literal["none", "linear", "dynamic", "llama3", "yarn"] = setting(
        "how frequencies are scaled; dynamic changes nothing up to `original` positions, and longer rows are refused",
        default="none",
    )
    factor: float = setting("how many times more positions there are than before", default=1.0, check=at_least(1))
    original: int = setting(
        "positions that the model was trained on without scaling; dynamic, llama3 and yarn need it",
        default=0,
        check=not_negative,
    )
    low: float = setting(
        "llama3: pairs that turn less than this often in `original` positions are scaled in full",
        default=1.0,
        check=positive,
    )
    high: float = setting(
        "llama3: pairs that turn more than this often in `original` positions keep their frequency",
        default=4.0,
        check=positive,
    )
    beta_fast: float = setting(
        "yarn: pairs that turn more than this often in `original` positions keep their frequency",
        default=32.0,
        check=positive,
    )
    beta_slow: float = setting(
        "yarn: pairs that turn less than this often in `original` positions are scaled in full",
        default=1.0,
        check=positive,
    )
    truncate: bool = setting("yarn: round the bounds between those pairs to whole pairs", default=True)
    attention_factor: float | Auto = setting(
        "yarn: factor of cosines and sines; auto: 0.1 · ln(factor) + 1", default=AUTO, check=positive
    )

    @property
    def reads(self) -> tuple[str, ...]:
        """The settings that the scaling reads."""
        return ROPE_SCALINGS[self.scaling][0]

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by, so that scores are by its square."""
        if self.scaling != "yarn":
            return 1.0
        return yarn_magnitude(self.factor) if isinstance(self.attention_factor, Auto) else self.attention_factor

    @property
    def limit(self) -> int | None:
        """Positions of the longest text that is computed; None: of any length."""
        return self.original if self.scaling == "dynamic" else None

    def resolved(self) -> dict[str, Any]:
        """Its scaling and the settings that this reads, as JSON; nothing where frequencies are not scaled."""
        if self.scaling == "none":
            return {}
        chosen = evolve(self, attention_factor=self.magnitude)
        return {name: getattr(chosen, name) for name in fields_dict(Rope) if name in ("scaling", *self.reads)}

    def idle(self) -> dict[str, tuple[str, str]]:
        """The settings that the scaling does not read, each with why, and what to do."""
        why = f"scaling {self.scaling} does not read it"
        return {name: (why, "remove it") for name in fields_dict(Rope) if name not in ("scaling", *self.reads)}

    def problem(self, sequence: int) -> tuple[str, str, str] | None:
        """What does not fit: the setting, what is wrong, and what to do. sequence: positions of a row."""
        if "original" in self.reads and not self.original:
            needs = f"scaling {self.scaling} needs the number of positions before scaling"
            return "original", needs, "give `original`, as 8192 for Llama 3.1"
        for low, high in (("low", "high"), ("beta_slow", "beta_fast")):
            if low in self.reads and getattr(self, low) >= getattr(self, high):
                found = f"{low} {getattr(self, low):g} is not below {high} {getattr(self, high):g}"
                return low, found, f"use {low} 1, and {high} {fields_dict(Rope)[high].default:g}"
        if self.limit is not None and sequence > self.limit:
            why = f"scaling dynamic depends on the length of each text beyond original {self.original}"
            return "scaling", f"{why}, and rows have {sequence} positions", "use scaling yarn, or shorter rows"
        return None

    def frequencies(self, width: int, theta: float) -> list[float]:
        """Angle per position of each of the width / 2 pairs."""
        plain = [theta ** (-place / width) for place in range(0, width, 2)]
        return ROPE_SCALINGS[self.scaling][1](self, plain, theta)

    def __str__(self) -> str:
        return f"{self.scaling} × {self.factor:g}" + (f" from {self.original:,}" if self.original else "")


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """0.1 · weight · ln(factor) + 1 (Peng et al. 2023, arXiv 2309.00071, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _plain(rope: Rope, plain: list[float], theta: float) -> list[float]:
    return plain


def _linear(rope: Rope, plain: list[float], theta: float) -> list[float]:
    """f / factor (Chen et al. 2023, arXiv 2306.15595)."""
    return [each / rope.factor for each in plain]


def _llama3(rope: Rope, plain: list[float], theta: float) -> list[float]:
    """f / factor where a pair turns less than `low` times in `original` positions, f where it does more than `high`
    times, in between (1 - s) · f / factor + s · f with s = (turns - low) / (high - low) (Llama 3.1)."""
    found = []
    for each in plain:
        turns = rope.original * each / (2 * math.pi)
        kept = min(1.0, max(0.0, (turns - rope.low) / (rope.high - rope.low)))
        found.append((1 - kept) * each / rope.factor + kept * each)
    return found


def _yarn(rope: Rope, plain: list[float], theta: float) -> list[float]:
    """f / factor · r + f · (1 - r), where r grows from 0 to 1 between the pairs that turn `beta_fast` and `beta_slow`
    times in `original` positions (arXiv 2309.00071, section 3.2)."""
    width = 2 * len(plain)

    def place(turns: float) -> float:
        return width * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = place(rope.beta_fast), place(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    last += 0.001 if first == last else 0
    ramp = [min(1.0, max(0.0, (pair - first) / (last - first))) for pair in range(len(plain))]
    return [each / rope.factor * r + each * (1 - r) for each, r in zip(plain, ramp, strict=True)]


_Scale = Callable[[Rope, list[float], float], list[float]]
# Scaling → the settings that it reads, and how it computes frequencies from those without scaling.
ROPE_SCALINGS: Final[dict[str, tuple[tuple[str, ...], _Scale]]] = {
    "none": ((), _plain),
    "linear": (("factor",), _linear),
    "dynamic": (("factor", "original"), _plain),
    "llama3": (("factor", "original", "low", "high"), _llama3),
    "yarn": (("factor", "original", "beta_fast", "beta_slow", "truncate", "attention_factor"), _yarn),
}


Config = Mapping[str, Any]
REFUSED: Final = object()
MOST_FURTHER: Final = 8  # modules that predict further tokens
MOST_LAYERS: Final = 10_000  # a plan lists all
MOST_EXPERTS: Final = 10_000  # of a block; files may have them one by one


@frozen
class ConfigKey:
    """A key that gives a setting, `router.normalise` of the block `router`.

    default: where the key is absent, as the class of transformers has it; null: where it is null. Either may be
    computed from the other keys, and REFUSED says that there is none. also: another name of the key, of other versions
    of transformers. when: whether the model computes anything with it, by the other keys; None: always.
    read: makes the value of the setting of that of the key, where it is neither absent nor null; or REFUSED
    for what is not as `words` say. write: the value of the key again, of that of the setting and the number of layers.
    computed: the value where it follows from several keys, whatever this one says; or a `WrongKey`. writes: these keys
    again, of all settings by name.
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
    """A key with which the model would compute something that the family does not. wanted: what it must be."""

    name: str
    wanted: str


@frozen
class Only:
    """A key that must have one of these values, where it is there: with others the model would compute something that
    the family does not. The first one is written into the config of a model that is exported. words: what it must be,
    where `fits` says it."""

    values: tuple[Any, ...] = ()
    fits: Callable[[Any], bool] | None = None
    words: str = ""

    def __call__(self, value: Any) -> bool:
        if self.fits is not None:
            return self.fits(value)
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.values)


@frozen
class LocalRope:
    """Rotary positions of layers with a window that have a base of their own, without scaling.

    setting: of that base; key: that gives it in version 4 of transformers, default: where it is absent. full, local: in
    version 5 `rope_parameters` has an object for layers without the window, and one for those with it.
    """

    setting: str
    key: str
    default: float
    full: str
    local: str


@frozen(kw_only=True)
class WholeModel:
    """A model that has one of the family as a part, beside others that are left out.

    model_type, architectures: values of these keys of its `config.json`. part: key of the object that has the keys of
    the family. replaces: keys that count in place of those of the part. null: keys of the part that the part alone
    computes with. harmless: keys that say nothing of the part.
    """

    model_type: str
    architectures: tuple[str, ...]
    part: str
    replaces: tuple[str, ...] = ()
    null: tuple[str, ...] = ()
    harmless: frozenset[str] = frozenset()


@frozen(kw_only=True)
class ModelConfig:
    """What a family understands.

    model_type, architectures: values of these keys; scores: that of the second where the model has a head of rewards in
    place of logits, if it is not the usual one. keys: those that give settings. rope_theta: the base of the
    frequencies where no key gives it. rope_keys: keys of `rope_parameters` or `rope_scaling` that give settings of the
    family beside `rope { … }`. local_rope: where that base is not of all layers. rope: `rope_parameters` where the file
    has none; empty: they are not scaled. constant: settings of the family that no key gives, with their values. only:
    keys with one right value. harmless: keys that may have any value. whole: a model that has one of the family as a
    part. heads_divide: transformers refuses a width that is no multiple of the number of heads.
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
    heads_divide: bool = False
    scores: str = ""

    @property
    def classifier(self) -> str:
        """The class of transformers with a head of rewards."""
        return self.scores or self.architectures[0].replace("ForCausalLM", "ForSequenceClassification")


OFF: Final = Only((False, None))
NO_DROPOUT: Final = Only((0.0, 0))


def head_width(config: Config) -> int | None:
    """dim / heads, where both are given."""
    dim, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return dim // heads if isinstance(dim, int) and isinstance(heads, int) and heads > 0 else None


def layer_count(config: Config) -> int | None:
    """The number of layers, where it is one that a model can have."""
    layers = config.get("num_hidden_layers")
    return layers if isinstance(layers, int) and 0 < layers <= MOST_LAYERS else None


WINDOW: Final = ConfigKey("window", "sliding_window", default=None, null=None)


def switched_window(config: Config, default: int | None = 4096) -> Any:
    """The window that `use_sliding_window` turns on; None: there is none. default: where no key gives its length."""
    if not isinstance(config.get("use_sliding_window"), bool | None):
        return WrongKey("use_sliding_window", "true or false")
    return config.get("sliding_window", default) if config.get("use_sliding_window") else None


def write_switched_window(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of `switched_window`."""
    window = settings.get("window")
    return {"use_sliding_window": window is not None} | ({"sliding_window": window} if window is not None else {})


Slides = list[bool] | WrongKey
"""Of each layer, whether it has the window."""


def window_keys(
    slides: Callable[[Config, int], Slides], length: Callable[[Config], Any] = switched_window
) -> tuple[ConfigKey, ConfigKey]:
    """The keys of a family in which some layers may have a window and others not.

    slides: of so many layers, where there is a window and `layer_types` does not say which have it. length: of the
    window; None: there is none.
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
        if isinstance(found, WrongKey) or not any(found):  # which `window` says
            return []
        return [layer for layer, slid in enumerate(found) if not slid]

    return (
        evolve(WINDOW, computed=window, writes=write_switched_window),
        ConfigKey("full_layers", "layer_types", computed=others, writes=_write_layer_types),
    )


FULL: Final = ("full_attention",)


def typed_layers(types: Any, layers: int, known: tuple[str, ...]) -> Slides:
    """As `layer_types` says it. known: the types that there may be."""
    if not isinstance(types, list) or len(types) != layers or not all(each in known for each in map(str, types)):
        return WrongKey("layer_types", f"{' or '.join(known)} for each of the {layers} layers")
    return [each == "sliding_attention" for each in types]


def later_layers(config: Config, layers: int) -> Slides:
    """Those from `max_window_layers` on."""
    first = window_bound(config)
    return first if isinstance(first, WrongKey) else [layer >= first for layer in range(layers)]


def window_bound(config: Config) -> int | WrongKey:
    """`max_window_layers`: the layer with which windows begin, or end."""
    found = config.get("max_window_layers", 28)
    whole = isinstance(found, int) and not isinstance(found, bool)
    return found if whole else WrongKey("max_window_layers", "the number of a layer")


def _write_layer_types(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The key that says which layers have the window, if any has."""
    if settings.get("window") is None:
        return {}
    full = settings.get("full_layers", ())
    types = ("full_attention" if layer in full else "sliding_attention" for layer in range(settings["layers"]))
    return {"layer_types": list(types)}


def query_heads(config: Config) -> Any:
    return config.get("num_attention_heads")


# Setting of `rope { … }` → its key inside `rope_parameters` or `rope_scaling`. `original` of dynamic is always the
# context of the model; that of the others is the context where the key is absent.
ROPE_KEYS: Final = {
    "factor": "factor",
    "original": "original_max_position_embeddings",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
}
ROPE_NEEDED: Final = ("factor", "low", "high")  # of those that a scaling reads
# Two keys of yarn that give `attention_factor` together, where that is absent.
ROPE_WEIGHTS: Final = ("mscale", "mscale_all_dim")
CONTEXT: Final = "max_position_embeddings"


def has_dense_blocks(config: Config) -> bool:
    """Whether some blocks have no experts, as qwen2_moe and qwen3_moe say it."""
    return bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) != 1


# Of every family, with the defaults of most.
KEYS: Final = (
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
    """Those of every family and these of one, which take the place of others that give the same setting."""
    return tuple({key.setting: key for key in (*KEYS, *HEADS, *own)}.values())


ONLY: Final = {
    "hidden_act": Only(("silu", "swish")),
    "attention_dropout": NO_DROPOUT,
    "is_encoder_decoder": OFF,
    "chunk_size_feed_forward": Only((0,)),
}
ATTENTION_BIAS: Final = ConfigKey("attention_bias", "attention_bias", default=False, null=False)
MLP_BIAS: Final = ConfigKey("mlp_bias", "mlp_bias", default=False, null=False)
# Of families in which some blocks may have no experts.
MIXED_KEYS: Final = (
    ConfigKey("expert_every", "decoder_sparse_step", 1),
    ConfigKey("dense_layers", "mlp_only_layers", default=[], null=[]),
    ConfigKey("ffn", "intermediate_size", when=has_dense_blocks),
)
# Settings of generation, which versions of transformers before 5 wrote into config.json: all of `GenerationConfig`, and
# what only earlier ones have.
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
# How the model is run, the task and tokenizer it was saved for, and who made the file.
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
# Keys of any config with the values that change nothing.
USUAL: Final[Mapping[str, Only]] = {
    **dict.fromkeys(
        ("add_cross_attention", "is_encoder_decoder", "rope_interleaved", "tie_encoder_decoder", "use_mrope"), OFF
    ),
    "pruned_heads": Only(({}, None)),
}


def is_metadata(name: str, harmless: frozenset[str]) -> bool:
    """Whether a key changes nothing that a model computes. harmless: those of its family."""
    return name in harmless or name.startswith("unsloth_")
