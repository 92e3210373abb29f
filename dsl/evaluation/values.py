"""Values: what an expression comes to, with the place it was written and the names it came through."""

from typing import Any

from attrs import field, frozen

from xtrain.dsl.diagnostics.diagnostic import Note
from xtrain.dsl.diagnostics.source import Span
from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.setting import AUTO
from xtrain.dsl.syntax.numbers import UNIT_WORDS


@frozen
class ValueStep:
    """A name that a value came through. kind: `let`, `param`, `set`, `env`, or `config` of a key of a `config.json`;
    span: where the name got its value."""

    kind: str
    name: str
    span: Span

    @property
    def note(self) -> Note:
        text = {
            "let": f"`{self.name}` is defined here",
            "param": f"`{self.name}` is defined here",
            "set": f"`{self.name}` is set on the command line",
            "env": f"the environment variable {self.name} is read here",
            "config": f"`{self.name}` is read here",
        }
        return text[self.kind], self.span


@frozen
class Value:
    """data: an int, float, bool, str, None, AUTO, `Quantity`, or one of the classes below."""

    data: Any
    span: Span
    via: tuple[ValueStep, ...] = field(default=(), eq=False)

    @property
    def notes(self) -> tuple[Note, ...]:
        return tuple(step.note for step in self.via if step.kind != "config" or step.span != self.span)


@frozen
class Word:
    """A name, dotted or not, that is no constant: a fixed word of a setting, or a mistake."""

    text: str


@frozen
class Items:
    values: tuple[Value, ...]


@frozen
class Mapping:
    """keys: where each of the entries has its name."""

    entries: dict[str, Value] = field(hash=False)
    keys: dict[str, Span] = field(hash=False, factory=dict, eq=False)


@frozen
class Called:
    """A call that is no function of the language, as `text("*.txt")`: its setting knows what it means."""

    name: str
    name_span: Span
    positional: tuple[Value, ...]
    keywords: dict[str, tuple[Span, Value]] = field(hash=False)


@frozen
class Bounds:
    """`a..b`, both ends included; a setting says what may stand at them."""

    low: Value
    high: Value


@frozen
class Links:
    """`a -> b -> c`."""

    values: tuple[Value, ...]


class Failed:
    """An expression that could not be evaluated; the reason has been reported, so whoever meets it keeps quiet."""


FAILED = Failed()


def describe(data: Any) -> str:
    """What kind of thing a value is, for messages: "the number 3", "a string", "a list"."""
    if data is True or data is False:
        return f"`{str(data).lower()}`"
    if data is None:
        return "`none`"
    if data is AUTO:
        return "`auto`"
    match data:
        case int() | float():
            return f"the number {show_number(data)}"
        case str():
            return "a string"
        case Quantity(unit="%"):
            return "a percentage"
        case Quantity(unit=unit):
            return {"seconds": "a time", "bytes": "a size in bytes"}.get(unit, f"a number of {unit}")
        case Word(text=text):
            return f"the name `{text}`"
        case Items():
            return "a list"
        case Mapping():
            return "a map"
        case Called(name=name):
            return f"`{name}(…)`"
        case Links():
            return "a chain"
        case Bounds():
            return "a range"
    return "something else"


def show_number(value: int | float) -> str:
    return f"{value:g}" if isinstance(value, float) and value != int(value) else f"{value}"


def is_number(data: Any) -> bool:
    return isinstance(data, int | float) and not isinstance(data, bool)


def quantity_text(data: Quantity) -> str:
    """A quantity as a spec writes it; the result reads back to an equal one."""
    value, unit = data.value, data.unit
    if unit == "%":
        return f"{value!r}%"
    if unit == "seconds":
        for word, size in (("d", 86400), ("h", 3600), ("min", 60)):
            if value and value % size == 0:
                return f"{int(value // size)} {word}"
        return f"{value!r} s"
    if unit == "bytes":
        for word, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if value and value % size == 0:
                return f"{int(value // size)} {word}"
        return f"{value!r} B"
    singular = unit.removesuffix("s")
    assert unit in UNIT_WORDS
    return f"{value!r} {singular if value == 1 else unit}"
