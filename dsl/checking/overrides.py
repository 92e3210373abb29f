"""`--set path.to.field=value` and `--set name=value` for a `param`: applied last, reported like other text.

Ticks and events are addressed by their action: `every.eval.web`, `on.finish.generate`.
"""

import re
from collections.abc import Container, Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from attrs import field

from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SourceText, Span
from xtrain.dsl.diagnostics.suggest import closest
from xtrain.dsl.diagnostics.synonyms import ours, synonym_of
from xtrain.dsl.evaluation.evaluate import Definition, Evaluator, Names
from xtrain.dsl.evaluation.statements import Label, ReadStatements, Section, SectionEntry, Tree, TriggerSection
from xtrain.dsl.evaluation.values import FAILED, Value, Word, describe
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.actions import Action, by_default
from xtrain.dsl.schema.data_components import Tokenizer
from xtrain.dsl.schema.model import FAMILIES, Model
from xtrain.dsl.schema.setting import Auto, open_setting, settings_of
from xtrain.dsl.spec import Spec
from xtrain.dsl.syntax import tree as s
from xtrain.dsl.syntax.parser import parse_expression
from xtrain.dsl.values import Dimension, Quantity
from xtrain.lazy_attrs import define, frozen

if TYPE_CHECKING:
    from xtrain.dsl.checking.user_parts import DeclaredParts


PATH = "--set"
Parts = tuple[tuple[str, Span], ...]
"""Parts of a path, with their places."""


@frozen
class Override:
    """One `--set`: the parts of the path with their places, and the place of the value."""

    parts: Parts
    span: Span
    value: Span


_LAST = 1_000_000  # after all files


def override_source(sets: Sequence[str]) -> SourceText:
    """Return all `--set` texts as one source, a line each."""
    return SourceText(PATH, "\n".join(text.replace("\n", " ") for text in sets), order=_LAST)


def read_overrides(source: SourceText, diagnostics: Diagnostics) -> list[Override]:
    """Split each line at its first `=`; a line without `=` is reported."""
    found = []
    offset = 0
    for line in source.text.split("\n") if source.text else []:
        start, end = offset, offset + len(line)
        offset = end + 1
        path, sign, value = line.partition("=")
        whole = Span(source, start, end)
        if not sign or not path.strip() or not value.strip():
            diagnostics.error(
                "X218", "`--set` needs a path and a value", whole, hint="write `--set path.to.setting=value`"
            )
            continue
        parts, at = [], start
        for part in path.split("."):
            name = part.strip()
            begin = at + (len(part) - len(part.lstrip()))
            parts.append((name, Span(source, begin, begin + len(name))))
            at += len(part) + 1
        first = start + len(path) + 1
        text = source.text[first:end]
        begin = first + len(text) - len(text.lstrip())
        found.append(Override(tuple(parts), whole, Span(source, begin, begin + len(text.strip()))))
    return found


# An action and its label, empty if it has none that a path could contain.
Done = tuple[str, str]


@define
class Addresses:
    """Names of actions. found: name → the places (trigger, action) that it can mean."""

    triggers: Sequence[Sequence[Done]]
    found: dict[str, list[tuple[int, int]]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for number, actions in enumerate(self.triggers):
            for place, (action, label) in enumerate(actions):
                for name in (action, f"{action}.{label}") if label else (action,):
                    self.found.setdefault(name, []).append((number, place))

    def places(self, name: str) -> list[tuple[int, int]]:
        """Return the places that a name may mean, one per trigger: several if it is ambiguous."""
        places = self._first_of_each(name)
        base, _, number = name.rpartition(".")
        if not places and number.isdecimal():
            numbered = self._first_of_each(base)
            places = numbered[int(number) - 1 : int(number)] if int(number) else []
        return places

    def name(self, trigger: int, place: int) -> str:
        """Return the name that means only this action of this trigger."""
        action, label = self.triggers[trigger][place]
        full = f"{action}.{label}" if label else action
        same = self._first_of_each(full)
        alone = len(self._first_of_each(action)) == 1
        if len(same) == 1:
            return action if alone and not label else full
        return f"{full}.{[number for number, _ in same].index(trigger) + 1}"

    def all(self) -> list[str]:
        """Return every name that means exactly one trigger."""
        names = [self.name(i, j) for i, actions in enumerate(self.triggers) for j in range(len(actions))]
        return list(dict.fromkeys(names))

    def _first_of_each(self, name: str) -> list[tuple[int, int]]:
        first: dict[int, int] = {}
        for trigger, place in self.found.get(name, ()):
            first.setdefault(trigger, place)
        return list(first.items())


def of_ticks(spec: Spec) -> Addresses:
    """Return the addresses of a spec's ticks, without the prefix `every.`."""
    return Addresses([[_done_by(action) for action in tick.actions] for tick in spec.ticks])


def _done_by(action: Action) -> Done:
    label = blocks.label_of(type(action))
    return action.kind, "" if label is None or action.called else str(getattr(action, label.name))


Actions = Mapping[str, type[Action]]
"""Actions by name, including user functions."""


@frozen
class Overriding:
    """Application of `--set` texts to the statements of a spec. Mistakes are reported."""

    reading: ReadStatements
    evaluator: Evaluator
    diagnostics: Diagnostics

    def set_params(self, overrides: list[Override]) -> list[Override]:
        """Apply overrides of `param`s; return the others."""
        rest = []
        for override in overrides:
            name = override.parts[0][0]
            definition = self.reading.params.get(name) if len(override.parts) == 1 else None
            if definition is None:
                rest.append(override)
            else:
                self._set_param(definition, override)
        for definition in self.reading.definitions:
            # Values computed to find the types of defaults may depend on values that are replaced now.
            definition.value, definition.used = None, False
        return rest

    def _set_param(self, definition: Definition, override: Override) -> None:
        """Replace the default of a `param` by a value of the same type and unit."""
        default = self.evaluator.definition(definition)
        if default.data is FAILED:
            return
        value = (self._text if isinstance(default.data, str) else self._value)(override.value)
        if value is None or value.data is FAILED:
            return
        given, wanted = value.data, default.data
        if isinstance(wanted, float) and isinstance(given, int) and not isinstance(given, bool):
            given = float(given)
        same = type(given) is type(wanted)
        if isinstance(given, Quantity) and isinstance(wanted, Quantity):
            same = given.unit == wanted.unit
        if not same and given is not None and wanted is not None:
            name = definition.name.text
            self.diagnostics.error(
                "X310", f"`{name}` is {_kind(wanted)}, not {describe(given)}", override.value,
                notes=[("its default fixes the type", definition.name.span)],
            )  # fmt: skip
            return
        definition.replaced = Value(given, override.value)

    def set_field(self, override: Override, tree: Tree, parts: "DeclaredParts") -> None:
        """Apply an override of a setting or a label to the tree. parts: user functions."""
        name, span = override.parts[0]
        rest = override.parts[1:]
        if name == "collate" and not rest:
            value = self._value(override.value)
            if value is not None:
                tree.root.entries["collate"] = SectionEntry(span, value)
        elif name in ("every", "on"):
            (self._set_tick if name == "every" else self._set_event)(override, tree, parts.actions())
        elif name not in blocks.KINDS:
            candidates = (*blocks.KINDS, "collate", "every", "on", *self.reading.params)
            near = () if rest else _settings_called(name, tree)
            self._no_such(name, span, candidates, "block" if rest else "param or block", near)
        elif name not in blocks.NAMED:
            section = tree.root.block(name)
            self._descend(parts.block(blocks.KINDS[name], section), section, override, rest)
        else:
            rest = _one_label(rest, tree.named.get(name, {}))
            section = self._named(name, rest, tree, span)
            if section is not None and not rest[1:]:
                fields = ", ".join(settings_of(blocks.KINDS[name]))
                self._wrong(f"`{name}` is a block", override.span, f"set one of its settings: {fields}")
            elif section is not None:
                self._descend(parts.block(blocks.KINDS[name], section), section, override, rest[1:])

    def _named(self, kind: str, rest: Parts, tree: Tree, span: Span) -> Section | None:
        known = tree.named.get(kind, {})
        if not rest:
            self._wrong(f"`{kind}` needs a name and a setting", span, f"write `{kind}.NAME.SETTING=value`")
            return None
        label, place = rest[0]
        if label not in known:
            self._no_such(label, place, known, kind)
            return None
        return known[label]

    def _descend(self, block: type, section: Section, override: Override, rest: Parts) -> None:
        """Follow the path through nested blocks to a setting or a label."""
        if not section.heads:
            section.heads.append(override.parts[-1][1])
        label = blocks.label_of(block)
        known, free = settings_of(block), open_setting(block)
        if block is Model:  # the label may name a folder of this family
            known = {**settings_of(FAMILIES[FAMILIES.unlisted]), **known}
        if not rest or (len(rest) == 1 and label is not None and rest[0][0] == label.name):
            if label is None:
                hint = f"set one of its settings: {', '.join(known)}"
                self._wrong(f"`{section.kind}` is a block", override.span, hint)
                return
            is_call = block is Tokenizer and re.match(r"hub\s*\(", override.value.text)
            value = (self._text if label.type is str and not is_call else self._value)(override.value)
            if value is not None:
                section.labels = [Label(value)]
            return
        name, span = rest[0]
        if name not in known and free is not None and get_args(free[0].type)[1] is Dimension:
            name, rest = ".".join(part for part, _ in rest), rest[:1]
            section.varied.add(name)
        if name not in known and free is not None and len(rest) == 1:
            self._enter(section, name, span, self._value(override.value))
        elif name not in known:
            self._no_such(name, span, known, f"setting of `{section.kind}`")
        elif blocks.is_block(inner := known[name][0].type):
            self._descend(inner, section.block(name), override, rest[1:])
        elif len(rest) > 1:
            self._wrong(f"`{name}` is a setting, not a block", rest[1][1], f"write `--set …{name}=value`")
        else:
            kind, text = known[name][0].type, override.value.text
            # A shell removes quotes, and `1f1b` is no name without them: accept a word of the setting as it is.
            is_word = get_origin(kind) is Literal and text in get_args(kind)
            takes_text = (str in _parts(kind) or is_word) and not (text == "auto" and Auto in _parts(kind))
            self._enter(section, name, span, (self._text if takes_text else self._value)(override.value))

    def _enter(self, section: Section, name: str, span: Span, value: Value | None) -> None:
        if value is not None:
            section.entries[name] = SectionEntry(span, value)
            section.lost.discard(name)

    def _value(self, span: Span) -> Value | None:
        """Return the expression at a place, which may refer to params; None after reporting that it is invalid."""
        node = parse_expression(span.source, span.start, span.end, self.diagnostics)
        return None if node is None else self.evaluator.value(node, Names(self.reading.params))

    def _text(self, span: Span) -> Value:
        """Return the text at a place, with or without quotes; `none` is the constant."""
        node = parse_expression(span.source, span.start, span.end, Diagnostics())
        if node is not None and (span.text.startswith('"') or span.text == "none"):
            return self.evaluator.value(node, Names(self.reading.params))
        return Value(span.text, span)

    # Ticks and events -------------------------------------------------------------------------------------------------

    def _set_tick(self, override: Override, tree: Tree, actions: Actions) -> None:
        """Set `every.ADDRESS`, the period of a tick, or `every.ADDRESS.SETTING`, a setting of its action."""
        ticks = [each for each in tree.triggers if each.event is None]
        rest, addresses = override.parts[1:], _addresses(ticks, actions)
        name = ".".join(part for part, _ in rest)
        usual = [kind.kind for kind in by_default()]  # default ticks may be set too
        places = addresses.places(name)
        if len(rest) == 1 and not places and name in usual:
            names = Names(self.reading.params)
            tick = TriggerSection(override.span, names, [(s.Name(_path(override), name), Section(name))])
            tree.triggers.append(tick)
            ticks, places = [tick], [(0, 0)]
        if len(places) == 1:
            every_step = Value(Quantity(1, "steps"), override.value) if override.value.text == "step" else None
            ticks[places[0][0]].override = every_step or self._value(override.value)
        elif len(places) > 1:
            self._ambiguous("every", ticks, addresses, places, override)
        elif not self._set_action(ticks, addresses, rest, override, actions):
            defaults = (each for each in usual if not addresses.places(each))
            known = [f"every.{each}" for each in (*addresses.all(), *defaults)]
            given = f"every.{name}" if rest else ""
            meant = closest(given, known)
            message = f"there is no tick `{given}`" if rest else "`every` needs the name of a tick"
            hint = f"did you mean `{meant}`?" if meant else f"write one of {', '.join(known)}"
            self._wrong(message, _path(override), hint)

    def _set_event(self, override: Override, tree: Tree, actions: Actions) -> None:
        """Set `on.EVENT.ADDRESS.SETTING`, a setting of an event's action, or `on.nan`, its count."""
        events = [each for each in tree.triggers if each.event is not None]
        head, *path = override.parts
        name, place = path[0] if path else ("", head[1])
        triggers = [each for each in events if each.event is not None and each.event.text == name]
        if not triggers:
            known = list(dict.fromkeys(each.event.text for each in events if each.event is not None))
            meant = closest(name, known)
            hint = f"did you mean `{meant}`?" if meant else None
            notes = [] if meant else [(f"the spec has {', '.join(f'`on {each}`' for each in known) or 'none'}", None)]
            message = f"the spec has no `on {name}`" if name else "`on` needs the name of an event"
            self.diagnostics.error("X217", message, place, hint=hint, notes=notes)
            return
        rest, addresses = tuple(path[1:]), _addresses(triggers, actions)
        if name == "nan" and not rest and len(triggers) == 1:
            triggers[0].override = self._value(override.value)
        elif not self._set_action(triggers, addresses, rest, override, actions):
            listed = ", ".join(f"`on.{name}.{each}.SETTING`" for each in addresses.all())
            message = f"`{_path(override).text}` is not a setting of an action of this event"
            self._wrong(message, _path(override), f"the spec has {listed}")

    def _set_action(
        self, triggers: list[TriggerSection], addresses: Addresses, rest: Parts, override: Override, actions: Actions
    ) -> bool:
        """Set a setting of an action, the last part of a path; return False if the path before it means no action."""
        numbered = bool(rest) and rest[-1][0].isdecimal()  # one tick more than there are
        places = [] if numbered else addresses.places(".".join(part for part, _ in rest[:-1]))
        kinds = [actions.get(addresses.triggers[trigger][place][0]) for trigger, place in places]
        known = [name for kind in kinds if kind is not None for name in settings_of(kind)]
        if places and rest[-1][0] not in known and closest(rest[-1][0], known) is None:
            return False
        if len(places) > 1:
            prefix = ".".join(part for part, _ in override.parts[: len(override.parts) - len(rest)])
            self._ambiguous(prefix, triggers, addresses, places, override, rest[-1][0])
        elif places:
            trigger, place = places[0]
            name, section = triggers[trigger].actions[place]
            if name.text in actions:  # else it is reported
                self._descend(actions[name.text], section, override, rest[-1:])
        return bool(places)

    # Mistakes ---------------------------------------------------------------------------------------------------------

    def _wrong(self, message: str, span: Span, hint: str | None) -> None:
        self.diagnostics.error("X217", message, span, hint=hint)

    def _no_such(self, name: str, span: Span, candidates: Any, what: str, near: Sequence[str] = ()) -> None:
        """Report an unknown name. near: what it was meant for, if known; else the closest candidate is suggested."""
        meant = "` or `".join(near) or closest(name, candidates)
        known = ", ".join(candidates)
        notes = [] if meant else [(f"there are {known}" if known else "there are none", None)]
        hint, synonym = f"did you mean `{meant}`?" if meant else None, synonym_of(name)
        if synonym is not None and synonym.hint and (not meant or meant.rpartition(".")[2] in synonym.names):
            hint = f"{hint} {synonym.hint_with()}" if hint and synonym.convert else synonym.hint_with()
        self.diagnostics.error("X217", f"there is no {what} `{name}`", span, hint=hint, notes=notes)

    def _ambiguous(
        self, prefix: str, triggers: list[TriggerSection], addresses: Addresses, places: list[tuple[int, int]],
        override: Override, setting: str = "",
    ) -> None:  # fmt: skip
        """Report a path that may mean several ticks, with the paths that mean one."""
        names = [".".join(filter(None, (prefix, addresses.name(*place), setting))) for place in places]
        hint = f"write {' or '.join(f'`{name}`' for name in names)}"
        notes = [(f"`{name}`", triggers[number].span) for name, (number, _) in zip(names, places, strict=True)]
        path, count = _path(override), len(places)
        message = f"`{path.text}` is ambiguous: {count} actions match"
        self.diagnostics.error("X217", message, path, hint=hint, notes=notes)


def _addresses(triggers: list[TriggerSection], actions: Actions) -> Addresses:
    return Addresses([[_done_in(name, section, actions) for name, section in each.actions] for each in triggers])


def _done_in(name: s.Name, section: Section, actions: Actions) -> Done:
    kind = actions.get(name.text)
    label = section.labels[0].value.data if section.labels and not (kind and kind.called) else ""
    return name.text, label.text if isinstance(label, Word) else label if isinstance(label, str) else ""


def _parts(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _path(override: Override) -> Span:
    return override.parts[0][1].to(override.parts[-1][1])


def _kind(data: Any) -> str:
    match data:
        case bool():
            return "`true` or `false`"
        case int():
            return "a whole number"
        case float():
            return "a number"
    return describe(data)


def _settings_called(name: str, tree: Tree) -> list[str]:
    """Return the paths of settings with this name, or with the name that another trainer uses: `lr` is `optimizer.lr`.

    Only paths in blocks that the spec has, if there are any.
    """
    paths: dict[str, list[str]] = {}
    for kind, block in blocks.KINDS.items():
        labels = [f"{kind}.{label}" for label in tree.named.get(kind, {})] if kind in blocks.NAMED else [kind]
        for setting in settings_of(block):
            paths.setdefault(setting, []).extend(f"{place}.{setting}" for place in labels)
        for inner, nested in blocks.nested(block).items():
            for setting in settings_of(nested) if kind not in blocks.NAMED else ():
                paths.setdefault(setting, []).append(f"{kind}.{inner}.{setting}")
    found = paths.get(name) or paths.get(ours(name, paths) or "", [])
    written = [path for path in found if path.partition(".")[0] in (*tree.root.blocks, *tree.named)]
    return written or found


def _one_label(parts: Parts, known: Container[str]) -> Parts:
    """Return the parts after the keyword of a named block, with a label that contains dots as one part."""
    for count in range(len(parts), 1, -1):
        if (label := ".".join(name for name, _ in parts[:count])) in known:
            return ((label, parts[0][1].to(parts[count - 1][1])), *parts[count:])
    return parts
