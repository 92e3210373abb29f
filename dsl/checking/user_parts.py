"""`use`: user functions as components, read without running them, and the arguments of their calls."""

import os
from collections import ChainMap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Union, cast, get_args, get_origin

import attrs
from attrs import field

from xtrain.dsl.checking.context import Context, Converter
from xtrain.dsl.checking.convert import settled
from xtrain.dsl.checking.type_errors import TypeMismatch, joined, list_mismatch, map_mismatch, report
from xtrain.dsl.diagnostics.diagnostic import Diagnostics, Fix, SourceText, Span
from xtrain.dsl.diagnostics.suggest import certain, closest, renamed
from xtrain.dsl.evaluation import evaluate as functions
from xtrain.dsl.evaluation.statements import Section
from xtrain.dsl.evaluation.values import FAILED, Called, Items, Value, Word, describe, is_number, show_number
from xtrain.dsl.evaluation.values import Mapping as MapValue
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.actions import ACTIONS, Action
from xtrain.dsl.schema.component import (
    Component,
    Registry,
    UserComponent,
    members_of,
    parameter,
    parameters_of,
    registry_of,
)
from xtrain.dsl.schema.data_components import LINKS, SOURCES
from xtrain.dsl.schema.run import TRACKERS, Log
from xtrain.dsl.schema.setting import Setting
from xtrain.dsl.syntax import tree as s
from xtrain.dsl.syntax.lexer import UNIT_WORDS
from xtrain.dsl.syntax.tree import CONSTANTS
from xtrain.dsl.user_parts.files import ModuleMissing, PartModule, find_module, is_file, module_digest
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import define

if TYPE_CHECKING:
    from xtrain.dsl.user_parts.reader import Declared  # a spec without `use` needs no reader

# Kinds without a block keyword: they are nested in other blocks, or called.
_INSIDE: Final = {registry.word: registry for registry in (ACTIONS, TRACKERS, SOURCES, LINKS)}
# (kind of block, module, name, digest) → class: equal texts give equal objects.
_COMPONENTS: dict[tuple[str, str, str, str], type[UserComponent]] = {}


def component_of(declared: "Declared", module: str, digest: str) -> type[UserComponent]:
    """Return the class of blocks and calls that choose a function."""
    block = declared.part.block or declared.kind
    place = (block, module, declared.name, digest)
    if place not in _COMPONENTS:
        registry = _INSIDE.get(block) or registry_of(blocks.KINDS[block])
        if registry is None:
            base: type = blocks.KINDS[block]
        else:
            base = cast(type[UserComponent], registry.of_users).base_of(declared)
        key = "kind" if registry is None else registry.key
        labelled = key in attrs.fields_dict(base)
        attributes: dict[str, Any] = {key: attrs.field(default=declared.name, type=str)} if labelled else {}
        for each in declared.parameters:
            default = attrs.NOTHING if each.required else each.default
            attributes[f"{each.name}_"] = parameter(each.name, each.type, default, each.check, each.doc)
        component = attrs.make_class(declared.name, attributes, bases=(base,), frozen=True, slots=True)
        component.__doc__ = f"`{block} {declared.name} {{ … }}`: {declared.does or 'of your own'}"
        component.module, component.function, component.digest = module, declared.name, digest
        component.declared, component.filled, component.purpose = declared.options, declared.filled, declared.does
        component.declaration, component.goes_with = declared, declared.goes_with
        if not labelled and declared.part.block:  # else the kind is the same for all
            component.kind = declared.name
        _COMPONENTS[place] = component
    return _COMPONENTS[place]


def names_taken(block: str) -> tuple[str, ...]:
    """Return the names that a function of a block kind must not have: existing components, and after `every`, words
    with another meaning."""
    if block == ACTIONS.word:
        return (*ACTIONS, *UNIT_WORDS, "step", "then")
    registry = _INSIDE.get(block) or registry_of(blocks.KINDS[block])
    return () if registry is None else tuple(registry)


@define(eq=False)
class DeclaredPart:
    """A user function. module: as a plan names it. digest: of its content. use: the statement that declares it."""

    declared: "Declared"
    module: str
    digest: str
    use: Span = field(repr=False)
    used: bool = False

    def convert(self, kinds: Registry, call: Called, value: Value, context: Context, around: Converter) -> Any:
        """Convert the call to a component of a kind; return FAILED after reporting a mistake. Raises TypeMismatch if
        the function is of another kind."""
        declared, name = self.declared, self.declared.name
        self.used = True
        place = Value(call, call.name_span, value.via)
        note = ((f"`{name}` is declared here", declared.span),)
        if declared.kind != kinds.word:
            from xtrain.dsl.user_parts.kinds import PART_KINDS

            own = declared.part
            other = next(kind for kind in PART_KINDS.values() if kind.name == kinds.word)
            message = f"`{name}` is {own.noun}, and {context.subject} takes {other.noun}"
            raise TypeMismatch("X219", message, place, hint=f"{own.noun} {own.chosen}", notes=note)
        if isinstance(value.data, Word) and declared.kind == "source":
            raise TypeMismatch("X220", f"`{name}` needs parentheses", place, hint=f"write `{self.form()}`", notes=note)
        given = self._given(call, around)
        if given is None:
            return FAILED
        missing = [p.name for p in declared.parameters if p.required and p.name not in given]
        if missing:
            needed = joined([f"`{each}`" for each in missing], "and")
            raise TypeMismatch("X220", f"`{name}` needs {needed}", place, hint=f"write `{self.form()}`", notes=note)
        component, arguments = self.component(), {}
        for each, attribute in parameters_of(component).items():
            if each in given:
                context = Context(each, name, component, Setting(doc=f"argument of {name}"))
                arguments[attribute.alias] = convert_argument(attribute.type, given[each], context, around)
        return FAILED if any(each is FAILED for each in arguments.values()) else component(**arguments)

    def component(self) -> type[UserComponent]:
        """Return its class."""
        return component_of(self.declared, self.module, self.digest)

    def form(self) -> str:
        """Return how it is written: its name with the required arguments."""
        needed = [f"{p.name} = …" for p in self.declared.parameters if p.required]
        brackets = bool(needed) or self.declared.kind == "source"
        return f"{self.declared.name}({', '.join(needed)})" if brackets else self.declared.name

    def _given(self, call: Called, around: Converter) -> dict[str, Value] | None:
        """Return the written value of each parameter; None after reporting unknown ones."""
        name, parameters = call.name, self.declared.parameters
        placed = [parameter.name for parameter in parameters if not parameter.named]
        given = dict(zip(placed, call.positional, strict=False))
        good = True
        for extra in call.positional[len(placed) :]:
            many = f"{len(placed)} argument" + ("s" if len(placed) > 1 else "") if placed else "no arguments"
            named = [parameter.name for parameter in parameters if parameter.named]
            hint = f"pass {joined(named)} by name" if named else "remove it"
            message = f"`{name}` takes {many}{' without a name' if named else ''}"
            around.diagnostics.error("X220", message, extra.span, hint=hint)
            good = False
        known = [parameter.name for parameter in parameters]
        for each, (span, value) in call.keywords.items():
            if each in given:
                around.diagnostics.error("X220", f"`{each}` of `{name}` is given twice", span, hint="keep one")
            elif each not in known:
                meant = closest(each, known)
                says = f"arguments of `{name}`: {', '.join(known)}" if known else f"`{name}` takes no arguments"
                around.diagnostics.error(
                    "X203", f"unknown argument `{each}` of `{name}`", span,
                    hint=f"did you mean `{meant}`?" if meant else None, notes=[(says, self.declared.span)],
                    fix=renamed(span, each, known, taken=(*given, *call.keywords)),
                )  # fmt: skip
            else:
                given[each] = value
                continue
            good = False
        return given if good else None


def convert_argument(kind: Any, value: Value, context: Context, around: Converter) -> Any:
    """Convert a value to the type of a parameter's annotation; return FAILED after reporting a mistake."""
    if value.data is FAILED:
        return FAILED
    if Any not in _mentioned(kind):
        return around.convert(kind, value, context)
    try:
        return _unchecked(kind, value, context, around)
    except TypeMismatch as wrong:
        return report(wrong, around)


def _unchecked(kind: Any, value: Value, context: Context, around: Converter) -> Any:
    """Convert a value for an unspecific type: anything that a spec can write and Python understands. Raises
    TypeMismatch."""
    data = value.data
    if get_origin(kind) is Union:
        (kind,) = (part for part in get_args(kind) if part is not type(None))
        if data is None:
            return None
    if get_origin(kind) is tuple and not isinstance(data, Items):
        raise list_mismatch(Any, kind, value, context)
    if get_origin(kind) is dict and not isinstance(data, MapValue):
        raise map_mismatch(kind, value, context)
    match data:
        case Items(values=values):
            found = [convert_argument(Any, each, context, around) for each in values]
            return FAILED if any(each is FAILED for each in found) else tuple(found)
        case MapValue(entries=entries):
            items = {name: convert_argument(Any, each, context, around) for name, each in entries.items()}
            return FAILED if any(each is FAILED for each in items.values()) else items
        case Quantity():
            message = f"{context.subject} is a plain number, and this is {describe(data)}"
            raise TypeMismatch(
                "X302", message, value, hint=f"arguments of Python functions have no units: write `{_bare(data)}`"
            )
        case Word(text=text):
            raise TypeMismatch("X202", f"`{text}` is not defined", value, hint=f'write a string in quotes: `"{text}"`')
    if data is None or isinstance(data, bool | str) or is_number(data):
        return settled(data, context)
    message = f"{context.subject} of `{context.kind}` cannot be {describe(data)}"
    raise TypeMismatch(
        "X301", message, value, hint="write a number, a string, `true`, `false`, `none`, a list or a map"
    )


def _bare(data: Quantity) -> str:
    return f"{data.fraction:g}" if data.unit == "%" else show_number(data.value)


def _mentioned(kind: Any) -> set[Any]:
    """Return the types that a type consists of, including itself."""
    found = {kind}
    for part in get_args(kind) if get_origin(kind) in (Union, tuple, dict) else ():
        found |= _mentioned(part)
    return found


# Words with another meaning in a spec, in addition to component names; some are node names of a plan.
_TAKEN: Final = frozenset((*functions.FUNCTIONS, *CONSTANTS, "microbatches"))


# Blocks whose label is always the name of a user function.
_OF_USERS: Final = tuple(block for block in blocks.KINDS.values() if issubclass(block, UserComponent))


class DeclaredParts(dict[str, DeclaredPart]):
    """Name → part. unread: something that a `use` names could not be read, so a part may be missing here."""

    unread: bool = False

    def of_kind(self, kind: str) -> list[str]:
        """Return the names of the functions of one kind."""
        return [name for name, part in self.items() if part.declared.kind == kind]

    def block(self, block: type, section: Section) -> type:
        """Return the class of a block: a user class if its label names a function of that kind."""
        if members_of(block) is TRACKERS:
            return self._with_trackers(block, section)
        part = self.get(label_text(section)) if issubclass(block, Component) else None
        if part is None or blocks.KINDS.get(part.declared.part.block) is not block:
            return block
        part.used = True
        return part.component()

    def actions(self) -> Mapping[str, type[Action]]:
        """Return all actions by name; reading one loads it."""
        return ChainMap(self._own(ACTIONS), ACTIONS)  # type: ignore[arg-type]

    def _with_trackers(self, block: type, section: Section) -> type:
        """Return the class of `log` with a setting for each user tracker in addition."""
        own = self._own(TRACKERS)
        for name in own.keys() & {*section.blocks, *section.entries}:
            self[name].used = True
        return Log.of({**TRACKERS, **own}) if own else block

    def _own(self, registry: Registry[Any]) -> dict[str, Any]:
        """Return the user components of a kind, by name."""
        own = {name: part for name, part in self.items() if part.declared.part.block == registry.word}
        return {name: part.component() for name, part in own.items()}

    def check_label(self, block: type, section: Section, diagnostics: Diagnostics) -> bool:
        """Check the label of a block; return False after reporting a function of another kind."""
        registry, part = registry_of(block), self.get(label_text(section))
        if self.may_be_missing(block, section):
            return False
        if block in _OF_USERS and part is None:
            self._unknown(block, section, diagnostics)
            return False
        if not (registry or block in _OF_USERS) or part is None or part.declared.name in (registry or ()):
            return True
        own, span = part.declared.part, section.labels[0].value.span
        message = f"`{part.declared.name}` is {own.noun}, and the label of `{section.kind}` names another kind"
        notes = [(f"`{part.declared.name}` is declared here", part.declared.span)]
        part.used = True
        diagnostics.error("X219", message, span, hint=f"{own.noun} {own.chosen}", notes=notes)
        return False

    def may_be_missing(self, block: type, section: Section) -> bool:
        """Return True if the label may be a name that could not be read, so that its block is unknown."""
        registry, name = registry_of(block), label_text(section)
        choosable = block in _OF_USERS if registry is None else registry.takes_functions and name not in registry
        return self.unread and bool(name) and choosable and name not in self

    def _unknown(self, block: type, section: Section, diagnostics: Diagnostics) -> None:
        name, span = label_text(section), section.labels[0].value.span
        own = [each for each, part in self.items() if blocks.KINDS.get(part.declared.part.block) is block]
        meant = closest(name, own)
        hint = f"did you mean `{meant}`?" if meant else f"`use` names the module of a function with `@{section.kind}`"
        message = f"there is no function `{span.text}` with `@{section.kind}`"
        notes = [(f"existing functions: {', '.join(own)}", None)] if own else []
        diagnostics.error("X219", message, span, hint=hint, notes=notes, fix=renamed(span, name, own))

    def label(self, block: type, attribute: attrs.Attribute) -> attrs.Attribute:
        """Return the label attribute of a block, with the names of user functions."""
        registry = registry_of(block)
        if registry is None:
            return attribute
        own = [name for name, part in self.items() if part.declared.part.block == registry.word]
        return attribute.evolve(type=Literal[(*registry, *own)]) if own else attribute  # type: ignore[valid-type]


def label_text(section: Section) -> str:
    """Return the name in the label of a block; empty if there is none."""
    data = section.labels[0].value.data if len(section.labels) == 1 else None
    return data.text if isinstance(data, Word) else data if isinstance(data, str) else ""


def read_uses(uses: Iterable[s.Use], spec: str, order: int, diagnostics: Diagnostics) -> DeclaredParts:
    """Return the parts that the `use` statements of the spec at `spec` and of its includes declare.

    order: position of the first of their files among all sources. Mistakes in a module are reported with their place.
    """
    reader = _UseReader(Path(os.path.dirname(spec)), order, diagnostics)  # noqa: PTH120
    for use in uses:
        reader.take(use)
    return reader.parts


def check_unused(parts: DeclaredParts, uses: Iterable[s.Use], diagnostics: Diagnostics) -> None:
    """Warn about modules of which no part is used."""
    declared: dict[Span, list[DeclaredPart]] = {}
    for part in parts.values():
        declared.setdefault(part.use, []).append(part)
    for use in uses:
        own = declared.get(use.target.span, [])
        if own and not any(part.used for part in own):
            names = ", ".join(part.declared.name for part in own)
            message = f"nothing declared in {use.target.span.text} is used"
            diagnostics.warning("W204", message, use.span, hint=f"remove it, or use {names}")


class _UseReader:
    def __init__(self, folder: Path, order: int, diagnostics: Diagnostics) -> None:
        self.folder, self.order, self.diagnostics = folder, order, diagnostics
        self.parts = DeclaredParts()
        self.seen: set[str] = set()

    def take(self, use: s.Use) -> None:
        """Read the module of one statement; a module that has been read adds nothing."""
        module = self._module(use)
        if module is None:
            self.parts.unread = True
            return
        try:
            found = find_module(module, self.folder)
            identity = os.path.realpath(found.path)
            if identity in self.seen:
                return
            self.seen.add(identity)
            data, digest = found.path.read_bytes(), module_digest(found)
        except ModuleMissing as missing:
            self._missing(use, module, str(missing))
            return
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "this is not a file path"
            self._missing(use, module, f"cannot read `{module}`: {reason}")
            return
        self._read(use, module, found, data, digest)

    def _module(self, use: s.Use) -> str | None:
        """Return the module as a plan names it: a path relative to the folder of the spec, or a dotted name."""
        target, span = use.target, use.target.span
        if isinstance(target, s.Reference):
            if is_file(target.text):
                hint, fix = f'write `use "{target.text}"`', Fix(span, f'"{target.text}"')
                self.diagnostics.error("X221", "write the path of a file in quotes", span, hint=hint, fix=fix)
                return None
            return target.text
        path = target.value
        if not is_file(path):
            is_there = os.path.isfile(self._beside(use) / f"{path}.py")  # noqa: PTH113 (any text is a name to it)
            hint = f'write `use "{path}.py"`' if path and is_there else None
            hint = hint or 'write `use "parts.py"`, or `use package.module`'
            self.diagnostics.error("X221", f"`{path}` is not a Python file: the name must end in .py", span, hint=hint)
            return None
        if not os.path.isabs(path):  # noqa: PTH117
            path = os.path.relpath(self._beside(use) / path, self.folder)
        return os.path.normpath(path).replace(os.sep, "/")

    @staticmethod
    def _beside(use: s.Use) -> Path:
        """Return the folder of the spec with the statement."""
        return Path(os.path.dirname(use.span.source.path))  # noqa: PTH120

    def _missing(self, use: s.Use, module: str, message: str) -> None:
        hint, fix, span = None, None, use.target.span
        if is_file(module) and isinstance(use.target, s.String):
            path = self.folder / module
            files = {p.stem: p.name for p in sorted(path.parent.glob("*.py"))} if os.path.isdir(path.parent) else {}  # noqa: PTH112
            meant = closest(path.stem, files)
            if meant is not None:
                hint = f"did you mean `{files[meant]}`?"
                if certain(path.stem, files) == meant and "\\" not in span.text:
                    head, sign, _ = use.target.value.rpartition("/")
                    fix = Fix(span, f'"{head}{sign}{files[meant]}"')
        self.diagnostics.error("X221", message, span, hint=hint, fix=fix)
        self.parts.unread = True

    def _read(self, use: s.Use, module: str, found: PartModule, data: bytes, digest: str) -> None:
        from xtrain.dsl.user_parts.kinds import PART_KINDS
        from xtrain.dsl.user_parts.reader import read_parts

        span = use.target.span
        path = found.path.as_posix()
        order, self.order = self.order, self.order + 1
        try:
            source = SourceText.from_bytes(path, data, order=order, included_at=span)
        except UnicodeDecodeError:
            self.diagnostics.error("X221", f"`{path}` is not UTF-8 text", span, hint="save it as UTF-8")
            self.parts.unread = True
            return
        wrong = Diagnostics()
        declared = read_parts(source, wrong)
        self.diagnostics.extend(wrong)
        self.parts.unread |= wrong.has_errors
        if declared == [] and not wrong.has_errors:
            decorators = ", ".join(f"`@{kind}`" for kind in PART_KINDS)
            hint = f"put a decorator of `xtrain` above a function or class: {decorators}"
            self.diagnostics.error("X222", f"`{path}` declares nothing that a spec can use", span, hint=hint)
            self.parts.unread = True
        for each in declared or ():
            earlier = self.parts.get(each.name)
            block = each.part.block
            taken = (*names_taken(block), *CONSTANTS) if block else (*_TAKEN, *SOURCES, *LINKS)
            if each.name in taken:
                message = f"`{each.name}` is already a word of the language"
                self.diagnostics.error("X224", message, each.span, hint="give the function another name")
                self.parts.unread = True
            elif earlier is not None:
                notes = [("the first is here", earlier.declared.span)]
                message, hint = f"two functions have the name `{each.name}`", "rename one of them"
                self.diagnostics.error("X224", message, each.span, hint=hint, notes=notes)
            else:
                self.parts[each.name] = DeclaredPart(each, module, digest, span)
