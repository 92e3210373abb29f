"""A path of `--set` down to a setting or a label of a block, and the value that is put there."""

from collections.abc import Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from attrs import frozen

from xtrain.dsl import blocks
from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.diagnostics.source import Span
from xtrain.dsl.diagnostics.suggest import closest
from xtrain.dsl.dimension import Dimension
from xtrain.dsl.evaluation.evaluate import Evaluator, Names
from xtrain.dsl.evaluation.includes import ReadStatements
from xtrain.dsl.evaluation.sections import Label, Section, SectionEntry
from xtrain.dsl.evaluation.values import Value
from xtrain.dsl.schema.setting import Auto, open_setting, settings_of
from xtrain.dsl.syntax.parser import parse_expression

PATH = "--set"
Parts = tuple[tuple[str, Span], ...]
"""The parts of a path, with their places."""


@frozen
class Override:
    """One `--set`: the parts of the path with their places, and where the value stands."""

    parts: Parts
    span: Span
    value: Span


def descend(
    block: type, section: Section, override: Override, rest: tuple[tuple[str, Span], ...], reading: ReadStatements,
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
                "X217", f"`{section.kind}` is a block", override.span, hint=f"set one of its settings: {fields}"
            )
            return
        value = (text_of if label.type is str else value_of)(override.value, reading, evaluator, diagnostics)
        if value is not None:
            section.labels = [Label(value)]
        return
    name, span = rest[0]
    known = settings_of(block)
    free = open_setting(block)
    if name not in known and free is not None and get_args(free[0].type)[1] is Dimension:
        name, rest = ".".join(part for part, _ in rest), rest[:1]
        section.varied.add(name)
    if name not in known and free is not None and len(rest) == 1:
        value = value_of(override.value, reading, evaluator, diagnostics)
        if value is not None:
            section.entries[name] = SectionEntry(span, value)
            section.lost.discard(name)
        return
    if name not in known:
        no_such(name, span, known, f"setting of `{section.kind}`", diagnostics)
        return
    attribute, _ = known[name]
    if blocks.is_block(attribute.type):
        descend(attribute.type, section.block(name), override, rest[1:], reading, evaluator, diagnostics)
        return
    if len(rest) > 1:
        diagnostics.error(
            "X217", f"`{name}` is a setting, not a block", rest[1][1], hint=f"write `--set …{name}=value`"
        )
        return
    # A shell eats quotes, and `1f1b` is no name without: a word of the setting is one as it stands.
    is_word = get_origin(attribute.type) is Literal and override.value.text in get_args(attribute.type)
    automatic = override.value.text == "auto" and Auto in _parts(attribute.type)
    takes_text = (str in _parts(attribute.type) or is_word) and not automatic
    value = (text_of if takes_text else value_of)(override.value, reading, evaluator, diagnostics)
    if value is not None:
        section.entries[name] = SectionEntry(span, value)
        section.lost.discard(name)


def _parts(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def no_such(
    name: str, span: Span, candidates: Any, what: str, diagnostics: Diagnostics, near: Sequence[str] = ()
) -> None:
    """Report an unknown name. near: what it was meant for, if that is known; else the closest candidate is named."""
    meant = "` or `".join(near) or closest(name, candidates)
    known = ", ".join(candidates)
    notes = [(f"there are {known}" if known else "there are none", None)]
    diagnostics.error(
        "X217", f"there is no {what} called `{name}`", span, hint=f"did you mean `{meant}`?" if meant else None,
        notes=[] if meant else notes,
    )  # fmt: skip


def value_of(span: Span, reading: ReadStatements, evaluator: Evaluator, diagnostics: Diagnostics) -> Value | None:
    """The expression at a place, which may refer to params; None after reporting that it is none."""
    node = parse_expression(span.source, span.start, span.end, diagnostics)
    return None if node is None else evaluator.value(node, Names(reading.params))


def text_of(span: Span, reading: ReadStatements, evaluator: Evaluator, diagnostics: Diagnostics) -> Value:
    """The text at a place, which may but need not stand in quotes; `none` is the constant."""
    quiet = Diagnostics()
    node = parse_expression(span.source, span.start, span.end, quiet)
    if node is not None and (span.text.startswith('"') or span.text == "none"):
        return evaluator.value(node, Names(reading.params))
    return Value(span.text, span)
