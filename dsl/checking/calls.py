"""Calls that make an object of the schema: `text("*.txt")` as a source, `pack(sequential)` as a link of `collate`."""

from collections.abc import Collection
from typing import Any, Final, get_origin

import attrs

from xtrain.dsl import blocks
from xtrain.dsl.checking.context import Context, Converter
from xtrain.dsl.checking.type_errors import TypeMismatch, joined
from xtrain.dsl.diagnostics.diagnostic import Fix
from xtrain.dsl.diagnostics.fixes import renamed
from xtrain.dsl.diagnostics.source import Span
from xtrain.dsl.diagnostics.suggest import closest
from xtrain.dsl.evaluation.values import FAILED, Called, Items, Value, Word, describe
from xtrain.dsl.schema import later
from xtrain.dsl.schema.collators import LINKS
from xtrain.dsl.schema.component import Component, Registry
from xtrain.dsl.schema.setting import settings_of
from xtrain.dsl.schema.sources import SOURCES, Source

_LATER: Final = (*later.SOURCES, *later.LINKS)


def convert_call(kind: type[Component], value: Value, context: Context, around: Converter) -> Any:
    """The component of a kind that a call stands for. Raises TypeMismatch; FAILED if an argument was wrong."""
    names, data = kind.components, value.data
    if isinstance(data, Called):
        name, span, call = data.name, data.name_span, data
    elif isinstance(data, Word):
        name, span, call = data.text, value.span, Called(data.text, value.span, (), {})
    else:
        forms = joined([f"`{form}`" for form in _forms(names)])
        message = f"{context.subject} must be {forms}, not {describe(data)}"
        meant = _call_meant(value, names)
        if meant is not None and isinstance(data, Items):
            raise TypeMismatch(
                "X301", message, value, hint=f"join links by an arrow: `{meant}`", fix=Fix(value.span, meant)
            )
        hint, fix = (f"write `{meant}`", Fix(value.span, meant)) if meant else (None, None)
        raise TypeMismatch("X301", message, value, hint=hint, fix=fix)
    place = Value(data, span, value.via)
    if name in around.parts:
        return around.parts[name].convert(names, call, value, context, around)
    if name in _LATER:
        raise TypeMismatch("X209", f"`{name}` is not supported yet", place, hint=f"choose {joined(_forms(names))}")
    if name not in names:
        if around.parts.unread:
            return FAILED  # it may be a part of a module that could not be read, which is reported
        own = around.parts.of_kind(names.word)
        known = (*names, *own)
        meant = closest(name, known)
        hint = f"did you mean `{meant}`?" if meant else None
        notes = ((f"{context.subject} is one of {', '.join((*_forms(names), *own))}", None),)
        raise TypeMismatch("X219", f"{context.subject} has no `{name}`", place, hint=hint, notes=notes,
                       fix=renamed(span, name, known))  # fmt: skip
    if isinstance(data, Word) and names.form(name) != name:
        form = _form(names, name)
        fix = Fix(span, form) if blocks.label_of(names[name]) is None else None
        raise TypeMismatch("X220", f"`{name}` needs parentheses", place, hint=f"write `{form}`", fix=fix)
    return _build(names[name], call, value, around)


def _call_meant(value: Value, names: Registry) -> str | None:
    """What to write instead of a bare path, or instead of a list of links."""
    data = value.data
    if isinstance(data, str) and names is SOURCES:
        return f"{_source_of(data)}({value.span.text})"
    if isinstance(data, Items) and data.values and names is LINKS:
        return " -> ".join(each.span.text for each in data.values)
    return None


def _source_of(path: str) -> str:
    """The source that reads a file, by how its name ends."""
    return max((len(end), name) for name, source in SOURCES.items() for end in source.ends if end in path)[1]


def convert_links(item: Any, values: tuple[Value, ...], context: Context, around: Converter) -> Any:
    """The links of a chain; all that is wrong with any of them is reported."""
    found = [around.convert(item, value, context) for value in values]
    return FAILED if any(link is FAILED for link in found) else tuple(found)


def _forms(names: Registry) -> list[str]:
    return [_form(names, name) for name in names]


def _form(names: Registry, name: str) -> str:
    """How a component is written: `python_stdlib()`, `text("…")`, `flatten`."""
    return names.form(name) if blocks.label_of(names[name]) is None else f'{name}("…")'


def _build(kind: type, call: Called, value: Value, around: Converter) -> Any:
    errors = _ArgumentErrors(around)
    known, variadic = settings_of(kind), blocks.label_of(kind)
    arguments: dict[str, Any] = {}
    given: dict[str, tuple[Span, Value]] = {}
    if variadic is not None:
        arguments[variadic.name] = _patterns(variadic, call, value, around)
    else:
        for name, each in zip(known, call.positional, strict=False):
            given[name] = (each.span, each)
        for extra in call.positional[len(known) :]:
            errors.too_many(call.name, len(known), extra)
            arguments[""] = FAILED
    method = given.get("method") or call.keywords.get("method")
    unsupported = method is not None and _is_later(kind, "method", method[1])
    for name, (span, each) in call.keywords.items():
        if name not in known:
            # The arguments of a method that is not there yet are not worth a second word.
            if not unsupported:
                errors.unknown(kind, call.name, name, span, (*given, *call.keywords))
            arguments[""] = FAILED
        elif name in given:
            errors.twice(call.name, name, span)
            arguments[""] = FAILED
        else:
            given[name] = (span, each)
    for name, (_, each) in given.items():
        attribute, meta = known[name]
        arguments[name] = around.convert(attribute.type, each, Context(name, call.name, kind, meta))
    if any(argument is FAILED for argument in arguments.values()):
        return FAILED
    return kind(**arguments)


def _is_later(kind: type, name: str, value: Value) -> bool:
    text = value.data.text if isinstance(value.data, Word) else value.data
    return isinstance(text, str) and text in later.WORDS.get((kind, name), ())


def _patterns(attribute: attrs.Attribute, call: Called, value: Value, around: Converter) -> Any:
    """The positional arguments of `text` and its like: at least one string; of `huggingface`, exactly one."""
    single = get_origin(attribute.type) is not tuple
    if not call.positional:
        needed = "the name of a dataset, or a folder" if single else "the path of a file, or a pattern"
        hint = f'write `{call.name}("{SOURCES[call.name].sample}")`'
        raise TypeMismatch("X220", f"`{call.name}` needs {needed}", value, hint=hint)
    if single and len(call.positional) > 1:
        _ArgumentErrors(around).too_many(call.name, 1, call.positional[1])
        return FAILED
    good = True
    for each in call.positional:
        if each.data is FAILED:
            good = False
        elif not isinstance(each.data, str):
            good = False
            text = each.span.text
            hint, fix = "give each path as an argument of its own", None
            if isinstance(each.data, Word):
                hint, fix = f'write `"{text}"`', Fix(each.span, f'"{text}"') if not each.via else None
            message = f"`{call.name}` takes strings, not {describe(each.data)}"
            around.diagnostics.error("X301", message, each.span, hint=hint, notes=each.notes, fix=fix)
        elif not each.data:
            good = False
            around.diagnostics.error("X304", "a path cannot be empty", each.span, notes=each.notes)
        elif problem := attribute.metadata["check"](each.data):
            good = False
            around.diagnostics.error("X304", f"what `{call.name}` reads {problem}", each.span, notes=each.notes)
    if not good:
        return FAILED
    found = tuple(each.data for each in call.positional)
    return found[0] if single else found


class _ArgumentErrors:
    def __init__(self, around: Converter) -> None:
        self.diagnostics = around.diagnostics

    def too_many(self, name: str, limit: int, extra: Value) -> None:
        takes = "no arguments" if limit == 0 else f"{limit} argument" + ("s" if limit > 1 else "")
        hint = f"write `{name}()`" if limit == 0 else "remove it"
        self.diagnostics.error("X220", f"`{name}` takes {takes}", extra.span, hint=hint)

    def twice(self, name: str, argument: str, span: Span) -> None:
        self.diagnostics.error("X220", f"`{argument}` of `{name}` is given twice", span, hint="keep one")

    def unknown(self, kind: type, name: str, argument: str, span: Span, given: Collection[str]) -> None:
        if argument in later.SETTINGS.get(kind, ()):
            self.diagnostics.error("X209", f"`{argument}` of `{name}` is not supported yet", span)
            return
        known = settings_of(kind)
        meant = closest(argument, known)
        of_dataset = issubclass(kind, Source) and argument in settings_of(blocks.KINDS["dataset"])
        owner = "this is a setting of the dataset: write it next to `source`" if of_dataset else None
        fields = f"arguments of `{name}`: {', '.join(known)}" if known else f"`{name}` has no named arguments"
        self.diagnostics.error(
            "X203", f"unknown argument `{argument}` of `{name}`", span,
            hint=f"did you mean `{meant}`?" if meant else owner, notes=[(fields, None)],
            fix=renamed(span, argument, known, taken=given),
        )  # fmt: skip
