"""The `config.json` of a model of a plan: what its family reads from one, the other way round."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.model_config import CONTEXT, ROPE_KEYS, ConfigKey, ModelConfig
from xtrain.dsl.schema.rope import Rope
from xtrain.dsl.schema.setting import settings_of
from xtrain.planner.architecture import Architecture, buffers

DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
ROPE: Final = ("rope_theta", "rope_scaling", "rope_parameters")
FURTHER: Final = "num_nextn_predict_layers"
TOKENS: Final = ("bos_token_id", "eos_token_id")


# Why a run with an adapter has no whole model to export, and what to do.
ADAPTER_ALONE: Final = (
    "the run trains an adapter, and its checkpoints hold that without the model under it",
    "`xtrain export --adapter` and `export { adapter = true }` write the adapter for PEFT; `xtrain merge` adds it to "
    "the model and writes that as a whole",
)


def not_written(arch: Architecture) -> tuple[str, str] | None:
    """(why, what to do) if transformers has no model that computes what this one does; else None."""
    if arch.adapter is not None:
        return ADAPTER_ALONE
    family = None if "user" in arch.own else FAMILIES.get(arch.family)
    if family is None or family.config is None or family.stored is None:
        known = ", ".join(name for name, each in FAMILIES.items() if each.config is not None)
        message = f"a model of the family {arch.family} has no form that transformers reads"
        return message, f"families that have one: {known}"
    for setting, value in family.config.constant.items():
        if (ours := _value(arch, setting)) != value:
            message = f"`{setting}` is {json.dumps(ours)}, and in a {family.config.model_type} of transformers it is "
            return f"{message}{json.dumps(value)}", "no config.json says otherwise"
    if family.config.heads_divide and arch.dim % arch.heads:
        what = f"dim {arch.dim} is no multiple of heads {arch.heads}"
        return f"{what}, which transformers wants of a {family.config.model_type}", "use heads that divide dim"
    if unknown := [each.name for each in buffers(arch) if not each.name.endswith(family.stored.buffers)]:
        message = f"a {family.config.model_type} of transformers has no `{unknown[0]}`, of `router.bias_speed`"
        return message, "train without `router { bias_speed }`"
    return None


@frozen(kw_only=True)
class ConfigValues:
    """What an architecture does not say. format: of most weights. context: positions of a row. begin, end: the ids that
    begin and end a document."""

    format: str
    context: int
    begin: int
    end: int


def _rewards(arch: Architecture, values: ConfigValues, pad: int | None = None) -> dict[str, Any]:
    """The keys that say that the head gives rewards. They are read at the last token that is not the one of padding,
    `pad`, which so must not be one that ends texts; in its place then the one that begins them."""
    if arch.head == "vocabulary":
        return {}
    if pad in (None, values.end):
        pad = values.begin if values.begin != values.end else None
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [_config(arch).classifier], **labels, "pad_token_id": pad}


def _further(arch: Architecture) -> dict[str, Any]:
    """How many modules that predict further tokens the folder has, of a family whose files may have some."""
    stored = FAMILIES[arch.family].stored
    return {FURTHER: arch.mtp} if arch.mtp and stored is not None and stored.further_tokens else {}


def new_config(arch: Architecture, values: ConfigValues) -> dict[str, Any]:
    """All keys, in the spelling that version 4 and version 5 of transformers read."""
    further = _further(arch)
    arch = arch.core
    config = _config(arch)
    found = {
        "architectures": [config.architectures[0]],
        "model_type": config.model_type,
        **dict(zip(TOKENS, (values.begin, values.end), strict=True)),
        "pad_token_id": None,  # that of some classes of transformers is beyond a small vocabulary
        **{name: value for key in config.keys for name, value in _written(arch, key, key.name).items()},
        **_rope(arch),
        CONTEXT: _context(arch, values.context),
        **{name: only.values[0] for name, only in config.only.items() if only.values},
        "torch_dtype": DTYPES[values.format],
        "use_cache": True,
        **further,
        **_rewards(arch, values),
    }
    unread = {key.name for key in config.keys if key.when is not None and not key.when(found)}
    return {name: value for name, value in found.items() if name not in unread}


def changed_config(
    arch: Architecture, values: ConfigValues, config: Mapping[str, Any], means: Mapping[str, Any]
) -> dict[str, Any]:
    """The `config.json` that a model began with, in which only what is no longer so has changed; where it was that of a
    model of which this one is a part, that of the part.

    means: the settings that it gives, by `settings_in_folder`.
    """
    further = _further(arch)
    arch = arch.core
    config = _own_config(_config(arch), config)
    found = dict(config)
    for key in _config(arch).keys:
        if (key.when is None or key.when(config)) and means.get(key.setting) != _value(arch, key.setting):
            found |= _written(arch, key, next((name for name in key.names if name in config), key.name))
    same = all(means.get(key.setting) == _value(arch, key.setting) for key in _config(arch).rope_keys)
    if means.get("rope_theta") != arch.rope_theta or _scaling(means) != arch.rope.resolved() or not same:
        found = {name: value for name, value in found.items() if name not in ROPE} | _rope(arch)
        # Some classes of transformers scale positions only of heads whose width is written.
        width = (key for key in _config(arch).keys if key.setting == "head_dim" and config.get(key.name) is None)
        found |= {name: value for key in width for name, value in _written(arch, key, key.name).items()}
    context, needed = config.get(CONTEXT), _context(arch, values.context)
    if arch.rope.scaling == "dynamic" or (isinstance(context, int) and context < needed):
        found[CONTEXT] = needed
    dtype = "dtype" if "dtype" in config else "torch_dtype"
    if config.get(dtype) != DTYPES[values.format]:
        found[dtype] = DTYPES[values.format]
    found |= further
    found |= _rewards(arch, values, config.get("pad_token_id"))
    return with_tokens(found, values.begin, [values.end])


def _own_config(family: ModelConfig, config: Mapping[str, Any]) -> Mapping[str, Any]:
    whole = family.whole
    if whole is None or config.get("model_type") != whole.model_type:
        return config
    names = {"architectures": [family.architectures[0]], "model_type": family.model_type}
    part = {name: value for name, value in config[whole.part].items() if name not in whole.replaces}
    return {**{name: config[name] for name in config if name in family.harmless}, **part, **names} | {
        name: config[name] for name in whole.replaces if name in config
    }


def with_tokens(config: Mapping[str, Any], begin: int, ends: Sequence[int]) -> dict[str, Any]:
    """A config whose ids are those that a text begins and ends with here.

    Other ids that end one stay beside them, unless they are of another tokenizer, as none of them is one of these; and
    so does an id that begins one where the tokenizer has none, which `begin` then takes from the end.
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
    """The settings of a model of which a `config.json` says something else, with what that is."""
    arch = arch.core
    config = _config(arch)
    keys = {key.setting: key for key in (*config.keys, *config.rope_keys)}
    known = keys.keys() | config.constant.keys() | {"rope_theta"}
    known |= {config.local_rope.setting} if config.local_rope is not None else set()
    pairs = {setting: (means[setting], _value(arch, setting)) for setting in means if setting in known}
    pairs["rope"] = _scaling(means), arch.rope.resolved()

    def same(setting: str, theirs: Any, ours: Any) -> bool:
        if theirs == ours or setting not in keys:
            return theirs == ours
        # Numbers of blocks in another order, or of blocks that none differs from, are the same keys.
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


def _rope(arch: Architecture) -> dict[str, Any]:
    scaled, config = dict(arch.rope.resolved()), _config(arch)
    local = config.local_rope
    bases = {"rope_theta": arch.rope_theta} | ({local.key: _value(arch, local.setting)} if local is not None else {})
    if not scaled:  # which some classes of transformers only do where they are told to
        return {**bases, "rope_scaling": {"rope_type": "default"} if config.rope else None}
    kind = scaled.pop("scaling")
    if kind == "dynamic":  # its `original` is the context
        scaled.pop("original")
    found = {"rope_type": kind, **{ROPE_KEYS[name]: value for name, value in scaled.items()}}
    found |= {key.name: value for key in _config(arch).rope_keys if (value := _value(arch, key.setting)) != key.default}
    return {**bases, "rope_scaling": found}


def _scaling(means: Mapping[str, Any]) -> dict[str, Any]:
    """`Rope.resolved` of the settings that a `config.json` gives."""
    given = {name.removeprefix("rope."): value for name, value in means.items() if name.startswith("rope.")}
    return Rope(**given).resolved()


def _context(arch: Architecture, rows: int) -> int:
    """Positions that the model is made for, of rows so long: those that they are scaled to, if they are."""
    rope = arch.rope
    if rope.scaling == "dynamic":
        return rope.original
    return max(rows, int(rope.original * rope.factor))


def _value(arch: Architecture, setting: str) -> Any:
    """The value of a setting as JSON. Of its default, where the setting was added later, an architecture is silent."""
    values, name = arch.to_json(), _field(setting)
    if name in values:
        return values[name]
    default = settings_of(FAMILIES[arch.family])[setting][0].default
    return list(default) if isinstance(default, tuple) else default


def _written(arch: Architecture, key: ConfigKey, name: str) -> Mapping[str, Any]:
    """A key, which has this name, with its value; or those that its setting follows from."""
    content = _content(key, _value(arch, key.setting), arch.to_json())
    return content if key.writes is not None else {name: content}


def _content(key: ConfigKey, value: Any, settings: Mapping[str, Any]) -> Any:
    """What a key is written as; the keys, with what they are written as, of a setting that takes several."""
    if key.writes is not None:
        return key.writes(settings)
    return value if key.write is None else key.write(value, settings["layers"])


def _field(setting: str) -> str:
    """Of an architecture, that has settings of `router { … }` beside the others."""
    return setting.replace(".", "_")
