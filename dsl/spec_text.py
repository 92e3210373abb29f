"""A `Spec` as text and as a JSON object.

The text writes out every value, defaults included, in an order that depends only on the schema. The JSON object has the
shape of `json_schema`: the form for programs that do not write .xtrain.
"""

import re
from typing import Any

import attrs

from xtrain.dsl.diagnostics.diagnostic import printable
from xtrain.dsl.evaluation.values import quantity_text
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.actions import Action, OnEvent, Tick
from xtrain.dsl.schema.component import Component, Registry, UserComponent
from xtrain.dsl.schema.data_components import Tokenizer
from xtrain.dsl.schema.model import FOLDER, Model, snapshot_named, snapshot_text
from xtrain.dsl.schema.setting import AUTO, is_unspoken, open_setting, settings_of, spelled
from xtrain.dsl.spec import Spec
from xtrain.dsl.user_parts.files import is_file
from xtrain.dsl.values import Dimension, HiddenText, Interval, MeasuredNumber, Metric, Quantity, Variable

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|1f1b")
_RESERVED = ("true", "false", "none", "auto", "then")


def resolved_text(spec: Spec) -> str:
    """Return the text of a spec that loads to an equal one, without references, includes or implicit defaults."""
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
    """Return the target of a `use`: the path of a file in quotes, the name of a module without."""
    return _string(module) if is_file(module) else module


def _block(kind: str, value: Any, indent: str = "", without: tuple[str, ...] = ()) -> str:
    block = type(value)
    label = blocks.label_of(block)
    head = kind if label is None else f"{kind} {_label(getattr(value, label.name))}"
    if isinstance(value, Tokenizer):
        head = f"{kind} {tokenizer_text(value.source)}"
    if isinstance(value, Model) and value.folder is not None:
        folder = value.folder
        where = snapshot_text(folder.repo, folder.revision) if folder.repo else _string(folder.path)
        head = f"{kind} {where}"
    lines = []
    inner = indent + "  "
    free = open_setting(block)
    if free is not None:
        given = getattr(value, free[0].name)
        for name, each in given.items():
            is_a = isinstance(each, Dimension)
            lines.append(inner + (f"{name} in {each}" if is_a else f"{_label(name)} = {value_text(each)}"))
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


def tokenizer_text(source: str) -> str:
    """Return the label of a tokenizer."""
    return _label(source) if snapshot_named(source) is None else source


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
    """Return True if a name needs no quotes and can precede `=`."""
    return _NAME.fullmatch(name) is not None and name not in _RESERVED


def _label(value: Any) -> str:
    if isinstance(value, str):
        return value if is_plain(value) else _string(value)
    return value_text(value)


def value_text(value: Any) -> str:
    """Return a value as a spec writes it."""
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


def spec_json(spec: Spec) -> dict[str, Any]:
    """Return the whole spec as JSON, defaults included."""
    found: dict[str, Any] = {"use": spec.used} if spec.used else {}
    serves = spec.serve is not None
    for kind, without in blocks.blocks_of(serves=serves).items():
        if kind in blocks.NAMED:
            named = getattr(spec, blocks.NAMED[kind])
            found[kind] = {name: _block_json(each, without=("name",)) for name, each in named.items()}
        elif (kind != "mixture" or spec.mixture.weights) and getattr(spec, kind) is not None:
            found[kind] = _block_json(getattr(spec, kind), without)
    if serves:
        return found
    found["collate"] = [value_json(link) for link in spec.collate]
    found["every"] = [{"every": value_json(t.every), "actions": value_json(t.actions)} for t in spec.ticks]
    found["on"] = [
        {"event": event.event, "actions": value_json(event.actions)}
        | ({"count": event.count} if event.event == "nan" else {})
        for event in spec.events
    ]
    return found


def _block_json(block: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the label and the settings of a block as JSON, without the settings of other labels."""
    label = blocks.label_of(type(block))
    chosen = getattr(block, label.name) if label is not None else None
    found: dict[str, Any] = {}
    for attribute in attrs.fields(type(block)):
        meta = attribute.metadata.get("setting")
        if blocks.is_block(attribute.type) and getattr(block, attribute.name) is None:
            continue
        if meta is not None and meta.names:
            found |= value_json(getattr(block, attribute.name))
        elif FOLDER in attribute.metadata:
            if (folder := getattr(block, attribute.name)) is not None:
                hub = {"repo": folder.repo, "revision": folder.revision}
                found[attribute.name] = hub if folder.repo else folder.path
        elif spelled(attribute) not in without and (meta is None or not meta.only or chosen in meta.only):
            given = getattr(block, attribute.name)
            inner = meta.without if meta is not None else ()
            found[spelled(attribute)] = _block_json(given, inner) if inner else value_json(given)
    return found


def value_json(value: Any) -> Any:
    """Return the value of a setting as JSON."""
    if value is AUTO:
        return "auto"
    match value:
        case Quantity():
            return quantity_text(value)
        case Interval() | Dimension():
            return str(value)
        case tuple():
            return [value_json(item) for item in value]
        case dict():
            return {name: value_json(item) for name, item in value.items()}
        case Component() if _is_called(value) and isinstance(value, UserComponent):
            return {value.function: value_json(value.given())}
        case None | bool() | int() | float() | str():
            return value
    return {value.kind: _block_json(value)} if isinstance(value, Action) or _is_called(value) else _block_json(value)


def _is_called(value: Any) -> bool:
    """Return True if a spec chooses the value by a call, as `source = text("*.txt")`."""
    kind = getattr(value, "components", None)  # actions are not chosen by calls
    return isinstance(kind, Registry) and bool(kind.call)
