"""Every setting of a spec, one after the other, and other values for each."""

import json
from collections.abc import Container, Iterator
from types import NoneType
from typing import Any, get_args, get_origin

import attrs

from xtrain.components.sources.jsonl import JsonLines
from xtrain.components.sources.text import Text
from xtrain.dsl.schema.blocks import choices_of, is_block
from xtrain.dsl.schema.setting import Auto, attributes_of, settings_of
from xtrain.dsl.values import Interval, MeasuredNumber, Metric, Quantity


def label_of(value: Any) -> str:
    """The attribute with the name of a component that is chosen by name; empty for what is not."""
    registry = getattr(type(value), "components", None)
    return "" if registry is None else registry.key


def places(value: Any, path: str = "", *, exempt: Container[str] = ()) -> Iterator[tuple[str, attrs.Attribute]]:
    """(path, attribute) of every value in a tree of schema classes, tuples and dicts."""
    for attribute in attributes_of(type(value)):
        name = f"{path}.{attribute.name}".strip(".")
        if attribute.name == label_of(value):
            attribute = type(value).components.label()
        if name not in exempt:
            yield from _inside(getattr(value, attribute.name), name, attribute, exempt)


def _inside(
    value: Any, path: str, attribute: attrs.Attribute, exempt: Container[str]
) -> Iterator[tuple[str, attrs.Attribute]]:
    if path in exempt:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _inside(item, f"{path}.{key}", attribute, exempt)
    elif isinstance(value, tuple) and value and attrs.has(type(value[0])):
        for number, item in enumerate(value):
            yield from places(item, f"{path}.{number}", exempt=exempt)
    elif attrs.has(type(value)) and not isinstance(value, Quantity | Auto):
        if attribute.name == "source":
            yield path, attribute
        yield from places(value, path, exempt=exempt)
    else:
        yield path, attribute


def at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value[name] if isinstance(value, dict) else value[int(name)] if name.isdigit() else getattr(value, name)
    return value


def replaced(value: Any, path: str, new: Any) -> Any:
    name, _, rest = path.partition(".")
    if isinstance(value, dict):
        return {**value, name: replaced(value[name], rest, new) if rest else new}
    if isinstance(value, tuple):
        changed = list(value)
        changed[int(name)] = replaced(value[int(name)], rest, new)
        return tuple(changed)
    if name == label_of(value):
        chosen = type(value).components[new]
        known, before = attrs.fields_dict(chosen), attrs.fields_dict(type(value)).keys()
        kept = {each: getattr(value, each) for each, a in known.items() if a.init and each in before - {name}}
        required = {each: meta for each, (a, meta) in settings_of(chosen).items() if a.default is attrs.NOTHING}
        needed = {each: json.loads(meta.example) for each, meta in required.items() if each not in kept}
        return chosen(**{**needed, **kept})
    return attrs.evolve(value, **{name: replaced(getattr(value, name), rest, new) if rest else new})


def holds_blocks(annotation: Any) -> bool:
    """Whether a setting is a block, or a list of them."""
    parts = (part for one in (annotation, *get_args(annotation)) for part in (one, *get_args(one)))
    return any(is_block(part) for part in parts if part is not Auto)


def alternatives(value: Any, annotation: Any) -> list[Any]:
    """Other values of the same type, likely ones first; not all of them make sense. None of a block that is not there,
    which is no single setting."""
    if value in (None, ()) and holds_blocks(annotation):
        return []
    for kind in (annotation, *get_args(annotation)):
        if get_origin(kind) is tuple and not attrs.has(get_args(kind)[0]):
            return lists(value, get_args(kind)[0])
    if choices := choices_of(annotation):
        return [choice for choice in choices if choice != value]
    if isinstance(value, Quantity):
        return [
            Quantity(n, value.unit) for n in (value.value * 2, value.value + 5, value.value / 2) if n != value.value
        ]
    kinds = get_args(annotation) or (annotation,)
    if isinstance(value, bool) or bool in kinds:
        return [not value] if isinstance(value, bool) else [True, False]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [value * 2, value + 1, value / 2] if isinstance(value, float) else [value * 2, value + 1, value * 3]
    if {Metric, MeasuredNumber} & {*get_args(annotation)}:
        return [MeasuredNumber("eval.code.loss") if value is None else None]
    if isinstance(value, str):
        return [f"{value}2", "other", "code"]
    if Interval in kinds:
        return [Interval(8, 16)]
    if isinstance(value, Auto) and Quantity in kinds:
        return [Quantity(number, unit) for unit in ("seconds", "%", "bytes") for number in (50, 90)]
    if value is None and Quantity in kinds:
        return [Quantity(7, "steps"), Quantity(60, "seconds")]
    if isinstance(value, Auto) or value is None:
        found: list[Any] = [2, 4, 6, 16, 1, 128] if int in kinds else [0.5, 3.0] if float in kinds else ["else"]
        return [*found, *([None] if NoneType in kinds and value is not None else [])]
    return [Text(("c/*.txt",)), JsonLines(("c/*.jsonl",))]


def lists(value: Any, kind: Any) -> list[Any]:
    """Other lists of a kind of elements: words, layers of four stages that have eight, numbers, texts."""
    if choices := choices_of(kind):
        return [(choice,) for choice in choices if (choice,) != value]
    if kind is int:
        return [(1, 2, 2, 3)]
    if kind is float:
        return [tuple(v / 2 for v in value)]
    return [(*value, "more"), *([value[:-1]] if value[1:] else [])]
