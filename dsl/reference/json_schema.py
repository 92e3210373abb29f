"""The schema of the language as JSON Schema (draft 2020-12), for editors and for programs that write specs.

It describes the objects that `spec_json` returns. Rules beyond JSON Schema, such as which axes fit together, are left
to `xtrain check`.
"""

from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import attrs

from xtrain.dsl.reference.reference import described, label_setting
from xtrain.dsl.schema import actions, blocks
from xtrain.dsl.schema.component import Registry, UserComponent, is_call, members_of, registry_of
from xtrain.dsl.schema.data_components import LINKS, usual_chain
from xtrain.dsl.schema.model import FOLDER
from xtrain.dsl.schema.setting import AUTO, Auto, Range, Setting, TextCheck, open_setting, settings_of, spelled
from xtrain.dsl.spec_text import value_json
from xtrain.dsl.syntax.lexer import MULTIPLIERS
from xtrain.dsl.values import UNITS, Dimension, Interval, MeasuredNumber, Metric, Quantity

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_NAME: Final = r"^[A-Za-z_][A-Za-z0-9_]*$"
_NUMBER: Final = r"[0-9]+(_[0-9]+)*(\.[0-9]+(_[0-9]+)*)?([eE][-+]?[0-9]+)?"
Schema = dict[str, Any]
# A function declared by `use`, by its name.
_OWN: Final[Schema] = {"type": "object", "description": "arguments of a function of your own, by name"}

# Model location: `model "folder"`, or the exact snapshot of `model hub(…)`.
_MODEL_FOLDER: Final[Schema] = {
    "description": "folder with the model's config.json and weights, or name and commit of a snapshot of the hub",
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"repo": {"type": "string"}, "revision": {"type": "string"}},
            "required": ["repo", "revision"],
            "additionalProperties": False,
        },
    ],
}


def json_schema() -> Schema:
    """Return the schema of a whole spec."""
    properties = {kind: _block(block) for kind, block in blocks.KINDS.items()}
    for kind in blocks.NAMED:
        properties[kind] = {
            "description": described(blocks.KINDS[kind])[1],
            "type": "object",
            "additionalProperties": _block(blocks.KINDS[kind], without=(_name_of(kind),)),
        }
    properties["dataset"]["minProperties"] = 1
    links = {"type": "array", "minItems": 1, "items": _call_of(LINKS)}
    properties["collate"] = {"description": "links from samples to rows", **links}
    properties["collate"]["default"] = value_json(usual_chain())
    used = "modules of your own Python functions: paths relative to the spec, or dotted names"
    properties["use"] = {"description": used, "type": "array", "items": {"type": "string"}}
    for key, kind in (("every", actions.Tick), ("on", actions.OnEvent)):
        properties[key] = {"description": described(kind)[1], "type": "array", "items": _trigger(kind)}
    return {
        "$schema": DIALECT,
        "title": "xtrain spec",
        "description": "A training experiment, as `xtrain schema SPEC` prints it.",
        "type": "object",
        "properties": properties,
        "required": [kind for kind in blocks.REQUIRED if blocks.is_of_servers(kind)],
        "additionalProperties": False,
        "if": {"not": {"required": ["use"]}},
        "then": {"properties": _without_own()},
        "allOf": [_of_servers(properties)],
        "$defs": {"action": {**_one_of(blocks.ACTIONS), "additionalProperties": _OWN}, **_calls(properties)},
    }


def _call_of(registry: Registry[Any]) -> Schema:
    """Return the schema of a call that chooses a component."""
    return {"$ref": f"#/$defs/{registry.word}"}


def _calls(schema: Schema) -> dict[str, Schema]:
    """Return the definitions of the call kinds in a schema and in their arguments."""
    found: dict[str, Schema] = {}
    open_ = [schema]
    while open_:
        for word in set(_referred(open_.pop())) - {"action", *found}:
            registry = Registry.of_calls[word]
            found[word] = {**_one_of(registry), **({"additionalProperties": _OWN} if registry.takes_functions else {})}
            open_.append(found[word])
    return dict(sorted(found.items()))


def _referred(schema: Any) -> Iterator[str]:
    """Yield the names of definitions that a schema refers to."""
    if isinstance(schema, dict):
        if isinstance(at := schema.get("$ref"), str):
            yield at.rpartition("/")[2]
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            yield from _referred(each)


def _of_servers(properties: dict[str, Schema]) -> Schema:
    """Return what depends on `serve`, and remove it from the requirements of all specs."""
    needed: dict[str, Schema] = {}
    for kind in blocks.OF_SERVERS:
        names = [name for name in properties[kind]["required"] if not blocks.is_of_servers(f"{kind}.{name}")]
        if names:
            properties[kind]["required"] = [name for name in properties[kind]["required"] if name not in names]
            needed[kind] = {"required": names}
    foreign = {kind: False for kind in properties if kind not in (*blocks.OF_SERVERS, "use")}
    inner = {kind: {"properties": dict.fromkeys(blocks.not_of_servers(kind), False)} for kind in blocks.OF_SERVERS}
    return {
        "if": {"required": ["serve"]},
        "then": {"properties": {**foreign, **{k: each for k, each in inner.items() if each["properties"]}}},
        "else": {
            "required": [*(kind for kind in blocks.REQUIRED if not blocks.is_of_servers(kind)), "dataset"],
            "properties": needed,
        },
    }


def _without_own() -> dict[str, Schema]:
    """Return the restrictions of a spec without user modules: labels are existing names."""
    found: dict[str, Schema] = {}
    for kind, block in blocks.KINDS.items():
        registry, label = registry_of(block), blocks.label_of(block)
        if registry is not None and registry.takes_functions and label is not None:
            found[kind] = {"properties": {label.name: {"enum": list(registry)}}}
        if (registry := members_of(block)) is not None:
            found[kind] = {"propertyNames": {"enum": list(registry)}}
    action = {"propertyNames": {"enum": list(blocks.ACTIONS)}}
    triggers = {"items": {"properties": {"actions": {"items": action}}}}
    return {**found, "every": triggers, "on": triggers}


def _name_of(kind: str) -> str:
    label = blocks.label_of(blocks.KINDS[kind])
    assert label is not None
    return label.name


def _one_of(table: Mapping[str, type]) -> Schema:
    """Return the schema of an object with one key: the name of an action, source or link, with its settings."""
    return {
        "type": "object",
        "properties": {name: _block(kind) for name, kind in table.items()},
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
    }


def _trigger(kind: type) -> Schema:
    schema = _block(kind)
    schema["properties"]["actions"] = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/action"}}
    return schema


def _block(block: type, without: tuple[str, ...] = ()) -> Schema:
    """Return the schema of a block with its label and settings, some of which depend on the label."""
    known = settings_of(block)
    label = blocks.label_of(block)
    properties: dict[str, Schema] = {}
    required: list[str] = []
    for attribute in blocks.fields_of(block):
        name = spelled(attribute)
        meta = attribute.metadata.get("setting")
        if name in without or (meta is not None and meta.names):
            continue
        properties[name] = _setting(attribute, meta)
        if attribute.default is attrs.NOTHING:
            required.append(name)
    registry = registry_of(block)
    if registry is not None and any(FOLDER in each.metadata for each in attrs.fields(registry.default)):
        properties[FOLDER] = _MODEL_FOLDER
    schema: Schema = {
        "description": described(block)[1],
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": issubclass(block, UserComponent),  # only the spec knows the settings of user components
    }
    if (members := members_of(block)) is not None and members.takes_functions:
        schema["additionalProperties"] = _OWN
    if registry is not None and registry.takes_functions:
        assert label is not None
        schema |= _with_own(schema, list(registry), label.name)
    if (free := open_setting(block)) is not None:
        schema["additionalProperties"] = {**_typed(get_args(free[0].type)[1], free[1]), "description": free[1].doc}
    rules = _rules_of_labels(known, label)
    return {**schema, "allOf": rules} if rules else schema


def _with_own(schema: Schema, names: list[str], label: str) -> Schema:
    """Return the schema of a block whose label may also name a user function, with any settings."""
    properties = dict(schema["properties"])
    about = {key: value for key, value in properties[label].items() if key not in ("type", "enum")}
    properties[label] = {"anyOf": [{"enum": names}, {"type": "string", "pattern": _NAME}], **about}
    known = {"properties": {label: {"enum": names}}, "required": [label]}
    only_known = {"propertyNames": {"enum": list(properties)}}
    return {"properties": properties, "additionalProperties": True, "if": known, "then": only_known}


def _rules_of_labels(
    known: Mapping[str, tuple[attrs.Attribute, Setting]], label: attrs.Attribute | None
) -> list[Schema]:
    """Return, for each label, the rules of required and missing settings."""
    rules: list[Schema] = []
    for choice in blocks.choices_of(label.type) if label is not None else ():
        needed = [name for name, (_, meta) in known.items() if choice in meta.required_by]
        foreign = [name for name, (_, meta) in known.items() if meta.only and choice not in meta.only]
        then: Schema = {"required": needed} if needed else {}
        if foreign:
            then["properties"] = dict.fromkeys(foreign, False)
        if then:
            assert label is not None
            chosen = {"properties": {label.name: {"const": choice}}, "required": [label.name]}
            rules.append({"if": chosen, "then": then})
    return rules


def _setting(attribute: attrs.Attribute, meta: Setting | None) -> Schema:
    """Return the schema of one property: its type, range, description and default."""
    if blocks.is_block(attribute.type):
        inner = _block(attribute.type, without=meta.without if meta else ())
        return {**inner, "description": meta.doc if meta else described(attribute.type)[1]}
    about = meta or label_setting(attribute)
    schema = {**_typed(attribute.type, about), "description": about.doc}
    if meta is not None:
        schema["x-role"] = meta.role.value
    if attribute.default is not attrs.NOTHING and not about.required_by:
        schema["default"] = value_json(attribute.default)
    return schema


def _typed(annotation: Any, meta: Setting) -> Schema:
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    found = [_part(part, meta) for part in parts if part not in (Auto, NoneType)]
    found += [{"const": str(AUTO)}] if Auto in parts else []
    found += [{"type": "null"}] if NoneType in parts else []
    return found[0] if len(found) == 1 else {"anyOf": found}


def _part(part: Any, meta: Setting) -> Schema:
    check = meta.check
    if is_call(part):
        return _call_of(part.components)
    if part is Quantity:
        return _quantity(meta.units)
    if get_origin(part) is Literal:
        return {"type": "string", "enum": list(get_args(part))}
    if get_origin(part) is dict:
        return {"type": "object", "additionalProperties": _typed(get_args(part)[1], meta)}
    if get_origin(part) is tuple:
        item = get_args(part)[0]
        if item is actions.Action:
            return {"type": "array", "items": {"$ref": "#/$defs/action"}}
        schema = {"type": "array", "items": _part(item, meta)}
        if isinstance(check, Range) and check.count is not None:
            schema |= {"minItems": check.count, "maxItems": check.count}
        return schema
    if part is Interval:
        return {"type": "string", "pattern": r"^[0-9]+\.\.[0-9]+$"}
    if part is Dimension:
        return {"type": "string", "pattern": r"^(\[.*\]|-?[0-9]+\.\.-?[0-9]+|(uniform|log)\(.*\))$"}
    if part is Metric:
        return {"type": "string", "pattern": r"^eval\..+\.(loss|objective)$"}
    if part is MeasuredNumber:
        return {"type": "string", "pattern": r"^(eval|hook)\..+\.[A-Za-z0-9_/]+$"}
    plain = {int: "integer", float: "number", bool: "boolean", str: "string"}[part]
    if isinstance(check, TextCheck):
        return {"type": plain, **({"pattern": check.pattern} if check.pattern and part is str else {})}
    return {"type": plain, **(_range(check) if check is not None and part in (int, float) else {})}


def _range(check: Range) -> Schema:
    names = {"low": "minimum", "above": "exclusiveMinimum", "high": "maximum", "below": "exclusiveMaximum"}
    return {names[key]: bound for key in names if (bound := getattr(check, key)) is not None}


def _quantity(units: tuple[str, ...]) -> Schema:
    """Return the schema of a string with a number and a unit, each in all its spellings."""
    words = [word for word, (unit, _) in UNITS.items() if unit in units and word != "%"]
    forms = [rf"({'|'.join(MULTIPLIERS)})? ?({'|'.join(words)})"] if words else []
    forms += [" ?%"] if "%" in units else []
    return {"type": "string", "pattern": f"^{_NUMBER}({'|'.join(forms)})$"}
