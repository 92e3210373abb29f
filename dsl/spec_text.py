"""A `Spec` as text: every value written out, defaults included, in an order that depends on nothing but the schema."""

import re
from typing import Any

import attrs

from xtrain.dsl import blocks
from xtrain.dsl.diagnostics.source import printable
from xtrain.dsl.dimension import Dimension
from xtrain.dsl.env_text import HiddenText, Variable
from xtrain.dsl.evaluation.values import quantity_text
from xtrain.dsl.interval import Interval
from xtrain.dsl.metric import MeasuredNumber, Metric
from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.actions import Action, OnEvent, Tick
from xtrain.dsl.schema.component import Component, UserComponent
from xtrain.dsl.schema.model import Model, ModelFolder
from xtrain.dsl.schema.setting import AUTO, is_unspoken, open_setting, settings_of
from xtrain.dsl.spec import Spec
from xtrain.dsl.user_parts.files import is_file

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|1f1b")
_RESERVED = ("true", "false", "none", "auto", "then")


def resolved_text(spec: Spec) -> str:
    """A spec that loads to one equal to `spec`, without references, includes or defaults left to the reader."""
    parts = ["\n".join(f"use {used_text(module)}" for module in used)] if (used := spec.used) else []
    serves = spec.serve is not None
    for kind, without in blocks.blocks_of(serves=serves).items():
        if kind in blocks.NAMED:
            parts += [_block(kind, named) for named in getattr(spec, blocks.NAMED[kind]).values()]
        elif (kind != "mixture" or spec.mixture.weights) and getattr(spec, kind) is not None:
            parts.append(_block(kind, getattr(spec, kind), without=without))
    if serves:
        return "\n\n".join(parts) + "\n"
    parts.append(f"collate = {' -> '.join(value_text(link) for link in spec.collate)}")
    parts += ["\n".join(_trigger(trigger) for trigger in group) for group in (spec.ticks, spec.events) if group]
    return "\n\n".join(parts) + "\n"


def used_text(module: str) -> str:
    """The target of a `use`: the path of a file in quotes, the name of a module without."""
    return _string(module) if is_file(module) else module


def _block(kind: str, value: Any, indent: str = "", without: tuple[str, ...] = ()) -> str:
    block = type(value)
    label = blocks.label_of(block)
    head = kind if label is None else f"{kind} {_label(getattr(value, label.name))}"
    if isinstance(value, Model) and value.folder is not None:
        head = f"{kind} {_folder(value.folder)}"
    lines = []
    inner = indent + "  "
    free = open_setting(block)
    if free is not None:
        given = getattr(value, free[0].name)
        lines += [f"{inner}{_free(name, each)}" for name, each in given.items()]
    for name, (attribute, meta) in settings_of(block).items():
        given = getattr(value, attribute.name)
        if meta.only and label is not None and getattr(value, label.name) not in meta.only:
            continue
        if name in without or is_unspoken(attribute, meta, given):
            continue
        if blocks.is_block(attribute.type):
            lines.append(inner + _block(name, given, inner, meta.without))
        else:
            lines.append(f"{inner}{name} = {value_text(given)}")
    if not lines:
        return head if label is not None else f"{head} {{}}"
    return "\n".join([f"{head} {{", *lines, f"{indent}}}"])


def _free(name: str, value: Any) -> str:
    return f"{name} in {value}" if isinstance(value, Dimension) else f"{_label(name)} = {value_text(value)}"


def _folder(folder: ModelFolder) -> str:
    return f'hub({_string(folder.repo)}, revision = "{folder.revision}")' if folder.repo else _string(folder.path)


def _trigger(trigger: Tick | OnEvent) -> str:
    actions = " then ".join(_action(action) for action in trigger.actions)
    if isinstance(trigger, Tick):
        return f"every {quantity_text(trigger.every)} {actions}"
    count = "" if trigger.count is None else f"({trigger.count})"
    return f"on {trigger.event}{count} {actions}"


def _action(action: Action) -> str:
    label = blocks.label_of(type(action))
    head = action.kind
    if label is not None and action.called:
        head = f"{head}({value_text(getattr(action, label.name))})"
    elif label is not None:
        head = f"{head} {_label(getattr(action, label.name))}"
    given = (
        (name, attribute, meta, getattr(action, attribute.name))
        for name, (attribute, meta) in settings_of(type(action)).items()
    )
    fields = [f"{name} = {value_text(value)}" for name, a, meta, value in given if not is_unspoken(a, meta, value)]
    return f"{head} {{ {', '.join(fields)} }}" if fields else head


def is_plain(name: str) -> bool:
    """Whether a name can be written without quotes, and so stand before a `=`."""
    return _NAME.fullmatch(name) is not None and name not in _RESERVED


def _label(value: Any) -> str:
    if isinstance(value, str):
        return value if is_plain(value) else _string(value)
    return value_text(value)


def value_text(value: Any) -> str:
    """A value as a spec writes it."""
    if value is AUTO or value is None:
        return "auto" if value is AUTO else "none"
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case Metric() | MeasuredNumber() | Interval() | Dimension():
            return str(value)
        case HiddenText():
            pieces = (f'env("{p.name}")' if isinstance(p, Variable) else _string(p) for p in value.pieces)
            return " + ".join(pieces)
        case str():
            return _string(value)
        case Quantity():
            return quantity_text(value)
        case tuple() | list():
            return f"[{', '.join(value_text(item) for item in value)}]"
        case dict():
            entries = [f"{_label(name)}: {value_text(item)}" for name, item in value.items()]
            return f"{{ {', '.join(entries)} }}" if entries else "{}"
        case UserComponent():
            return f"{value.function}({', '.join(f'{k} = {value_text(v)}' for k, v in value.given().items())})"
    return _call(value)


def _call(value: Component) -> str:
    arguments = []
    for attribute in attrs.fields(type(value)):
        given = getattr(value, attribute.name)
        if "setting" in attribute.metadata:
            arguments.append(f"{attribute.name} = {value_text(given)}")
        else:
            arguments += [value_text(item) for item in (given if isinstance(given, tuple) else (given,))]
    return f"{value.kind}({', '.join(arguments)})" if arguments else value.components.form(value.kind)


def _string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{printable(escaped)}"'
