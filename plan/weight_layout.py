"""Model folders of transformers: parameters assigned to stored tensors, files to write, and `config.json`."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, Final

from attrs import evolve

from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.model_config import (
    AUTO_MAP,
    CONTEXT,
    ORIGINAL,
    PARTIAL,
    QUANTISATION,
    ROPE_KEYS,
    ConfigKey,
    ModelConfig,
    Rope,
)
from xtrain.dsl.schema.setting import settings_of
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, ParameterSpec, buffers, parameters
from xtrain.plan.weight_files import (
    EMBEDDING_WEIGHT,
    HEAD_WEIGHT,
    LOADED,
    SCORE_WEIGHT,
    SINGLE,
    SIZES,
    StoredPart,
    StoredTensor,
    WeightFiles,
    header_of,
    known_names,
    stored_names,
)

EMBEDDING_STORED = f"model.{EMBEDDING_WEIGHT}"


def has_rewards(arch: Architecture, files: WeightFiles) -> bool:
    """Return True if the folder has a reward head."""
    return SCORE_WEIGHT in stored_names(arch).own_names(files.tensors)


def draws_head(arch: Architecture, files: WeightFiles) -> bool:
    """Return True if the model has a reward head and its folder (of a language model) does not."""
    return not arch.has_logits and not has_rewards(arch, files)


@frozen
class Assignment:
    """Sources of a model's parameters. parts: parameter or buffer → the parts of stored tensors that it is read from,
    without a reward head that the folder lacks. twin: the stored head of a tied model, which must equal the
    embedding; empty if there is none."""

    parts: dict[str, tuple[StoredPart, ...]]
    twin: str = ""


def stored_rows(arch: Architecture, files: WeightFiles) -> int:
    """Return how many rows of a model's embedding a folder has; all of them if it has no embedding."""
    names = stored_names(arch)
    stored = files.tensors.get(names.own_names(files.tensors).get(EMBEDDING_STORED, ""))
    return min(arch.vocab, stored.shape[0]) if stored is not None and stored.shape else arch.vocab


def assign(arch: Architecture, files: WeightFiles, *, grows: bool = False) -> Assignment:
    """Return the source of every parameter that files of the family have. Raises ValueError, whose text names the
    fault, if the folder does not fit.

    grows: the model's embedding and head may have more rows than the files.
    """
    names = stored_names(arch)
    arch = names.stored_part(arch)
    arch = evolve(arch, vocab=stored_rows(arch, files)) if grows else arch
    own = names.own_names(files.tensors)
    found: dict[str, tuple[StoredPart, ...]] = {}
    missing: list[str] = []
    for parameter in (*parameters(arch.base), *(each for each in buffers(arch) if each.name.endswith(names.buffers))):
        ways = names.of(parameter)
        chosen = next((parts for parts in ways if all(part.name in own for part in parts)), None)
        if chosen is None and parameter.name == SCORE_WEIGHT:
            continue
        if chosen is None:  # a tensor with several parts is listed once
            missing += [part.name for part in ways[0] if part.name not in own and part.name not in missing]
        else:
            found[parameter.name] = tuple(_as_stored(part, own) for part in chosen)
    used = {part.name: part.shape for parts in found.values() for part in parts}
    twin = own.get(HEAD_WEIGHT, "") if arch.tie_embeddings else ""
    if twin and EMBEDDING_WEIGHT in found:
        used[twin] = found[EMBEDDING_WEIGHT][0].shape
    unused = {own[HEAD_WEIGHT]} if not arch.has_logits and HEAD_WEIGHT in own else set[str]()
    surplus = [
        name
        for name in files.tensors
        if name not in used and name not in unused and not names.is_ignored(name, arch, files.tensors)
    ]
    if problems := wrong_tensors(files, used, missing, surplus):
        raise ValueError("; ".join(problems))
    return Assignment(found, twin)


def wrong_tensors(
    files: WeightFiles, used: Mapping[str, tuple[int, ...]], missing: Sequence[str], surplus: Sequence[str]
) -> list[str]:
    """Return the faults as texts. used: tensor → its shape in the model. missing: the used tensors that no file has;
    surplus: tensors that are not used."""
    placed = [f"`{name}` of {files.tensors[name].file}" for name in surplus]
    return [
        *_listed([f"`{name}`" for name in missing], "missing"),
        *_listed(placed, "not of this model"),
        *_mismatches({name: shape for name, shape in used.items() if name not in missing}, files),
    ]


def _as_stored(part: StoredPart, own: Mapping[str, str]) -> StoredPart:
    name = own[part.name]
    return part if name == part.name else evolve(part, name=name)


def _mismatches(used: Mapping[str, tuple[int, ...]], files: WeightFiles) -> Iterator[str]:
    """Yield texts on tensors of another shape than planned, or in a format that weights cannot have."""
    shapes = [name for name, shape in used.items() if files.tensors[name].shape != shape]
    if shapes:
        name = shapes[0]
        stored, planned = (" × ".join(map(str, each)) for each in (files.tensors[name].shape, used[name]))
        more = f", and {len(shapes) - 1:,} more have another shape" if len(shapes) > 1 else ""
        yield f"`{name}` is {stored} in {files.tensors[name].file} and {planned} in the model{more}"
    formats = [name for name in used if files.tensors[name].format not in LOADED]
    if formats:
        name = formats[0]
        more = f", and {len(formats) - 1:,} more" if len(formats) > 1 else ""
        stored = files.tensors[name]
        yield f"`{name}` is stored as {stored.format} in {stored.file}, which is not a weight format{more}"


def _listed(names: Sequence[str], what: str) -> Iterator[str]:
    if names:
        shown = ", ".join(names[:3])
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        yield f"{shown}{more} {'is' if len(names) == 1 else 'are'} {what}"


@frozen
class WrittenTensor:
    """Tensor of a file: a parameter, one expert of it, or several parameters of one number format. parts: parameter →
    its part in the tensor. format: its safetensors name. copied: the tensor of another folder whose bytes it has."""

    parts: tuple[tuple[str, StoredPart], ...]
    format: str
    copied: StoredTensor | None = None

    @property
    def name(self) -> str:
        return self.parts[0][1].name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0][1].shape

    @property
    def bytes(self) -> int:
        return prod(self.shape) * SIZES[self.format]


@frozen
class WrittenFile:
    """File to write. tensors: in the order of their data."""

    name: str
    tensors: tuple[WrittenTensor, ...]

    @property
    def header(self) -> bytes:
        return header_of((tensor.name, tensor.format, tensor.shape) for tensor in self.tensors)

    @property
    def bytes(self) -> int:
        """Bytes of its data."""
        return sum(tensor.bytes for tensor in self.tensors)


# Format of the n-th tensor that a parameter is written as.
FormatOf = Callable[[ParameterSpec, int], str]


def lay_out(
    arch: Architecture, format_of: FormatOf, most: int, copied: Mapping[str, StoredTensor] = MappingProxyType({})
) -> tuple[WrittenFile, ...]:
    """Return the files of a model, tensors in the order of its parameters and then the copied ones, with at most `most`
    bytes in each; a larger tensor gets a file of its own."""
    others = (
        WrittenTensor(((name, StoredPart(name, tensor.shape)),), tensor.format, tensor)
        for name, tensor in copied.items()
    )
    return in_files((*_tensors(arch, format_of), *others), most)


def in_files(tensors: Iterable[WrittenTensor], most: int) -> tuple[WrittenFile, ...]:
    """Return tensors grouped into files, in this order."""
    groups: list[list[WrittenTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.bytes > most:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.bytes
    count = len(groups)
    stem, _, ending = SINGLE.rpartition(".")
    names = [SINGLE] if count == 1 else [f"{stem}-{n:05d}-of-{count:05d}.{ending}" for n in range(1, count + 1)]
    # Wider numbers come first, so that each is aligned to its size.
    ordered = (sorted(group, key=lambda tensor: -SIZES[tensor.format]) for group in groups)
    return tuple(WrittenFile(name, tuple(group)) for name, group in zip(names, ordered, strict=True))


def _tensors(arch: Architecture, format_of: FormatOf) -> Iterator[WrittenTensor]:
    """Yield tensors in the order of their first parameters."""
    names = stored_names(arch)
    parts: dict[str, list[tuple[str, StoredPart]]] = {}
    formats: dict[str, str] = {}
    arch = names.stored_part(arch)
    copied: dict[str, list[str]] = {}
    for name, parameter in names.copies(arch):
        copied.setdefault(parameter, []).append(name)
    for parameter in (*parameters(arch), *buffers(arch)):
        for number, part in enumerate(names.of(parameter)[0]):
            parts.setdefault(part.name, []).append((parameter.name, part))
            formats[part.name] = format_of(parameter, number)
            for name in copied.get(parameter.name, ()):
                parts[name] = [(parameter.name, evolve(part, name=name))]
                formats[name] = formats[part.name]
    for name, each in parts.items():
        yield WrittenTensor(tuple(each), formats[name])


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
    unread = {key.name for key in config.keys if key.when is not None and not key.when(found)}
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
    """Return the keys of scaled positions. scaled: as `Rope.resolved` gives it."""
    kind = scaled.pop("scaling", "default")
    if kind == "dynamic":  # its `original` is the context
        scaled.pop("original")
    found = {"rope_type": kind, **{ROPE_KEYS[name]: value for name, value in scaled.items()}}
    config = _config(arch)
    own = {key: _value(arch, key.setting) for key in config.rope_keys}
    more = {key.name: value for key, value in own.items() if value != key.default or config.rope_always}
    return found | more


def _scaling(means: Mapping[str, Any]) -> dict[str, Any]:
    """Return `Rope.resolved` of the settings that a `config.json` gives."""
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
