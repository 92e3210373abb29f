"""Reference of the language as data, generated from the schema: `xtrain docs` prints it, `docs/reference.md` contains
it."""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import attrs
from attrs import field

from xtrain.dsl.schema import actions, blocks
from xtrain.dsl.schema.component import Registry, members_of, registry_of, variant, variants
from xtrain.dsl.schema.data_components import LINKS, SOURCES
from xtrain.dsl.schema.setting import AUTO, Auto, Range, Role, Setting, at_least, open_setting, settings_of, spelled
from xtrain.dsl.spec_text import value_text
from xtrain.dsl.values import Dimension, Interval, MeasuredNumber, Metric, Quantity
from xtrain.lazy_attrs import frozen
from xtrain.text.units import seconds_text

ROLES: Final[dict[Role, str]] = {
    Role.EXPERIMENT: "affects the result: another value is another experiment",
    Role.BUDGET: "length of training: the experiment stays the same",
    Role.CADENCE: "when something is measured, logged or saved: the experiment stays the same",
    Role.PATH: "file locations: the experiment stays the same",
    Role.MESH: "ranks, and the division of work: the experiment stays the same",
    Role.EXECUTION: "kernels, threads and other execution details: the experiment stays the same",
}
_SCALARS: Final = {
    int: "whole number",
    float: "number",
    str: "string",
    Metric: "metric",
    MeasuredNumber: "metric",
    Interval: "range",
    Dimension: "values",
}
_MEASURES: Final = {"seconds": "time"}
_LISTS: Final = {int: "list of whole numbers", float: "list of numbers", str: "list of strings"}
_SAMPLE_LABELS: Final = {"size": "2", "source": "bytes", "command": '"./page-me.sh"'}
_LABELS: Final = {
    "name": "the name",
    "dataset": "the name of a dataset",
    "command": "the command, as typed into a shell",
    "source": '`bytes`, or the folder of a tokenizer as `"assets/tokenizer"`',
    "size": "number of ranks on the axis",
}
Group = Literal["block", "action", "source", "link", "statement"]


@frozen(kw_only=True)
class Field:
    """A setting, or the label of a block. kind: its type in words, fixed words in backquotes. choices: these words.
    default: as a spec writes it; None if required. values: the range, "" if there is none. usual: the usual range and
    its source, "" if there is none. only: labels of the block that have the setting. example: a value. usage: the
    setting in a spec. is_block: a top-level block nested in this one, which has a page."""

    name: str
    path: str
    doc: str
    kind: str
    choices: tuple[str, ...]
    default: str | None
    values: str
    only: tuple[str, ...]
    role: Role
    example: str
    group: "Group"
    usual: str = ""
    usage: str = ""
    is_label: bool = False
    is_block: bool = False


@frozen(kw_only=True)
class ReferencePage:
    """A block, action, source or link. group: which of these. written: its forms, in backquotes. more: paragraphs.
    origins: of components, (name, provider)."""

    name: str
    path: str
    block: type
    group: Group
    written: str
    summary: str
    more: tuple[str, ...]
    label: Field | None
    fields: tuple[Field, ...]
    inner: tuple["ReferencePage", ...] = field(repr=False)
    origins: tuple[tuple[str, str], ...] = ()


def pages() -> tuple[ReferencePage, ...]:
    """Return every page, in the recommended order of a spec; nested blocks are in `inner`."""
    found = [_page(name, name, block, "block") for name, block in blocks.KINDS.items()]
    found.append(_page("every", "every", actions.Tick, "statement"))
    found.append(_page("on", "on", actions.OnEvent, "statement"))
    found += [_page(name, name, action, "action") for name, action in blocks.ACTIONS.items()]
    found += [_page(name, name, source, "source") for name, source in SOURCES.items()]
    found += [_page(name, name, link, "link") for name, link in LINKS.items()]
    return tuple(found)


def every_page(within: Iterable[ReferencePage] | None = None) -> Iterator[ReferencePage]:
    """Yield all pages, including nested blocks."""
    for page in pages() if within is None else within:
        yield page
        yield from every_page(page.inner)


def _page(name: str, path: str, block: type, group: Group, around: Callable[[str], str] = str) -> ReferencePage:
    """Return a page. around: wraps the block in an example, as `parallel { … }` around an axis."""
    written, summary, more = described(block)
    if registry_of(block) is not None:
        more = (*more, *("{}: {}".format(*described(component)) for component in variants(block)))
    if group == "action":
        around = blocks.ACTIONS[name].example.format
    known = settings_of(block)
    fields: list[Field] = []
    inner: list[ReferencePage] = []
    for each, (attribute, meta) in known.items():
        where = f"{path}.{each}"
        chosen, head = _having(name, block, each, meta)
        if blocks.is_block(attribute.type) and spelled(attribute) in blocks.KINDS:
            fields.append(_field_of_block(attribute, meta, where, head))
            continue
        if blocks.is_block(attribute.type):
            needed = _needed(chosen, each) if chosen is not block or name in blocks.OPTIONAL else []
            outside = partial("{0} {{ {1}{2} }}".format, head, "".join(f"{setting}, " for setting in needed))
            inner.append(_page(each, where, attribute.type, group, outside))
            continue
        for declared, said in _declarations(block, attribute, meta):
            chosen, head = _having(name, block, each, said)
            found = _field(declared, said, where, group)
            alone = group == "action" or name in (*blocks.NAMED, *blocks.OPTIONAL) or chosen is not block
            needed = _needed(chosen, each) if alone else []
            usage = _usage(name, head, found, needed)
            fields.append(attrs.evolve(found, usage=usage if group in ("link", "statement") else around(usage)))
    if (free := open_setting(block)) is not None:
        found = _free_field(*free, path, group)
        fields.insert(0, attrs.evolve(found, usage=_usage(name, name, found, _needed(block, ""))))
    label = blocks.label_of(block) if group in ("block", "action") else None
    with_label = _needed(variant(block, None), "") if name in blocks.NAMED or variant(block, None) is not block else []
    return ReferencePage(
        name=name,
        path=path,
        block=block,
        group=group,
        written=written,
        summary=summary,
        more=more,
        label=_label(label, path, group, around, with_label) if label else None,
        fields=tuple(fields),
        inner=tuple(inner),
        origins=_origins(name, block, group),
    )


def _having(name: str, block: type, setting: str, meta: Setting) -> tuple[type, str]:
    """Return the class of a block that has a setting and needs the shortest example, and the head of the block
    there."""
    having = min(meta.only, key=lambda one: len(_needed(variant(block, one), setting)), default=None)
    return variant(block, having), f"{name} {having}" if having else _head(name, block)


def _declarations(block: type, attribute: attrs.Attribute, meta: Setting) -> list[tuple[attrs.Attribute, Setting]]:
    """Return a setting as the components of a block declare it: once if all agree, else with `only` for those
    that do."""
    registry = registry_of(block)
    if registry is None:
        return [(attribute, meta)]
    found: list[tuple[attrs.Attribute, Setting, list[str]]] = []
    for label, component in registry.items():
        own = attrs.fields_dict(component).get(attribute.name)
        if own is None or (said := own.metadata.get("setting")) is None:
            continue
        alike = (each for each in found if each[1] == said)
        same = next((each for each in alike if (each[0].type, each[0].default) == (own.type, own.default)), None)
        if same is None:
            found.append((own, said, [label]))
        else:
            same[2].append(label)
    if len(found) == 1:
        return [(attribute, meta)]
    return [(own, attrs.evolve(said, only=tuple(labels))) for own, said, labels in found]


def _origins(name: str, block: type, group: Group) -> tuple[tuple[str, str], ...]:
    if group == "action":
        return ((name, blocks.ACTIONS.origin(name)),)
    return tuple((each, registry.origin(each)) for registry in _registries(block) for each in registry)


def _registries(block: type) -> list[Registry[Any]]:
    """Return the registries of the components that a block belongs to, contains as settings, or names."""
    own = registry_of(block) or members_of(block)
    if own is not None:
        return [own]
    return [meta.registry for _, meta in settings_of(block).values() if meta.registry is not None]


def _usage(name: str, head: str, field: Field, needed: list[str]) -> str:
    setting = f"{field.name} {'in' if field.kind == _SCALARS[Dimension] else '='} {field.example}"
    if field.group == "link":
        return f"collate = … -> {name}({setting})"
    if field.group == "source":
        sample = f'"{given}", ' if (given := SOURCES[name].sample) else ""
        return f"dataset NAME {{ source = {name}({sample}{setting}) }}"
    if field.group == "statement":
        return f"every {field.example} log" if name == "every" else f"on nan({field.example}) skip"
    return f"{head} {{ {', '.join([*needed, setting])} }}"


def _field_of_block(attribute: attrs.Attribute, meta: Setting, path: str, head: str) -> Field:
    """Return the field of a top-level block inside another, such as the optimizer of a group."""
    kind = spelled(attribute)
    example = meta.example or blocks.REQUIRED[kind]
    return Field(
        name=kind,
        path=path,
        doc=meta.doc,
        kind=f"a block `{kind}`",
        choices=(),
        default="none",
        values=f"without {', '.join(meta.without)}" if meta.without else "",
        only=meta.only,
        role=meta.role,
        example=example,
        group="block",
        usage=f"{head} {{ {example} }}",
        is_block=True,
    )


def _free_field(attribute: attrs.Attribute, meta: Setting, path: str, group: Group) -> Field:
    """Return the setting with free names as one field called `NAME`."""
    item = get_args(attribute.type)[1]
    return Field(
        name="NAME",
        path=f"{path}.NAME",
        doc=meta.doc,
        kind=type_words(item, meta),
        choices=(),
        default=None if item is Dimension else "0",
        values=_values(meta),
        only=(),
        role=meta.role,
        example=meta.example,
        group=group,
    )


def _needed(block: type, but: str) -> list[str]:
    """Return the other settings that an example of a setting requires."""
    required = [(a, m) for a, m in settings_of(block).values() if a.default is attrs.NOTHING and spelled(a) != but]
    return [f"{spelled(attribute)} = {meta.example}" for attribute, meta in required]


def _label(
    attribute: attrs.Attribute, path: str, group: Group, around: Callable[[str], str], needed: list[str]
) -> Field:
    """Return the field of a block's label."""
    field = _field(attribute, label_setting(attribute), f"{path}.{attribute.name}", group)
    example = field.choices[0] if field.choices else _SAMPLE_LABELS.get(attribute.name, "NAME")
    name = path.rpartition(".")[2]
    body = f" {{ {', '.join(needed)} }}" if needed else ""
    called = group == "action" and blocks.ACTIONS[name].called
    usage = around(f"{name}({example}){body}" if called else f"{name} {example}{body}")
    return attrs.evolve(field, is_label=True, example=example, usage=usage)


def label_setting(attribute: attrs.Attribute) -> Setting:
    """Return the metadata of a label, in the form of a setting's metadata."""
    number = int in _parts(attribute.type)
    doc = _LABELS.get(attribute.name, f"the label of the block: its {attribute.name}")
    check = at_least(1) if number else attribute.metadata.get("check")
    return Setting(doc=doc, check=check, example="2" if number else "")


def described(block: type) -> tuple[str, str, tuple[str, ...]]:
    """Return the forms, the summary and the further paragraphs of a class docstring."""
    first, *more = [" ".join(part.split()) for part in (block.__doc__ or "").strip().split("\n\n")]
    match = re.fullmatch(r"((?:`[^`]*`|[^`:])*): (.*)", first)
    assert match is not None, f"the docstring of {block.__name__} does not begin with its form in backquotes"
    return match[1], match[2], tuple(more)


def _head(name: str, block: type) -> str:
    """Return the head of a block in an example."""
    label = blocks.label_of(block)
    if label is None or not settings_of(block):
        return name
    choices = blocks.choices_of(label.type)
    return f"{name} {choices[0] if choices else _SAMPLE_LABELS.get(label.name, 'NAME')}"


def _field(attribute: attrs.Attribute, meta: Setting, path: str, group: Group) -> Field:
    choices = blocks.choices_of(attribute.type)
    required = attribute.default is attrs.NOTHING or bool(meta.required_by)
    return Field(
        name=spelled(attribute),
        path=path,
        doc=meta.doc,
        kind=type_words(attribute.type, meta),
        choices=choices,
        default=None if required else _default(attribute, choices),
        values=_values(meta),
        only=meta.only,
        role=meta.role,
        example=meta.example or _example(attribute, choices),
        group=group,
        usual=_usual(meta),
    )


def _default(attribute: attrs.Attribute, choices: tuple[str, ...]) -> str:
    value = attribute.default
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-")
    return value if isinstance(value, str) and value in choices else value_text(value)


def _values(meta: Setting) -> str:
    if isinstance(meta.check, Range) and meta.check.percent and meta.units != ("%",):
        return "not negative, at most 100%"
    return "" if meta.check is None else meta.check.words


def _usual(meta: Setting) -> str:
    text = seconds_text if "seconds" in meta.units else "{:g}".format
    return "" if meta.usual is None else meta.usual.words(text)


def _example(attribute: attrs.Attribute, choices: tuple[str, ...]) -> str:
    """Return an example value: a word that is not the default, or the default itself, or a number."""
    value = attribute.default
    listed = any(get_origin(part) is tuple for part in _parts(attribute.type))
    if choices:
        word = next((word for word in choices if word not in (value, "auto")), choices[0])
        word = word if word.isidentifier() or word == "1f1b" else f'"{word}"'
        return f"[{word}]" if listed else word
    if isinstance(value, bool):
        return value_text(not value)
    if value is not attrs.NOTHING and value is not AUTO and value is not None:
        return _default(attribute, choices)
    parts = _parts(attribute.type)
    if listed:
        return "[2, 2]"
    return "true" if bool in parts else "2" if int in parts else "1.0" if float in parts else '"name"'


def _parts(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def type_words(annotation: Any, meta: Setting) -> str:
    """Return a type in words: "whole number or `auto`", "`gpipe` `1f1b`", "steps, tokens, epochs"."""
    parts = _parts(annotation)
    words = [_part_words(part, meta) for part in parts if part not in (Auto, NoneType)]
    words = list(dict.fromkeys(words))
    words += ["`auto`"] if Auto in parts else []
    words += ["`none`"] if NoneType in parts else []
    return " or ".join(words)


def _part_words(part: Any, meta: Setting) -> str:
    if part is bool:
        return "`true` `false`"
    if part in _SCALARS:
        return _SCALARS[part]
    if part is Quantity:
        return ", ".join(_MEASURES.get(unit, unit) for unit in meta.units)
    if get_origin(part) is Literal:
        return " ".join(f"`{word}`" for word in get_args(part))
    if get_origin(part) is dict:
        kinds = _parts(get_args(part)[1])
        words = [f"{_SCALARS[kind]}s" if kind in _SCALARS else _part_words(kind, meta) for kind in kinds]
        return f"map of names to {' or '.join(words)}"
    if get_origin(part) is tuple:
        item = get_args(part)[0]
        if get_origin(item) is Literal:
            return f"list of {_part_words(item, meta)}"
        return _LISTS.get(item, "actions")
    return "source"
