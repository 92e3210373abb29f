"""A spec as a JSON object, of the shape that `json_schema` describes: the form for programs that write no .xtrain.

A block is an object whose label stands among its settings under its own name; `none` is null, `auto` the string "auto",
and a quantity a string, as a spec has it: "600 steps". An action, source or link is an object with one key, its name.
"""

from typing import Any

import attrs

from xtrain.dsl import blocks
from xtrain.dsl.dimension import Dimension
from xtrain.dsl.evaluation.values import quantity_text
from xtrain.dsl.interval import Interval
from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.actions import Action
from xtrain.dsl.schema.component import Component, Registry, UserComponent
from xtrain.dsl.schema.model import FOLDER
from xtrain.dsl.schema.setting import AUTO, spelled
from xtrain.dsl.spec import Spec


def spec_json(spec: Spec) -> dict[str, Any]:
    """The whole spec, defaults included."""
    found: dict[str, Any] = {"use": spec.used} if spec.used else {}
    serves = spec.serve is not None
    for kind, without in blocks.blocks_of(serves=serves).items():
        if kind in blocks.NAMED:
            named = getattr(spec, blocks.NAMED[kind])
            found[kind] = {name: _block(each, without=("name",)) for name, each in named.items()}
        elif (kind != "mixture" or spec.mixture.weights) and getattr(spec, kind) is not None:
            found[kind] = _block(getattr(spec, kind), without)
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


def _block(block: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The label and the settings of a block; those of another label are left out."""
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
            found[spelled(attribute)] = _block(given, inner) if inner else value_json(given)
    return found


def value_json(value: Any) -> Any:
    """A value of a setting."""
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
    return {value.kind: _block(value)} if isinstance(value, Action) or _is_called(value) else _block(value)


def _is_called(value: Any) -> bool:
    """Whether a spec chooses it by a call, as `source = text("*.txt")`."""
    kind = getattr(value, "components", None)  # actions are chosen otherwise
    return isinstance(kind, Registry) and bool(kind.call)
