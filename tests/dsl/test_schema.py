"""The schema is complete: every setting is documented, every unit and choice is known, every class has a place."""

import importlib
import pkgutil
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs
from examples import each

from xtrain.dsl import schema
from xtrain.dsl.schema import blocks, parallel
from xtrain.dsl.schema.component import variants
from xtrain.dsl.schema.data_components import LINKS, SOURCES
from xtrain.dsl.schema.losses import LOSSES
from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.optimizers import OPTIMIZERS
from xtrain.dsl.schema.setting import Auto, settings_of
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import UNITS, Quantity


def classes_of(annotation: Any) -> Iterator[type]:
    """The classes of the schema in an annotation, and in those of their settings."""
    if blocks.is_block(annotation):
        yield annotation
    inside = blocks.fields_of(annotation) if blocks.is_block(annotation) else ()
    for component in variants(annotation) if blocks.is_block(annotation) else ():
        if component is not annotation:
            yield component
    for part in (*get_args(annotation), *(attribute.type for attribute in inside)):
        yield from classes_of(part)


# All that a spec is made of, and all that it can be made of.
ROOTS = (
    *(attribute.type for attribute in attrs.fields(Spec)),
    *(kind for table in (blocks.KINDS, blocks.ACTIONS, SOURCES, LINKS) for kind in table.values()),
)
NO_BLOCKS = (Auto,)
CLASSES = [c for c in dict.fromkeys(c for root in ROOTS for c in classes_of(root)) if c not in NO_BLOCKS]
SETTINGS = [
    (f"{c.__name__}.{name}", (c, name, attribute, meta))
    for c in CLASSES
    for name, (attribute, meta) in settings_of(c).items()
]


def test_every_class_with_settings_is_part_of_a_spec():
    """Guards the tests below: a class that they do not see would not be tested."""
    modules = [
        importlib.import_module(f"{schema.__name__}.{each.name}") for each in pkgutil.iter_modules(schema.__path__)
    ]
    there = {c for module in modules for c in vars(module).values() if isinstance(c, type) and attrs.has(c)}
    bases = {base for c in CLASSES for base in c.__mro__[1:]}  # what components inherit is tested with them
    assert {c for c in there if settings_of(c)} <= set(CLASSES) | bases
    assert set(blocks.KINDS.values()) <= set(CLASSES)
    assert len(SETTINGS) > 160


def test_every_class_says_how_it_is_written():
    assert [block for block in CLASSES if not (block.__doc__ or "").startswith("`")] == []


def test_every_setting_is_whole():
    each(SETTINGS, is_whole)


def is_whole(block: type, name: str, attribute: attrs.Attribute, meta: Any) -> None:
    parts = get_args(attribute.type) or (attribute.type,)
    names = ("CPU", "RMSNorm", "Weights &", "W&B", "ZeRO")
    assert meta.doc[0].islower() or meta.doc[0].isdigit() or meta.doc.startswith(names)
    assert not meta.doc.endswith(".")
    assert set(meta.units) <= {unit for unit, _ in UNITS.values()}
    values = {kind for part in parts if get_origin(part) in (Union, UnionType) for kind in get_args(part)}
    assert bool(meta.units) == (Quantity in {*parts, *values}), "units are for quantities"
    if attribute.default is attrs.NOTHING or meta.required_by:
        assert meta.example, "a diagnostic shows it when the setting is missing"
    elif isinstance(attribute.default, Quantity):
        assert attribute.default.unit in meta.units
    if Auto in parts:
        assert "auto" in meta.doc, "the doc says what auto does"
    label = blocks.label_of(block)
    if meta.only or meta.required_by:
        assert label is not None and set(meta.required_by) <= set(meta.only) <= set(blocks.choices_of(label.type))


def test_the_label_of_a_component_is_its_name():
    """Whatever the order of inherited attributes; the text of a plan's spec is written with it."""
    for registry in (FAMILIES, LOSSES, OPTIMIZERS):
        labels = {name: blocks.label_of(each) for name, each in registry.items()}
        assert [name for name, label in labels.items() if label is None or label.name != registry.key] == []


def test_every_default_passes_its_own_check():
    def passes(_block: type, _name: str, attribute: attrs.Attribute, meta: Any) -> None:
        exempt = attribute.default in (attrs.NOTHING, None) or isinstance(attribute.default, Auto) or meta.required_by
        if meta.check and not exempt:
            assert meta.check(attribute.default) is None

    each(SETTINGS, passes)


def test_every_block_of_a_spec_has_a_kind():
    kinds = {a.name for a in attrs.fields(Spec) if blocks.is_block(a.type)}
    assert kinds | set(blocks.NAMED) | set(blocks.OPTIONAL) == set(blocks.KINDS)
    assert all(attrs.fields_dict(Spec)[name].default is None for name in blocks.OPTIONAL)
    assert {a.name for a in attrs.fields(Spec)} >= set(blocks.NAMED.values())
    required = {a.name for a in attrs.fields(Spec) if blocks.is_block(a.type) and a.default is attrs.NOTHING}
    assert required == set(blocks.REQUIRED)


def test_every_kind_of_the_language_is_known():
    language = """experiment workspace launch cluster launcher model adapter task tokenizer dataset mixture batch loss
    optimizer group scheduler ema precision compile activation parallel checkpoint log hook step
    evaluation_step fault_tolerance alerts serve sweep phase rollout reward environment engine train epoch policy
    parametrization"""
    assert set(language.split()) == set(blocks.KINDS)
    assert {"compile", "activation"} <= set(blocks.KINDS)


def test_what_comes_later_is_not_there_yet():
    for (block, name), words in blocks.RESERVED.items():
        assert not set(words) & set(choices(block, name))


def choices(block: type, name: str) -> tuple[Any, ...]:
    (annotation,) = [a.type for a in blocks.fields_of(block) if a.name == name]
    assert get_origin(annotation) is Literal
    return blocks.choices_of(annotation)


def parts_of(attribute: attrs.Attribute) -> tuple[Any, ...]:
    return (attribute.type, *get_args(attribute.type))


def test_every_choice_can_be_written(load):
    """Each word of each `Literal` loads, and shows in what is said of a wrong word."""
    seen = set()

    def can_be_written(block: type, name: str, attribute: attrs.Attribute, meta: Any) -> None:
        words = blocks.choices_of(attribute.type)
        path = next((k for k, v in blocks.KINDS.items() if v is block), None)
        path = path or next((f"parallel.{k}" for k, v in blocks.nested(parallel.Parallel).items() if v is block), None)
        if not words or path in (None, "serve"):  # a server has no place for what the others need
            return
        seen.add(f"{path}.{name}")
        spell = (lambda word: f"[{word}]") if tuple in map(get_origin, parts_of(attribute)) else str
        path = "dataset.stdlib" if path == "dataset" else path
        if path == "loss" and meta.only:  # of a name that several have, each with words of its own
            own = {kind: blocks.choices_of(attrs.fields_dict(LOSSES[kind])[name].type) for kind in meta.only}
            assert set(words) == {word for each in own.values() for word in each}
            for kind, each in own.items():
                teacher = ["loss.teacher=t"] if kind == "distill" else []
                of_kind(path, name, [f"loss={kind}", *teacher], each, spell, parts=parts_of(attribute))
            return
        label = f"{path}={meta.only[0]}" if meta.only else f"{path}.{name}=zzz"
        needed = {
            "activation": "selective",
            "adapter": "lora",
            "reward": "exact_answer",
            "engine": "vllm",
        }  # they need a label
        label = f"{path}={needed[path]}" if path in needed else label
        pods = ['launcher.image="x"', 'launcher.volumes=["x:/work"]'] if label == "launcher=kubernetes" else []
        pods += ["parametrization.base_width=64"] if path == "parametrization" else []
        of_kind(path, name, [label, *pods], words, spell, parts=parts_of(attribute))

    def of_kind(path: str, name: str, label: list[str], words: Any, spell: Any, *, parts: tuple) -> None:
        for word in words:
            spelled = f'"{word}"' if word[0].isdigit() else word
            loaded = load("", *label, f"{path}.{name}={spell(spelled)}")
            assert loaded.spec is not None, loaded.diagnostics.render()
        if str in parts:  # any other word is one
            return
        (error,) = load("", *label, f"{path}.{name}={spell('zzz')}").diagnostics
        code = "X202" if {int, float} & set(parts) else "X305"  # a name may stand for a number
        assert error.code == code and all(word in error.hint for word in words)

    each(SETTINGS, can_be_written)
    assert len(seen) > 15, seen
