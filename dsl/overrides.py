"""`--set path.to.field=value` and `--set name=value` for a `param`: applied last, reported like any other text."""

from collections.abc import Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from attrs import frozen

from . import blocks
from .diagnostics import Diagnostics
from .evaluate import Definition, Evaluator, Names
from .parser import parse_expression
from .quantity import Quantity
from .reading import Reading
from .schema.setting import Auto, open_setting, settings_of
from .sections import Entry, Label, Section, Tree
from .source import Source, Span
from .suggest import closest
from .values import FAILED, Value, describe

PATH = "--set"
_LAST = 1_000_000  # behind all files


@frozen
class Override:
    """One `--set`: the parts of the path with their places, and where the value stands."""

    parts: tuple[tuple[str, Span], ...]
    span: Span
    value: Span


def override_source(sets: Sequence[str]) -> Source:
    """All `--set` texts as one source, a line each."""
    return Source(PATH, "\n".join(text.replace("\n", " ") for text in sets), order=_LAST)


def read_overrides(source: Source, diagnostics: Diagnostics) -> list[Override]:
    """Split each line at its first `=`; a line without is reported."""
    found = []
    offset = 0
    for line in source.text.split("\n") if source.text else []:
        start, end = offset, offset + len(line)
        offset = end + 1
        path, sign, value = line.partition("=")
        whole = Span(source, start, end)
        if not sign or not path.strip() or not value.strip():
            diagnostics.error(
                "X218", "`--set` wants a path and a value", whole, hint="write `--set path.to.field=value`"
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


def set_params(
    overrides: list[Override], reading: Reading, evaluator: Evaluator, diagnostics: Diagnostics
) -> list[Override]:
    """Apply those that name a `param`; the others come back."""
    rest = []
    for override in overrides:
        name = override.parts[0][0]
        definition = reading.params.get(name) if len(override.parts) == 1 else None
        if definition is None:
            rest.append(override)
        else:
            _set_param(definition, override, reading, evaluator, diagnostics)
    for definition in reading.definitions:
        # What was computed to learn the types of the defaults may rest on values that are replaced now.
        definition.value, definition.used = None, False
    return rest


def _set_param(
    definition: Definition, override: Override, reading: Reading, evaluator: Evaluator, diagnostics: Diagnostics
) -> None:
    """Replace the default of a `param` by a value of the same type and unit."""
    default = evaluator.definition(definition)
    if default.data is FAILED:
        return
    if isinstance(default.data, str):
        value = _text_value(override.value, reading, evaluator, diagnostics)
    else:
        value = _value(override.value, reading, evaluator, diagnostics)
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
        diagnostics.error(
            "X310", f"`{name}` is {_kind(wanted)}, not {describe(given)}", override.value,
            notes=[("its default says so", definition.name.span)],
        )  # fmt: skip
        return
    definition.replaced = Value(given, override.value)


def _kind(data: Any) -> str:
    match data:
        case bool():
            return "`true` or `false`"
        case int():
            return "a whole number"
        case float():
            return "a number"
    return describe(data)


def set_fields(
    overrides: list[Override], tree: Tree, reading: Reading, evaluator: Evaluator, diagnostics: Diagnostics
) -> None:
    """Apply overrides of settings and labels to the tree; a path that leads nowhere is reported."""
    for override in overrides:
        _set_field(override, tree, reading, evaluator, diagnostics)


def _set_field(
    override: Override, tree: Tree, reading: Reading, evaluator: Evaluator, diagnostics: Diagnostics
) -> None:
    name, span = override.parts[0]
    rest = override.parts[1:]
    if name == "collate" and not rest:
        value = _value(override.value, reading, evaluator, diagnostics)
        if value is not None:
            tree.root.entries["collate"] = Entry(span, value, PATH)
        return
    if name not in blocks.KINDS:
        candidates = (*blocks.KINDS, "collate", *reading.params)
        _no_such(name, span, candidates, "block" if rest else "param or block", diagnostics)
        return
    block = blocks.KINDS[name]
    if name in blocks.NAMED:
        section = _named(name, rest, tree, span, diagnostics)
        if section is None:
            return
        rest = rest[1:]
        if not rest:
            diagnostics.error("X217", f"`{name}` is a block", override.span, hint=f"set one of its fields: "
                              f"{', '.join(settings_of(block))}")  # fmt: skip
            return
    else:
        section = tree.root.block(name)
    _descend(block, section, override, rest, reading, evaluator, diagnostics)


def _named(
    kind: str, rest: tuple[tuple[str, Span], ...], tree: Tree, span: Span, diagnostics: Diagnostics
) -> Section | None:
    known = tree.named.get(kind, {})
    if not rest:
        diagnostics.error("X217", f"`{kind}` needs a name and a field", span, hint=f"write `{kind}.NAME.FIELD=value`")
        return None
    label, place = rest[0]
    if label not in known:
        _no_such(label, place, known, kind, diagnostics)
        return None
    return known[label]


def _descend(
    block: type, section: Section, override: Override, rest: tuple[tuple[str, Span], ...], reading: Reading,
    evaluator: Evaluator, diagnostics: Diagnostics,
) -> None:  # fmt: skip
    """Follow the path through nested blocks to a setting or a label."""
    if not section.heads:
        section.heads.append(override.parts[-1][1])
    label = blocks.label_of(block)
    if not rest or (len(rest) == 1 and label is not None and rest[0][0] == label.name):
        if label is None:
            fields = ", ".join(settings_of(block))
            diagnostics.error(
                "X217", f"`{section.kind}` is a block", override.span, hint=f"set one of its fields: {fields}"
            )
            return
        value = (_text_value if label.type is str else _value)(override.value, reading, evaluator, diagnostics)
        if value is not None:
            section.labels = [Label(value)]
        return
    name, span = rest[0]
    known = settings_of(block)
    free = open_setting(block)
    if name not in known and free is not None and len(rest) == 1:
        value = _value(override.value, reading, evaluator, diagnostics)
        if value is not None:
            section.entries[name] = Entry(span, value, PATH)
            section.lost.discard(name)
        return
    if name not in known:
        _no_such(name, span, known, f"field of `{section.kind}`", diagnostics)
        return
    attribute, _ = known[name]
    if blocks.is_block(attribute.type):
        _descend(attribute.type, section.block(name), override, rest[1:], reading, evaluator, diagnostics)
        return
    if len(rest) > 1:
        diagnostics.error("X217", f"`{name}` has no fields", rest[1][1], hint=f"write `--set …{name}=value`")
        return
    # A shell eats quotes, and `1f1b` is no name without: a word of the setting is one as it stands.
    is_word = get_origin(attribute.type) is Literal and override.value.text in get_args(attribute.type)
    automatic = override.value.text == "auto" and Auto in _parts(attribute.type)
    takes_text = (str in _parts(attribute.type) or is_word) and not automatic
    value = (_text_value if takes_text else _value)(override.value, reading, evaluator, diagnostics)
    if value is not None:
        section.entries[name] = Entry(span, value, PATH)
        section.lost.discard(name)


def _parts(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _no_such(name: str, span: Span, candidates: Any, what: str, diagnostics: Diagnostics) -> None:
    meant = closest(name, candidates)
    known = ", ".join(candidates)
    notes = [(f"there are {known}" if known else "there are none", None)]
    diagnostics.error(
        "X217", f"there is no {what} called `{name}`", span, hint=f"did you mean `{meant}`?" if meant else None,
        notes=[] if meant else notes,
    )  # fmt: skip


def _value(span: Span, reading: Reading, evaluator: Evaluator, diagnostics: Diagnostics) -> Value | None:
    """The expression at a place, which may refer to params; None after reporting that it is none."""
    node = parse_expression(span.source, span.start, span.end, diagnostics)
    return None if node is None else evaluator.value(node, Names(reading.params))


def _text_value(span: Span, reading: Reading, evaluator: Evaluator, diagnostics: Diagnostics) -> Value:
    """The text at a place, which may but need not stand in quotes; `none` is the constant."""
    quiet = Diagnostics()
    node = parse_expression(span.source, span.start, span.end, quiet)
    if node is not None and (span.text.startswith('"') or span.text == "none"):
        return evaluator.value(node, Names(reading.params))
    return Value(span.text, span)
