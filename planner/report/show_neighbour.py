"""The neighbours of a setting: the same spec with another value in one place, for plans to be compared."""

from collections.abc import Iterator
from typing import Any

import attrs
from attrs import evolve, frozen

from xtrain.dsl.blocks import NAMED, choices_of
from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.setting import Auto, Setting, attributes_of, open_setting, settings_of
from xtrain.dsl.spec import Spec


@frozen(kw_only=True)
class Slot:
    """A place in a spec that holds a value: the block it stands in, its attribute there, what the schema says of it."""

    path: str
    block: Any
    attribute: attrs.Attribute
    value: Any

    @property
    def setting(self) -> Setting | None:
        """None for the label of a block, as the size of an axis."""
        return self.attribute.metadata.get("setting")

    @property
    def doc(self) -> str:
        """One line for people: of a label, that of its block."""
        if self.setting is not None:
            return self.setting.doc
        return (type(self.block).__doc__ or "").partition("\n")[0]


def find_slot(spec: Spec, path: str) -> Slot | None:
    """The place that a path of the provenance names; None if it has none, as what is only derived."""
    steps = _steps(spec, path)
    if steps is None:
        return None
    owner = spec
    for name in steps[:-1]:
        owner = _get(owner, name)
    free = open_setting(type(spec.mixture)) if owner is spec.mixture.weights else None
    if free is not None:
        attribute = free[0]
    else:
        attribute = next((each for each in attributes_of(type(owner)) if each.name == steps[-1]), None)
    return (
        None if attribute is None else Slot(path=path, block=owner, attribute=attribute, value=_get(owner, steps[-1]))
    )


def replaced(spec: Spec, path: str, value: Any) -> Spec:
    """The spec with another value at a path that `find_slot` finds."""
    steps = _steps(spec, path)
    assert steps is not None, path
    return _with(spec, steps, value)


# How the first words of paths are called in `Spec`.
_WORDS = {**NAMED, "every": "ticks", "on": "events"}


def _steps(spec: Spec, path: str) -> list[str] | None:
    """A path as the names to follow from the spec on; None if it leads nowhere."""
    head, _, rest = path.partition(".")
    if head in NAMED:
        name = next((name for name in getattr(spec, NAMED[head]) if rest.startswith(f"{name}.")), None)
        steps = None if name is None else [NAMED[head], name, *rest[len(name) + 1 :].split(".")]
    elif head == "mixture" and rest not in settings_of(type(spec.mixture)):
        steps = ["mixture", "weights", rest]
    elif path == "tokenizer":
        steps = ["tokenizer", "source"]
    else:
        steps = [_WORDS.get(head, head), *(rest.split(".") if rest else [])]
    if steps and steps[-1] == "from":
        steps[-1] = "from_"  # as the attribute is called
    owner: Any = spec
    for name in steps or []:
        owner = _get(owner, name)
        if owner is _NOWHERE:
            return None
    return steps


_NOWHERE = object()


def _get(owner: Any, name: str) -> Any:
    if isinstance(owner, dict):
        return owner.get(name, _NOWHERE)
    if isinstance(owner, tuple):
        return owner[int(name)] if name.isdecimal() and int(name) < len(owner) else _NOWHERE
    return getattr(owner, name, _NOWHERE) if attrs.has(type(owner)) else _NOWHERE


def _with(owner: Any, steps: list[str], value: Any) -> Any:
    name, rest = steps[0], steps[1:]
    inner = _with(_get(owner, name), rest, value) if rest else value
    if isinstance(owner, dict):
        return {**owner, name: inner}
    if isinstance(owner, tuple):
        return (*owner[: int(name)], inner, *owner[int(name) + 1 :])
    return evolve(owner, **{name: inner})


def neighbours(slot: Slot, derived: str = "") -> Iterator[Any]:
    """Other values of a slot, the most informative first, that the schema lets pass.

    derived: what stands in for `auto` in the plan, from whose value others are made.
    """
    value = _typed(derived) if isinstance(slot.value, Auto) else slot.value
    check = slot.setting.check if slot.setting else None
    for other in _others(slot, value):
        if other != value and (check is None or check(other) is None):
            yield other


def _typed(derived: str) -> Any:
    """What the plan has for `auto`, as a value; None if its text says nothing that can be counted."""
    if derived in ("true", "false"):
        return derived == "true"
    if derived.replace(",", "").isdecimal():
        return int(derived.replace(",", ""))
    return derived or None


def _others(slot: Slot, value: Any) -> Iterator[Any]:
    words = choices_of(slot.attribute.type)
    match value:
        case bool():
            yield not value
        case int():
            yield from (value * 2, value // 2, value + 1, value - 1)
        case float():
            yield from (value * 2, value / 2, 0.5 if value == 0 else 0.0)
        case Quantity() if value.value == 0:
            yield Quantity(1, value.unit)
        case Quantity():
            yield from (evolve(value, value=value.value * 2), evolve(value, value=_half(value.value)))
        case str() if words:
            yield from (word for word in words if word != "auto")
        case dict() if value:
            name, weight = next(iter(value.items()))
            more = evolve(weight, value=weight.value * 2 or 1) if isinstance(weight, Quantity) else weight * 2 or 1.0
            yield {**value, name: more}
        case tuple() if value and all(isinstance(item, float) for item in value):
            yield tuple(item / 2 for item in value)
        case None if not words:
            yield from (1, 1.0)


def _half(value: float) -> float:
    return value // 2 if isinstance(value, int) and value % 2 == 0 else value / 2
