"""Conversion of a `Tree` into a typed `Spec`: every name known, every value of the right type, unit and range, or
reported."""

from collections.abc import Mapping
from typing import Any, get_args

import attrs

from xtrain.dsl.checking.context import Context, UnknownSettings, stand_in, stand_in_block, stand_in_of
from xtrain.dsl.checking.convert import convert
from xtrain.dsl.checking.model_folder import folder_of, locate_tokenizer, tokenizer_of
from xtrain.dsl.checking.name_errors import NameErrors, label_word
from xtrain.dsl.checking.triggers import structure_triggers
from xtrain.dsl.checking.user_parts import DeclaredParts, convert_argument
from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SourceText, Span
from xtrain.dsl.evaluation.evaluate import Definition, Evaluator
from xtrain.dsl.evaluation.statements import Label, Section, Tree
from xtrain.dsl.evaluation.values import FAILED, Items, Value, Word
from xtrain.dsl.evaluation.values import Mapping as MapOf
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.component import UserComponent, is_parameter, variant
from xtrain.dsl.schema.data_components import Tokenizer, usual_chain
from xtrain.dsl.schema.model import FAMILIES, Model
from xtrain.dsl.schema.run import Log
from xtrain.dsl.schema.setting import Setting, attributes_of, open_setting, rank_count, settings_of, spelled
from xtrain.dsl.spec import Origin, Spec
from xtrain.dsl.values import Dimension, Quantity

_MISSING = object()


class Structurer:
    """Builds the classes of the schema; `origins` grows along the way."""

    def __init__(self, evaluator: Evaluator, diagnostics: Diagnostics, constants: Mapping[str, Definition]) -> None:
        self.evaluator, self.diagnostics, self.constants = evaluator, diagnostics, constants
        self.origins: dict[str, Origin] = {}
        self.errors = NameErrors(diagnostics)
        self.unknown = UnknownSettings()
        self.serves = False
        self.parts = DeclaredParts()

    def spec(self, tree: Tree, path: str, source: SourceText | None) -> Spec:
        """Build the whole spec. Mistakes are reported, and `unknown` has the unreliable paths."""
        for item in tree.root.settled:
            self.errors.value_with_body(item)
            tree.root.entries.pop(item.name.text, None)
            tree.root.broken = True
        self.errors.top_level(tree)
        self.unknown.top_level(tree)
        self.serves = "serve" in tree.root.blocks
        if self.serves:
            self.errors.beside_server(tree)
        built: dict[str, Any] = {}
        for kind, block in blocks.KINDS.items():
            if kind in blocks.NAMED:
                continue
            section = tree.root.blocks.get(kind)
            if section is not None:
                built[kind] = self.block(block, section, kind)
            elif kind not in blocks.REQUIRED:
                built[kind] = self._default_block(block, kind)
        if "tokenizer" not in built and isinstance(built.get("model"), Model):
            self._tokenizer_of_model(built)
        absent = [kind for kind in blocks.REQUIRED if kind not in built]
        missing = [kind for kind in absent if not self.serves or blocks.is_of_servers(kind)]
        self.errors.missing_blocks(missing, tree, source)
        for kind in absent:
            if kind in missing:
                self.unknown.kind(kind)
            built[kind] = stand_in_block(blocks.KINDS[kind])
        for kind, field in blocks.NAMED.items():
            sections = tree.named.get(kind, {})
            built[field] = {
                label: self.block(blocks.KINDS[kind], section, f"{kind}.{label}") for label, section in sections.items()
            }
        self._collate(tree, built)
        ticks, events = structure_triggers(tree.triggers, self)
        given = {kind: value for kind, value in built.items() if value is not _MISSING}
        return Spec(path=path, ticks=ticks, events=events, origins=self.origins, **given)

    def _tokenizer_of_model(self, built: dict[str, Any]) -> None:
        """Take the tokenizer in the model's folder for a spec without `tokenizer`."""
        if (folder := built["model"].folder) is not None:
            built["tokenizer"] = tokenizer_of(folder)
        elif "model.folder" in self.unknown.paths:  # an unreadable folder, which is reported
            built["tokenizer"] = stand_in_block(Tokenizer)
            self.unknown.kind("tokenizer")
        else:
            return
        self.origins["tokenizer"] = self.origins["tokenizer.source"] = Origin("default")

    def _default_block(self, block: type, kind: str) -> Any:
        """Return the block of a kind that is not written: `_MISSING`, so that the default of `Spec` applies."""
        self.origins[kind] = Origin("default")
        if kind not in blocks.OPTIONAL:
            self._default_origins(block, kind)
        if self.unknown.unread:
            self.unknown.kind(kind)
        return _MISSING

    def _default_origins(self, block: type, path: str) -> None:
        for name, (attribute, _) in settings_of(variant(block, None)).items():
            self.origins[f"{path}.{name}"] = Origin("default")
            if blocks.is_block(attribute.type):
                self._default_origins(attribute.type, f"{path}.{name}")

    def _collate(self, tree: Tree, built: dict[str, Any]) -> None:
        entry = tree.root.entries.get("collate")
        if entry is None:
            self.origins["collate"] = Origin("default")
            trained = (each for each in built["datasets"].values() if each.holdout.fraction < 1)
            built["collate"] = usual_chain(conversations=any(each.has_answers for each in trained))
            return
        self.origins["collate"] = Origin.of(entry.value)
        attribute = attrs.fields_dict(Spec)["collate"]
        context = Context("collate", "the spec", Spec, Setting(doc="links from samples to rows"))
        found = convert(attribute.type, entry.value, context, self)
        if found is FAILED:
            self.unknown.kind("collate")
        built["collate"] = _MISSING if found is FAILED else found

    def leave_out(self, path: str) -> list[Any]:
        """Forget an invalid trigger or action, so that the next one can have its path."""
        for each in [each for each in self.origins if each == path or each.startswith(f"{path}.")]:
            del self.origins[each]
        self.unknown.forget(path)
        return []

    def convert(self, annotation: Any, value: Value, context: Context) -> Any:
        """Convert a value to the annotated type; return FAILED after reporting a mistake."""
        return convert(annotation, value, context, self)

    # Blocks -----------------------------------------------------------------------------------------------------------

    def block(self, block: type, section: Section, path: str, usual: Any = None) -> Any:
        """Build an object of a block class. A mistake in a field is reported and replaced by a stand-in.

        usual: the block without any written field.
        """
        block = self.parts.block(block, section)
        self.diagnostics.extend(section.repeated)
        if section.head is not None:
            self.origins[path] = Origin(_kind_of_head(section.head), section.head)
        arguments: dict[str, Any] = {}
        if block is Model and section.labels:
            self.origins[f"{path}.folder"] = Origin.of(section.labels[0].value)
            before = len(self.diagnostics)
            arguments["folder"] = folder_of(section, self.diagnostics)
            if len(self.diagnostics) > before:
                self.unknown.paths.add(f"{path}.folder")
        if block is Tokenizer:
            locate_tokenizer(section, self.diagnostics)
        self._settled(block, section)
        label = self._label(block, section, path, arguments)
        if label is FAILED and (issubclass(block, UserComponent) or self.parts.may_be_missing(block, section)):
            self.unknown.kind(path)
            return stand_in_block(block)  # its settings are unknown
        self._free_names(block, section, path, arguments)
        chosen = variant(block, label)
        # A component has its own bounds and defaults for a name that it shares with others.
        own = settings_of(chosen)
        if not (self.parts.unread and issubclass(block, Log)):  # unknown names may be declared there
            self.errors.unknown_fields(block, own, section)
        self.unknown.fields(block, own, section, path)
        missing: list[str] = []
        if label is FAILED:
            own = {}
        elsewhere = {} if own and section.written <= own.keys() else settings_of(block)
        for name, (attribute, meta) in {**elsewhere, **own}.items():
            where = f"{path}.{name}"
            written = name in section.entries or name in section.blocks
            if meta.only and label is not FAILED and label not in meta.only:
                if written:
                    self.errors.of_another_label(block, section, name, meta, label)
                    self.unknown.paths |= {where, f"{path}.{label_word(block)}"}
                continue
            is_block = blocks.is_block(attribute.type)
            if name in section.blocks and not is_block:
                self.errors.block_for_value(section.blocks[name], name, meta)
                arguments[attribute.name] = FAILED
                continue
            if is_block:
                arguments[attribute.name] = self._nested(attribute, section, name, where)
            elif name in section.entries:
                entry = section.entries[name]
                self.origins[where] = Origin.of(entry.value)
                self._entries(entry.value, where)
                context = Context(name, section.kind, block, meta)
                make = convert_argument if is_parameter(attribute) else convert
                arguments[attribute.name] = make(attribute.type, entry.value, context, self)
            elif attribute.default is attrs.NOTHING or (label is not FAILED and label in meta.required_by):
                if self.serves and not blocks.is_of_servers(where):
                    arguments[attribute.name] = stand_in(attribute, meta)
                    continue
                if name not in section.lost and where not in self.unknown.misspelt:
                    missing.append(name)
                arguments[attribute.name] = FAILED
            else:
                self.origins[where] = Origin("default")
        if missing and not section.broken:
            self.errors.missing_fields(block, section, missing)
        for attribute in attributes_of(chosen):
            if arguments.get(attribute.name) is FAILED:
                self.unknown.setting(f"{path}.{spelled(attribute)}", attribute)
                meta = attribute.metadata.get("setting")
                arguments[attribute.name] = stand_in(attribute, meta)
        has = attrs.fields_dict(chosen)
        given = {name: value for name, value in arguments.items() if value is not _MISSING and name in has}
        return chosen(**given) if usual is None else attrs.evolve(usual, **given)

    def _settled(self, block: type, section: Section) -> None:
        """Distribute values with a body; only words that name a nested block can have one."""
        known = settings_of(block) if section.settled else {}
        for item in section.settled:
            name, word = item.name.text, item.value.span.text
            if name in known and word in known and blocks.is_block(known[word][0].type):
                continue
            self.errors.value_with_body(item)
            section.lost.add(name)
            section.entries.pop(name, None)
            section.blocks.pop(word, None)

    def _free_names(self, block: type, section: Section, path: str, arguments: dict[str, Any]) -> None:
        """Collect the settings with free names, such as the weights of `mixture`, in one map."""
        free = open_setting(block)
        if free is None:
            return
        attribute, meta = free
        known, (_, kind) = settings_of(block), get_args(attribute.type)
        found: dict[str, Any] = {}
        for name, entry in section.entries.items():
            if name in known or (kind is Dimension and name not in section.varied):
                continue
            self._entry(name, entry.name_span, entry.value, path)
            value = convert(kind, entry.value, Context(name, section.kind, block, meta), self)
            if value is FAILED:
                self.unknown.paths.add(f"{path}.{name}")
            found[name] = stand_in_of(kind) if value is FAILED else value
        for name in section.blocks.keys() - known.keys() if kind is not Dimension else ():
            self.errors.block_for_value(section.blocks.pop(name), name, meta)
            self.unknown.paths.add(f"{path}.*")
        if section.broken or section.lost - known.keys():
            self.unknown.paths.add(f"{path}.*")
        arguments[attribute.name] = found

    def _entries(self, value: Value, path: str) -> None:
        """Record the origins of a list's elements, and of a map's names and values."""
        if isinstance(value.data, Items):
            for number, each in enumerate(value.data.values):
                self.origins[f"{path}.{number}"] = Origin.of(each)
        if isinstance(value.data, MapOf):
            for name, each in value.data.entries.items():
                self._entry(name, value.data.keys[name], each, path)

    def _entry(self, name: str, place: Span, value: Value, path: str) -> None:
        self.origins[f"{path}.{name}"] = Origin.of(value)
        self.origins[f"{path}.{name}.name"] = Origin(_kind_of_head(place), place)

    def _nested(self, attribute: attrs.Attribute, section: Section, name: str, path: str) -> Any:
        kind: Any = attribute.type
        if name in section.entries:
            self.errors.value_for_block(section.entries[name], name, kind)
            return FAILED
        if name not in section.blocks:
            self.origins[path] = Origin("default")
            label = blocks.label_of(kind)
            if label is not None:
                self.origins[f"{path}.{label.name}"] = Origin("default")
            self._default_origins(kind, path)
            return _MISSING
        usual = attribute.default if isinstance(attribute.default, kind) else None
        inner = section.blocks[name]
        for without in attribute.metadata["setting"].without:
            if (entry := inner.entries.pop(without, None)) is not None:
                self.errors.not_in_there(section.kind, inner, without, entry)
        return self.block(kind, inner, path, usual)

    # Labels -----------------------------------------------------------------------------------------------------------

    def _label(self, block: type, section: Section, path: str, arguments: dict[str, Any]) -> Any:
        """Return the value of the label and add it to the arguments; FAILED if it is missing or invalid."""
        attribute = blocks.label_of(block)
        attribute = None if attribute is None else self.parts.label(block, attribute)
        if attribute is None:
            if section.labels:
                self.errors.label_on_unlabelled(section)
            return None
        if not section.labels and (usual := _usual_label(section, path, attribute.name)) is not None:
            self.origins[f"{path}.{attribute.name}"] = Origin("default")
            arguments[attribute.name] = usual
            return usual
        if not section.labels:
            says_nothing = not (section.entries or section.blocks or section.lost or section.broken)
            if attribute.default is not attrs.NOTHING and not says_nothing:
                self.origins[f"{path}.{attribute.name}"] = Origin("default")
                return attribute.default
            self.errors.missing_label(block, section, attribute)
            arguments[attribute.name] = FAILED
            return FAILED
        if len(section.labels) > 1:
            self.errors.too_many_labels(block, section)
            arguments[attribute.name] = FAILED
            return FAILED
        if not self.parts.check_label(block, section, self.diagnostics):
            arguments[attribute.name] = FAILED
            return FAILED
        value = self._label_value(attribute, section.labels[0])
        if arguments.get("folder") is not None and value.data == Word(FAMILIES.unlisted):
            self.origins[f"{path}.{attribute.name}"] = Origin.of(value)
            arguments[attribute.name] = FAMILIES.unlisted
            return FAMILIES.unlisted
        self.origins[f"{path}.{attribute.name}"] = Origin.of(value)
        meta = Setting(doc="label", check=attribute.metadata.get("check"))
        context = Context(attribute.name, section.kind, block, meta, is_label=True)
        found = convert(attribute.type, value, context, self)
        problem = rank_count(found) if isinstance(found, int) else None
        if problem is not None:
            self.errors.out_of_range(context, value, problem)
            found = FAILED
        arguments[attribute.name] = found
        return found

    def _label_value(self, attribute: attrs.Attribute, label: Label) -> Value:
        """Return the label; if a number is wanted, the constant that it names."""
        value = label.value
        wants_number = attribute.type is int or int in getattr(attribute.type, "__args__", ())
        if wants_number and isinstance(value.data, Word) and label.names is not None:
            definition = label.names.find(value.data.text)
            if definition is not None:
                found = self.evaluator.definition(definition)
                return Value(found.data, value.span, found.via)
        if isinstance(value.data, int | float | Quantity) and not wants_number:
            return Value(value.span.text, value.span, value.via)
        return value


def _usual_label(section: Section, path: str, name: str) -> Any:
    """Return the label that an unwritten block gets if `--set` sets one of its settings: the label in a spec without
    the block.

    None if such a spec has no such block, or the block says nothing there, as with machines.
    """
    default = attrs.fields_dict(Spec)[path].default if path in blocks.KINDS and path not in blocks.NAMED else None
    default = default.factory() if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]
    written = any(_kind_of_head(head) != "set" for head in section.heads)
    if written or path == "cluster" or not blocks.is_block(type(default)):
        return None
    return getattr(default, name)


def _kind_of_head(span: Span) -> Any:
    return "set" if span.source.path == "--set" else "text"
