"""`config.json` of exported models, and models that transformers does not have."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.model_config import AUTO_MAP, CONTEXT, PARTIAL, QUANTISATION, ConfigKey, ModelConfig
from xtrain.dsl.schema.rope import ORIGINAL, ROPE_KEYS, Rope
from xtrain.dsl.schema.setting import settings_of
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, buffers
from xtrain.plan.weight_files import known_names

DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
ROPE: Final = ("rope_theta", "rope_scaling", "rope_parameters")
FURTHER: Final = "num_nextn_predict_layers"
TOKENS: Final = ("bos_token_id", "eos_token_id")
# Reason why a run with an adapter has no whole model to export, and the remedy.
ADAPTER_ALONE: Final = (
    "the run trains an adapter, and its checkpoints hold that without the model under it",
    "`xtrain export --adapter` and `export { adapter = true }` write the adapter for PEFT; `xtrain merge` adds it to "
    "the model and writes that as a whole",
)


def not_written(arch: Architecture) -> tuple[str, str] | None:
    """Return (reason, remedy) if transformers has no model that computes the same; otherwise None."""
    if arch.adapter is not None:
        return ADAPTER_ALONE
    family = None if "user" in arch.own else FAMILIES.get(arch.family)
    stored = known_names(arch)
    if (code := arch.own.get("code")) is not None:
        if arch.has_logits or code["rewards"]:
            return None
        message = f"transformers has no class that gives one reward with the tensors of a {code['class']}"
        return message, "export a reward model of another type"
    if family is None or family.config is None or stored is None:
        known = ", ".join(name for name, each in FAMILIES.items() if each.config is not None)
        message = f"transformers has no model of the family {arch.family}"
        return message, f"families that it has: {known}"
    if not arch.has_logits and not family.config.classifier:
        message = f"transformers has no {family.config.model_type} with a reward head"
        return message, "keep the checkpoint, or train a reward model of another family"
    for setting, value in family.config.constant.items():
        if (ours := _value(arch, setting)) != value:
            message = f"`{setting}` is {json.dumps(ours)}, and in a {family.config.model_type} of transformers it is "
            return f"{message}{json.dumps(value)}", "no config.json says otherwise"
    if family.config.heads_divide and arch.dim % arch.heads:
        what = f"dim {arch.dim} is not divisible by heads {arch.heads}"
        return f"{what}, which transformers requires of a {family.config.model_type}", "use heads that divide dim"
    if unknown := [each.name for each in buffers(arch) if not each.name.endswith(stored.buffers)]:
        message = f"a {family.config.model_type} of transformers has no `{unknown[0]}`, of `router.bias_speed`"
        return message, "train without `router { bias_speed }`"
    return None


@frozen(kw_only=True)
class ConfigValues:
    """Values that an architecture does not have. format: of most weights. context: positions of a row. begin, end: the
    ids that begin and end a document."""

    format: str
    context: int
    begin: int
    end: int


def _rewards(arch: Architecture, values: ConfigValues, pad: int | None = None) -> dict[str, Any]:
    """Return the keys of a reward head. Rewards are read at the last token that is not padding, `pad`, so the padding
    must differ from the token that ends texts; the token that begins them then replaces it."""
    if arch.has_logits:
        return {}
    if pad in (None, values.end):
        pad = values.begin if values.begin != values.end else None
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    classifier = arch.own["code"]["rewards"] if "code" in arch.own else _config(arch).classifier
    return {"architectures": [classifier], **labels, "pad_token_id": pad}


def _further(arch: Architecture) -> dict[str, Any]:
    """Return the key with the number of modules that predict further tokens, for a family whose files may have some."""
    stored = known_names(arch)
    return {FURTHER: arch.mtp} if arch.mtp and stored is not None and stored.further_tokens else {}


def new_config(arch: Architecture, values: ConfigValues) -> dict[str, Any]:
    """Return all keys, in the spelling that versions 4 and 5 of transformers read."""
    if "code" in arch.own:
        return _code_config(arch, values)
    further = _further(arch)
    arch = arch.core
    config = _config(arch)
    found = {
        "architectures": [config.architectures[0]],
        "model_type": config.model_type,
        **dict(zip(TOKENS, (values.begin, values.end), strict=True)),
        "pad_token_id": None,  # the default id of some transformers classes lies outside a small vocabulary
        **{name: value for key in config.keys for name, value in _written(arch, key, key.name).items()},
        **_rope(arch, values.context),
        CONTEXT: _context(arch, values.context),
        **{name: only.values[0] for name, only in config.only.items() if only.values},
        "torch_dtype": DTYPES[values.format],
        "use_cache": True,
        **further,
        **_rewards(arch, values),
    }
    read = {key.name for key in config.keys if key.when is None or key.when(found)}
    unread = {key.name for key in config.keys} - read
    return {name: value for name, value in found.items() if name not in unread}


def changed_config(
    arch: Architecture, values: ConfigValues, config: Mapping[str, Any], means: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the `config.json` that a model began with, changed only where it no longer holds. If the model was part of
    another, return the part's.

    means: the settings that it gives, from `settings_in_folder`.
    """
    if "code" in arch.own:
        return _code_config(arch, values)
    further = _further(arch)
    arch = arch.core
    config = _own_config(_config(arch), config)
    found = dict(config)
    for key in _config(arch).keys:
        if (key.when is None or key.when(config)) and means.get(key.setting) != _value(arch, key.setting):
            found |= _written(arch, key, next((name for name in key.names if name in config), key.name))
    same = all(means.get(key.setting) == _value(arch, key.setting) for key in _config(arch).rope_keys)
    if means.get("rope_theta") != arch.rope_theta or _scaling(means) != arch.rope.in_files() or not same:
        found = {name: value for name, value in found.items() if name not in ROPE} | _rope(arch, values.context)
        # Some transformers classes scale positions only of heads whose width is written.
        width = (key for key in _config(arch).keys if key.setting == "head_dim" and config.get(key.name) is None)
        share = (key for key in _config(arch).keys if key.name == PARTIAL)
        found |= {name: value for key in (*width, *share) for name, value in _written(arch, key, key.name).items()}
    context, needed = config.get(CONTEXT), _context(arch, values.context)
    if arch.rope.scaling == "dynamic" or (isinstance(context, int) and context < needed):
        found[CONTEXT] = needed
    dtype = "dtype" if "dtype" in config else "torch_dtype"
    if config.get(dtype) != DTYPES[values.format]:
        found[dtype] = DTYPES[values.format]
    found |= further
    found |= _rewards(arch, values, config.get("pad_token_id"))
    return with_tokens(found, values.begin, [values.end])


def _code_config(arch: Architecture, values: ConfigValues) -> dict[str, Any]:
    """Return the config that the model began with, with its number format and the ids of the tokenizer."""
    code = arch.own["code"]
    config = dict(code["config"])
    config |= {
        "architectures": [code["whole"] or code["class"]],
        "dtype" if "dtype" in config else "torch_dtype": DTYPES[values.format],
        **_rewards(arch, values, config.get("pad_token_id")),
    }
    return with_tokens(config, values.begin, [values.end])


def _own_config(family: ModelConfig, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of the family's own model, without classes of modeling files and forms of codes, which exports
    do not have."""
    whole, kind = family.whole, config.get("model_type")
    found = dict(config)
    if whole is not None and kind == whole.model_type:
        part = {name: value for name, value in config[whole.part].items() if name not in whole.replaces}
        found = {name: config[name] for name in config if name in family.harmless} | part
        found |= {name: config[name] for name in whole.replaces if name in config}
    if kind != family.model_type:
        found |= {"architectures": [family.architectures[0]], "model_type": family.model_type}
    return {name: value for name, value in found.items() if name not in (AUTO_MAP, QUANTISATION)}


def with_tokens(config: Mapping[str, Any], begin: int, ends: Sequence[int]) -> dict[str, Any]:
    """Return a config with the ids that begin and end a text here.

    Other ids that end a text are kept, unless none of them is one of these, which means that they belong to another
    tokenizer. An id that begins a text is kept if the tokenizer has none; `begin` is then the id that ends texts.
    """
    found, (first, last) = dict(config), TOKENS
    given = found.get(last)
    before = given if isinstance(given, list) else [given]
    kept = before if any(end in before for end in ends) else []
    if missing := [end for end in ends if end not in kept]:
        both = [*kept, *missing]
        found[last] = both if len(both) > 1 else both[0]
    if found.get(first) is None or begin not in ends:
        found[first] = begin
    return found


def read_differences(arch: Architecture, means: Mapping[str, Any]) -> list[str]:
    """Return the settings of a model that differ from a `config.json`, with the values given there."""
    arch = arch.core
    config = _config(arch)
    keys = {key.setting: key for key in (*config.keys, *config.rope_keys)}
    known = keys.keys() | config.constant.keys() | {"rope_theta"}
    known |= {config.local_rope.setting} if config.local_rope is not None else set()
    pairs = {setting: (means[setting], _value(arch, setting)) for setting in means if setting in known}
    scaled = _scaling(means)
    is_plain = config.rope_always and (scaled.get("factor"), scaled.get("attention_factor")) == (1.0, 1.0)
    pairs["rope"] = {} if is_plain else scaled, arch.rope.in_files()

    def same(setting: str, theirs: Any, ours: Any) -> bool:
        if theirs == ours or setting not in keys:
            return theirs == ours
        # Block numbers in another order, or without effect, give the same keys.
        return _content(keys[setting], theirs, means) == _content(keys[setting], ours, arch.to_json())

    return [
        f"{setting} {json.dumps(theirs)} instead of {json.dumps(ours)}"
        for setting, (theirs, ours) in pairs.items()
        if not same(setting, theirs, ours)
    ]


def _config(arch: Architecture) -> ModelConfig:
    config = FAMILIES[arch.family].config
    assert config is not None
    return config


def _rope(arch: Architecture, context: int) -> dict[str, Any]:
    scaled, config = dict(arch.rope.in_files()), _config(arch)
    if config.rope_always and not scaled:
        scaled = Rope(scaling="yarn", original=_context(arch, context)).resolved()
    local = config.local_rope
    if local is not None and not local.key:
        kinds = {local.full: _scaled(arch, scaled), local.local: {"rope_type": "default"}}
        bases = arch.rope_theta, _value(arch, local.setting)
        return {
            "rope_parameters": {
                kind: {**kinds[kind], "rope_theta": base} for kind, base in zip(kinds, bases, strict=True)
            }
        }
    bases = {"rope_theta": arch.rope_theta} | ({local.key: _value(arch, local.setting)} if local is not None else {})
    if not scaled:  # some transformers classes do so only if told
        return {**bases, "rope_scaling": {"rope_type": "default"} if config.rope else None}
    outside = {ORIGINAL: arch.rope.original} if config.original else {}
    return {**bases, **outside, "rope_scaling": _scaled(arch, scaled)}


def _scaled(arch: Architecture, scaled: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of scaled positions. scaled: as `Rope.in_files` gives it."""
    kind = scaled.pop("scaling", "default")
    if kind == "dynamic":  # its `original` is the context
        scaled.pop("original")
    found = {"rope_type": kind, **{ROPE_KEYS[name]: value for name, value in scaled.items()}}
    config = _config(arch)
    own = {key: _value(arch, key.setting) for key in config.rope_keys}
    more = {key.name: value for key, value in own.items() if value != key.default or config.rope_always}
    return found | more


def _scaling(means: Mapping[str, Any]) -> dict[str, Any]:
    """Return `Rope.in_files` of the settings that a `config.json` gives."""
    given = {name.removeprefix("rope."): value for name, value in means.items() if name.startswith("rope.")}
    return Rope(**given).in_files()


def _context(arch: Architecture, rows: int) -> int:
    """Return the positions that the model is made for, with rows of `rows` positions; after scaling, if positions are
    scaled."""
    rope = arch.rope
    if rope.scaling == "dynamic":
        return rope.original
    return max(rows, int(rope.original * rope.factor))


def _value(arch: Architecture, setting: str) -> Any:
    """Return the value of a setting as JSON; an architecture omits defaults of settings that were added later."""
    values, name = arch.to_json(), setting.replace(".", "_")  # settings of `router { … }` are fields too
    if name in values:
        return values[name]
    default = settings_of(FAMILIES[arch.family])[setting][0].default
    return list(default) if isinstance(default, tuple) else default


def _written(arch: Architecture, key: ConfigKey, name: str) -> Mapping[str, Any]:
    """Return a key under this name with its value, or the keys that its setting is derived from."""
    content = _content(key, _value(arch, key.setting), arch.to_json())
    return content if key.writes is not None else {name: content}


def _content(key: ConfigKey, value: Any, settings: Mapping[str, Any]) -> Any:
    """Return the value of a key in the file; for a setting written as several keys, these keys with their values."""
    if key.writes is not None:
        return key.writes(settings)
    return value if key.write is None else key.write(value, settings["layers"])
