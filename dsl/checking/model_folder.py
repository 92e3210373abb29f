"""`model "folder" { … }`: the `config.json` of a folder provides the settings that are not written.

Each is a value with a place in that file, as if the file were included; written settings must agree with it.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from xtrain.dsl.checking.config_json import (
    CONFIG,
    ConfigEntry,
    ConfigUnreadable,
    SnapshotMissing,
    family_of,
    find_snapshot,
    refuse_unknown,
    short_json,
)
from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SourceText, Span
from xtrain.dsl.evaluation.statements import Label, Section, SectionEntry
from xtrain.dsl.evaluation.values import FAILED, Called, Items, Value, ValueStep, Word, is_number
from xtrain.dsl.schema.data_components import TOKENIZERS, Tokenizer
from xtrain.dsl.schema.model import FAMILIES, Model, ModelFolder, snapshot_text
from xtrain.dsl.schema.model_config import (
    CONTEXT,
    PARTIAL,
    REFUSED,
    USUAL,
    ConfigKey,
    LocalRope,
    ModelConfig,
    WrongKey,
    is_metadata,
)
from xtrain.dsl.schema.rope import ORIGINAL, ROPE_KEYS, ROPE_NEEDED, ROPE_SCALINGS, ROPE_WEIGHTS, Rope, yarn_magnitude
from xtrain.dsl.schema.setting import AUTO, resuming_of
from xtrain.lazy_attrs import frozen

# Settings that may differ from the file: future training, and initialization of weights.
FREE: Final = ("loss", "elsewhere")
ROPE: Final = ("rope_parameters", "rope_scaling")
MORE_ROWS: Final = {"vocab": "; `vocab = tokenizer` adds rows for further ids of the tokenizer"}


def folder_of(section: Section, diagnostics: Diagnostics) -> ModelFolder | None:
    """If the label of `model` names a folder, fill the section from its `config.json`.

    Mistakes are reported. Returns None if the label names a family or if the folder is unreadable; the label then needs
    no further errors.
    """
    label = section.labels[0].value if len(section.labels) == 1 else None
    if label is None or not isinstance(label.data, str | Called) or _is_family(label.data):
        return None
    try:
        folder = _located(label, diagnostics)
        chosen = FAMILIES.unlisted if "code" in section.entries else ""
        found = None if folder is None else family_of(folder, label.span, diagnostics, chosen)
    except ConfigUnreadable as problem:
        diagnostics.error("X520", str(problem), label.span, hint=problem.hint, notes=label.notes)
        folder = found = None
    if found is None:
        return _without_family(section, label)
    family, source, entries = found
    section.labels = [Label(Value(Word(family), label.span))]
    reading = _Reading(FAMILIES[family], entries, source, section, diagnostics)
    if family != FAMILIES.unlisted:
        reading.fill()
        return folder
    from xtrain.dsl.checking.model_code import CodeUnusable, describe

    try:
        remote = folder.path if folder is not None and _is_remote(section) else ""
        reading.take(describe({name: entry.value for name, entry in entries.items()}, remote))
    except CodeUnusable as problem:
        diagnostics.error("X529", f"{source.path}: {problem}", entries["model_type"].span, hint=problem.hint)
        return _without_family(section, label)
    return folder


def _without_family(section: Section, label: Value) -> None:
    """Mark a section whose family is unknown; its other settings need no errors."""
    section.labels, section.broken = [Label(Value(FAILED, label.span))], True
    section.entries.pop("code", None)  # which only the family of all other types has


def _is_remote(section: Section) -> bool:
    """Return True if the section chooses the modeling files of the folder."""
    chosen = section.entries["code"].value.data if "code" in section.entries else ""
    return (chosen.text if isinstance(chosen, Word) else chosen) == "remote"


def settings_in_folder(folder: str, *, code: str = "") -> tuple[dict[str, Any], Diagnostics]:
    """Return the settings of a model that the `config.json` of a folder determines (of a nested block as
    `router.normalise`), and its diagnostics. code: whose code computes it, whatever its type; empty: by its type."""
    section, diagnostics = _section_of(folder, code)
    if diagnostics.has_errors:
        return {}, diagnostics
    found = {name: entry.value.data for name, entry in section.entries.items()}
    for kind, block in section.blocks.items():
        found |= {f"{kind}.{name}": entry.value.data for name, entry in block.entries.items()}
    lists = {name: [each.data for each in items.values] for name, items in found.items() if isinstance(items, Items)}
    return found | lists, diagnostics


def family_in_folder(folder: str) -> str | None:
    """Return the family of the model in a folder; None if the folder is invalid."""
    section, diagnostics = _section_of(folder)
    return None if diagnostics.has_errors else section.labels[0].value.data.text


def _section_of(folder: str, code: str = "") -> tuple[Section, Diagnostics]:
    """Return a section `model` filled from the `config.json` of a folder, and its diagnostics."""
    section, diagnostics = Section("model"), Diagnostics()
    path = str(Path(folder).absolute())
    span = Span(SourceText(folder, path), 0, len(path))
    section.labels = [Label(Value(path, span))]
    if code:
        section.entries["code"] = SectionEntry(span, Value(Word(code), span))
    folder_of(section, diagnostics)
    return section, diagnostics


def _is_family(label: str | Called) -> bool:
    """Return True if a quoted label means a family: there is no model folder of that name."""
    return isinstance(label, str) and label in FAMILIES and not (Path(label) / CONFIG).is_file()


def _located(label: Value, diagnostics: Diagnostics) -> ModelFolder | None:
    """Return the folder that a label means; None after reporting an invalid call."""
    if isinstance(label.data, str):
        if label.data in FAMILIES:
            message = f"`{label.data}` is both a family and a folder with a {CONFIG}"
            hint = f'write {label.data} without quotes, or "./{label.data}" for the folder'
            raise ConfigUnreadable(message, hint)
        path = os.path.normpath(label.data).replace(os.sep, "/")
        return ModelFolder(path=f"./{path}" if path in FAMILIES else path)  # the name alone would mean the family
    found = _snapshot(label, label.data, "model", "a family", diagnostics)
    return None if found is None else ModelFolder(*found)


def _snapshot(
    label: Value, call: Called, what: str, other: str, diagnostics: Diagnostics
) -> tuple[str, str, str] | None:
    """Return (folder, repository, commit) of `hub(…)`; None after reporting an invalid call. Raises
    ConfigUnreadable."""
    given = {name: value.data for name, (_, value) in call.keywords.items()}
    repo = call.positional[0].data if len(call.positional) == 1 else None
    if call.name != "hub" or not isinstance(repo, str) or given.keys() - {"revision"}:
        hint = f'a {what} is {other}, "folder", or hub("organisation/name", revision = "…")'
        diagnostics.error("X220", f"`{call.name}` with these arguments does not name a {what}", label.span, hint=hint)
        return None
    revision = given.get("revision", "main")
    if not isinstance(revision, str):
        diagnostics.error(
            "X220", ("`revision` must be a text"), call.keywords["revision"][1].span, hint='revision = "main"'
        )
        return None
    try:
        path, commit = find_snapshot(repo, revision)
    except SnapshotMissing as problem:
        raise ConfigUnreadable(str(problem), problem.hint) from problem
    return path, repo, commit


def locate_tokenizer(section: Section, diagnostics: Diagnostics) -> None:
    """Replace the label `hub(…)` of `tokenizer` by the text of the exact snapshot. Mistakes are reported."""
    label = section.labels[0].value if len(section.labels) == 1 else None
    if label is None or not isinstance(label.data, Called):
        return
    try:
        found = _snapshot(label, label.data, "tokenizer", "bytes", diagnostics)
    except ConfigUnreadable as problem:
        message = f"the tokenizer cannot be read: {problem}"
        diagnostics.error("X505", message, label.span, hint=problem.hint, notes=label.notes)
        found = None
    section.labels = [Label(Value(FAILED if found is None else snapshot_text(*found[1:]), label.span, label.via))]


def tokenizer_of(model: ModelFolder) -> Tokenizer:
    """Return the tokenizer in the folder of a model."""
    if model.repo:
        return Tokenizer(snapshot_text(model.repo, model.revision))
    is_name = model.path.isidentifier() and model.path in TOKENIZERS
    return Tokenizer(f"./{model.path}" if is_name else model.path)


@frozen
class _Reading:
    """A reading of one file as a family's config into the section of a spec."""

    family: type[Model]
    entries: Mapping[str, ConfigEntry]
    source: SourceText
    section: Section
    diagnostics: Diagnostics

    @property
    def config(self) -> ModelConfig:
        assert self.family.config is not None
        return self.family.config

    def fill(self) -> None:
        config = self.config
        for key in config.keys:
            self._give(key)
        theta = self._rope()
        self._set("rope_theta", theta.value if theta else config.rope_theta, theta, "rope_theta")
        for setting, value in config.constant.items():
            self._set(setting, value, None, "model_type")
        understood = {name for key in config.keys for name in key.names} | {"rope_theta", *ROPE}
        if config.original:
            understood.add(ORIGINAL)
        if config.local_rope is not None:
            self._local_rope(config.local_rope)
            understood.add(config.local_rope.key)
        for name, entry in self.entries.items():
            if name in understood or is_metadata(name, config.harmless):
                continue
            only = config.only.get(name, USUAL.get(name))
            if only is not None and not only(entry.value):
                self._refuse(name, entry, only.words or " or ".join(map(json.dumps, only.values)))
            elif only is None and entry.value is not None:
                self._unknown(name, entry)

    def take(self, described: Mapping[str, Any]) -> None:
        """Set the sizes of a model that transformers' code computes."""
        for setting in ("dim", "layers", "heads", "kv_heads", "vocab", "tie_embeddings"):
            self._set(setting, described[setting], None, "config.json")

    def _give(self, key: ConfigKey) -> None:
        """Take over one setting, from the first of its keys in the file."""
        name = next((name for name in key.names if name in self.entries), key.name)
        entry = self.entries.get(name)
        other = next((self.entries[each] for each in key.names if each in self.entries and each != name), None)
        if entry is not None and other is not None and entry.value != other.value:
            message = (
                f"{' and '.join(f'`{each}`' for each in key.names)} of {self.source.path} set the same thing to "
                "different values"
            )
            self.diagnostics.error("X522", message, entry.span, hint="keep the intended one")
        config = {name: entry.value for name, entry in self.entries.items()}
        if key.when is not None and not key.when(config):
            return
        value = key.default if entry is None else key.null if entry.value is None else entry.value
        if key.computed is not None:
            value = key.computed(config)
            if isinstance(value, WrongKey):
                self.section.lost.add(key.setting)
                self._refuse(value.name, self.entries.get(value.name), value.wanted)
                return
        elif key.read is not None and entry is not None and entry.value is not None:
            value = key.read(value)
            if value is REFUSED:
                self.section.lost.add(key.setting)
                self._refuse(name, entry, key.words)
                return
        elif callable(value):
            value = value(config)
            if value is None:  # its inputs are invalid, and reported
                self.section.lost.add(key.setting)
                return
        if value is REFUSED:
            setting = key.setting.rpartition(".")[2]
            self.section.lost.add(setting)
            place = entry.span if entry is not None else self.source.span(0, 1)
            message = f"{self.source.path} has no `{name}`" if entry is None else f"`{name}` is null"
            self.diagnostics.error("X522", message, place, hint=f"it is the `{setting}` of the model")
            return
        self._set(key.setting, value, entry, name)

    def _rope(self) -> ConfigEntry | None:
        """Return the entry with the base of the frequencies, which version 5 of transformers has in `rope_parameters`.
        Take over the scaling settings unless the spec has its own."""
        found = outer = self.entries.get("rope_theta")
        scaled: tuple[dict[str, Any], dict[str, Any]] | None = None
        beside: dict[str, tuple[Any, ConfigEntry | None, str]] = {}
        # An empty `rope_scaling` counts as absent, an empty `rope_parameters` as no scaling.
        given = {name: each for name in ROPE if (each := self.entries.get(name)) and each.value is not None}
        given = {name: each for name, each in given.items() if (name, each.value) != ("rope_scaling", {})}
        given = given or {ROPE[0]: ConfigEntry(self.config.rope, self.entries["model_type"].span)}
        for name, entry in given.items():
            if not isinstance(entry.value, Mapping):
                self._refuse(name, entry, "an object or null")
                continue
            inside = dict(entry.value)
            local = self.config.local_rope
            if local is not None and name == ROPE[0]:
                if (part := self._of_layers(local.full, entry, local)) is None:
                    continue
                inside = part
            more = {key.setting: inside.get(key.name) for key in self.config.rope_keys}
            beside |= {setting: (value, entry, name) for setting, value in more.items() if value is not None}
            if (theta := inside.pop("rope_theta", None)) is not None:
                if found is not None and found.value not in (None, theta):
                    message = f"`rope_theta` is {short_json(theta)} in `{name}` of {self.source.path}, and elsewhere "
                    hint = "keep the intended one"
                    self.diagnostics.error("X522", f"{message}{short_json(found.value)}", entry.span, hint=hint)
                found = ConfigEntry(theta, entry.span)
            elif name == ROPE[1] and local is None and entry.value and (outer is None or outer.value is None):
                self._check_replaced(found)
            if inside.get(PARTIAL) == 1 or any(key.name == PARTIAL for key in self.config.keys):
                inside.pop(PARTIAL, None)
            if local is not None and name == ROPE[1] and self._lacks_type(inside):
                hint = "write it as `rope_type`, or remove the scaling"
                message = (
                    f"`{name}` of {self.source.path} has the key `type` but no `rope_type`, and for a "
                    f"{self._model} transformers"
                )
                self.diagnostics.error("X522", f"{message} ignores `type`: nothing is scaled", entry.span, hint=hint)
                continue
            settings = self._scaling(name, entry, inside)
            if settings is None:
                continue
            if scaled is not None and (settings, more) != scaled:
                message = f"`{ROPE[0]}` and `{ROPE[1]}` of {self.source.path} scale positions differently"
                self.diagnostics.error("X522", message, entry.span, hint="keep the intended one")
                continue
            scaled = settings, more
            written = "rope" in self.section.blocks and self.section.block("rope").heads
            if settings["scaling"] != "none" and not written:
                for setting, value in settings.items():
                    self._set(f"rope.{setting}", value, self.entries.get(name), name)
        for key in self.config.rope_keys:
            self._set(key.setting, *beside.get(key.setting, (key.default, None, key.name)))
        return found

    @staticmethod
    def _lacks_type(scaling: Mapping[str, Any]) -> bool:
        """Return True if only the older key of a scaling gives its type. If layers have rotary positions of their own,
        version 5 of transformers merges it into an object that has `rope_type`
        (`Gemma3TextConfig.convert_rope_params_to_dict`)."""
        return scaling.get("rope_type") is None and scaling.get("type") not in (None, "default")

    def _of_layers(self, kind: str, entry: ConfigEntry, local: LocalRope) -> dict[str, Any] | None:
        """Return the part of `rope_parameters` for layers of one type; None after reporting an invalid value."""
        kinds = (local.full, local.local)
        objects = isinstance(entry.value, dict) and all(isinstance(each, dict | None) for each in entry.value.values())
        if not objects or entry.value.keys() - set(kinds):
            self._refuse(ROPE[0], entry, f"an object with one object for {kinds[0]} and one for {kinds[1]}")
            return None
        return dict(entry.value.get(kind) or {})

    def _local_rope(self, local: LocalRope) -> None:
        """Take over the base of the frequencies of layers with a window."""
        found = self.entries.get(local.key)
        entry = self.entries.get(ROPE[0])
        if entry is not None and entry.value is not None:
            if (inside := self._of_layers(local.local, entry, local)) is None:
                return
            theta = inside.pop("rope_theta", None)
            if theta is not None and found is not None and found.value != theta:
                message = (
                    f"`rope_theta` of {local.local} is {short_json(theta)} in `{ROPE[0]}` of {self.source.path}, and "
                )
                message += f"`{local.key}` is {short_json(found.value)}"
                self.diagnostics.error("X522", message, found.span, hint="keep the intended one")
            harmless = {"rope_type": "default", "type": "default", PARTIAL: 1}
            if any(value is not None and harmless.get(name) != value for name, value in inside.items()):
                part = ConfigEntry(entry.value[local.local], entry.span)
                self._refuse(f"{ROPE[0]}.{local.local}", part, "of type default, with only a base")
            found = ConfigEntry(theta, entry.span) if theta is not None else found
        self._set(local.setting, local.default if found is None else found.value, found, local.key)

    def _scaling(self, name: str, entry: ConfigEntry, inside: dict[str, Any]) -> dict[str, Any] | None:
        """Return the settings of `rope` in one object; None after reporting a mistake. Keys that the scaling does not
        read are refused, unless they are null."""

        def refuse(message: str, hint: str) -> None:
            text = f"`{name}` of {self.source.path} {message}"
            self.diagnostics.error("X522", text, entry.span, hint=hint)

        # Classes that read another share of each head rotate all of it if positions are proportional.
        shared = any(key.name == PARTIAL for key in self.config.keys)
        others = {each: each for each in ROPE_SCALINGS if each != "none" and not (shared and each == "proportional")}
        words = {"default": "none", **others}
        if self.config.original:
            words = {"default": "none", **dict.fromkeys(("longrope", "su", "yarn"), "longrope")}
        kinds = [each for key in ("rope_type", "type") if (each := inside.pop(key, None)) is not None]
        if wrong := [each for each in kinds if not isinstance(each, str) or each not in words or each != kinds[0]]:
            self._refuse(f"{name}.rope_type", ConfigEntry(wrong[-1], entry.span), f"one of {', '.join(words)}")
            return None
        kind = words[kinds[0]] if kinds else "none"
        context = self.entries.get(CONTEXT)
        found: dict[str, Any] = {"scaling": kind}
        good = True
        for setting in Rope(scaling=kind).reads:  # type: ignore[arg-type]
            if setting == "divisors":
                continue
            key = ROPE_KEYS[setting]
            value = inside.pop(key, None) if (setting, kind) != ("original", "dynamic") else None
            if setting == "original" and self.config.original:
                outer = self.entries.get(ORIGINAL)
                whole = self.config.original if outer is None else outer.value
                if value not in (None, whole):
                    hint = "correct one of them"
                    refuse(f"has {short_json(value)} as `{key}`, and the model has {short_json(whole)}", hint)
                    good = False
                value = whole
            if setting == "original" and value is None:
                if context is None or not isinstance(context.value, int):
                    refuse(f"has no `{key}`, and `{CONTEXT}` is missing", f"add `{key}`")
                    good = False
                    continue
                value = context.value
            before: Any = found.get("original")
            if (setting, value, kind) == ("factor", None, "longrope") and is_number(before) and before > 0:
                after: Any = None if context is None else context.value
                value = max(1.0, after / before) if is_number(after) else None
            if setting == "attention_factor":
                weights = [inside.pop(each, None) for each in ROPE_WEIGHTS]
                numbers = [each for each in (*weights, found.get("factor")) if is_number(each) and each]
                if value is None and len(numbers) == 3:
                    value = yarn_magnitude(numbers[2], numbers[0]) / yarn_magnitude(numbers[2], numbers[1])
            if value is None and setting in ROPE_NEEDED and kind != "proportional":
                refuse(f"scales positions by {kind}, but has no `{key}`", f"add `{key}`")
                good = False
            elif value is not None:
                found[setting] = value
        for each, value in inside.items():
            if value is not None and each not in self.config.rope_harmless:
                self._unknown(f"{name}.{each}", ConfigEntry(value, entry.span))
                good = False
        before = found.get("original")
        if context is not None and is_number(before) and is_number(context.value) and before > context.value:
            refuse(f"scales positions from {before}, but `{CONTEXT}` is only {context.value}", "correct one of them")
            good = False
        return found if good else None

    def _check_replaced(self, base: ConfigEntry | None) -> None:
        """Refuse a base in `rope_parameters` that transformers would ignore: if `rope_scaling` is given too, it
        replaces `rope_parameters` and uses the default of the model type
        (`RotaryEmbeddingConfigMixin.convert_rope_params_to_dict`)."""
        default = self.config.rope_theta
        if base is not None and base.value not in (None, default):
            message = (
                f"`rope_theta` is {short_json(base.value)} in `rope_parameters` of {self.source.path}, and transformers"
            )
            message += f" ignores it if `rope_scaling` is present: it computes with {default:g}"
            hint = "add the intended base to `rope_scaling`, or remove `rope_scaling`"
            self.diagnostics.error("X522", message, base.span, hint=hint)

    def _set(self, setting: str, value: Any, entry: ConfigEntry | None, key: str) -> None:
        """Set a value that is not written, or compare it with the written one."""
        block, _, name = setting.rpartition(".")
        section = self.section if not block else self.section.block(block)
        span = entry.span if entry is not None else self.entries["model_type"].span
        default = key if self.family.config is None else f"the default of {self._model}"
        step = ValueStep("config", key if entry is not None else default, span)
        items = Items(tuple(Value(each, span) for each in value)) if isinstance(value, list) else value
        theirs = Value(items, span, (step,))
        written = section.entries.get(name)
        if written is None or written.value.data is AUTO:
            section.entries[name] = SectionEntry(span, theirs)
            return
        if setting == "vocab" and written.value.data == Word("tokenizer"):  # the planner knows the tokenizer's size
            return
        if resuming_of(self.family).get(setting.replace(".", "_")) in FREE or _agree(written.value, theirs):
            return
        says = f"`{key}` of {self.source.path} is" if entry is not None else f"with {self.source.path} it is"
        self.diagnostics.error(
            "X523", f"`{name}` is {written.value.span.text}, and {says} {json.dumps(value)}",
            written.value.span, hint="leave it out: the file says it" + MORE_ROWS.get(setting, ""),
            notes=((f"a {self._model} has {json.dumps(value)}", span), *written.value.notes),
        )  # fmt: skip
        section.entries[name] = SectionEntry(span, theirs)

    def _refuse(self, name: str, entry: ConfigEntry | None, wanted: str) -> None:
        if entry is None:
            message, entry = f"{self.source.path} has no `{name}`", self.entries["model_type"]
        else:
            value = f"`{name}` is {short_json(entry.value)} in {self.source.path}"
            message = f"{value}, but a {self._model} of xtrain computes something else"
        self.diagnostics.error("X522", message, entry.span, hint=f"it must be {wanted}")

    def _unknown(self, name: str, entry: ConfigEntry) -> None:
        refuse_unknown(name, entry, self.source, self.diagnostics)

    @property
    def _model(self) -> str:
        return self.entries["model_type"].value if self.family.config is None else self.family.config.model_type


def _agree(written: Value, theirs: Value) -> bool:
    """Return True if two values are equal, or of different types, which the conversion of the setting reports."""
    ours, other = written.data, theirs.data
    ours = ours.text if isinstance(ours, Word) else ours
    if isinstance(ours, Items) and isinstance(other, Items):
        return [each.data for each in ours.values] == [each.data for each in other.values]
    if ours is None or other is None:
        return ours is other
    same_kind = (is_number(ours) and is_number(other)) or type(ours) is type(other)
    return not same_kind or ours == other
