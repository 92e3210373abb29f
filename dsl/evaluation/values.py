"""Values of expressions with their origin, and arithmetic on numbers with units."""

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Final

from attrs import field

from xtrain.dsl.diagnostics.diagnostic import Note, Span
from xtrain.dsl.schema.setting import AUTO
from xtrain.dsl.syntax.lexer import UNIT_WORDS, number
from xtrain.dsl.values import EnvText, Quantity
from xtrain.lazy_attrs import frozen


@frozen
class ValueStep:
    """A name that a value came through. kind: `let`, `param`, `set`, `env`, or `config` for a key of a `config.json`;
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
    """A value of an expression. data: an int, float, bool, str, None, AUTO, `Quantity`, or one of the classes below."""

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
    """A map. keys: place of the name of each entry."""

    entries: dict[str, Value] = field(hash=False)
    keys: dict[str, Span] = field(hash=False, factory=dict, eq=False)


@frozen
class Called:
    """A call that is not a function of the language, as `text("*.txt")`: its setting interprets it."""

    name: str
    name_span: Span
    positional: tuple[Value, ...]
    keywords: dict[str, tuple[Span, Value]] = field(hash=False)


@frozen
class Bounds:
    """`a..b`, both ends included; the setting decides which ends are valid."""

    low: Value
    high: Value


@frozen
class Links:
    """`a -> b -> c`."""

    values: tuple[Value, ...]


class Failed:
    """An expression that could not be evaluated; the reason has been reported, so no further errors are needed."""


FAILED = Failed()


def describe(data: Any) -> str:
    """Return the kind of a value for messages: "the number 3", "a string", "a list"."""
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
    """Return a quantity as a spec writes it; the text reads back to an equal one."""
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


_LARGEST_BITS: Final = 1000
_LONGEST_TEXT: Final = 2**20  # characters: doubling a text twenty times would take all memory
Plain = int | float


class ArithmeticFailure(Exception):
    """An operation that has no result: a code, what is wrong, and a hint."""

    def __init__(self, code: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint


def binary(sign: str, left: Any, right: Any) -> Any:
    """Return `left sign right`. Raises ArithmeticFailure."""
    if sign == "+" and isinstance(left, str) and isinstance(right, str):
        if len(left) + len(right) > _LONGEST_TEXT:
            raise ArithmeticFailure("X307", "the result is too large")
        return EnvText.of(left, right) if isinstance(left, EnvText) or isinstance(right, EnvText) else left + right
    for side in (left, right):
        if not is_number(side) and not isinstance(side, Quantity):
            raise ArithmeticFailure("X309", f"`{sign}` works on numbers, not on {describe(side)}")
    value_of_left, unit_of_left = _parts(left)
    value_of_right, unit_of_right = _parts(right)
    unit = _UNIT_RULES[sign](sign, unit_of_left, unit_of_right)
    if sign == "*" and unit is not None and "%" in (unit_of_left, unit_of_right) and unit != "%":
        return Quantity(checked(_divide(_OPERATIONS["*"](value_of_left, value_of_right), 100)), unit)
    result = checked(_OPERATIONS[sign](value_of_left, value_of_right))
    return result if unit is None else Quantity(result, unit)


def negative(data: Any) -> Any:
    """Return `-data`. Raises ArithmeticFailure."""
    if isinstance(data, Quantity):
        return Quantity(-data.value, data.unit)
    if not is_number(data):
        raise ArithmeticFailure("X309", f"`-` works on numbers, not on {describe(data)}")
    return -data


def checked(value: Plain) -> Plain:
    """Return the value. Raises ArithmeticFailure if it is too large to compute with."""
    too_large = value.bit_length() > _LARGEST_BITS if isinstance(value, int) else not math.isfinite(value)
    if too_large:
        raise ArithmeticFailure("X307", "the result is too large")
    return value


def _parts(data: Any) -> tuple[Plain, str | None]:
    return (data.value, data.unit) if isinstance(data, Quantity) else (data, None)


# Units: from the units of both sides (None is a plain number) to the unit of the result -------------------------


def _same(sign: str, left: str | None, right: str | None) -> str | None:
    if left == right:
        return left
    verb = {"+": "add", "-": "subtract", "%": "divide"}[sign]
    names = " and ".join(unit or "a plain number" for unit in (left, right))
    if None in (left, right):
        unit = left or right
        sample = "`50%`" if unit == "%" else "`2 GiB`" if unit == "bytes" else "`30 s`" if unit == "seconds" else None
        hint = f"use the same unit for both: {sample or f'`10 {unit}`'}"
    else:
        hint = "both sides need the same unit"
    raise ArithmeticFailure("X303", f"cannot {verb} {names}", hint)


def _times(_: str, left: str | None, right: str | None) -> str | None:
    if left is None or right is None:
        return left or right
    if "%" in (left, right) and left != right:
        return right if left == "%" else left  # 10% of 2000 steps
    raise ArithmeticFailure("X303", f"cannot multiply {left} by {right}", "one side of `*` is a plain number")


def _per(sign: str, left: str | None, right: str | None) -> str | None:
    if right is None:
        return left
    if left == right:
        return None
    raise ArithmeticFailure(
        "X303", f"cannot divide {left or 'a plain number'} by {right}", "divide by a plain number or by the same unit"
    )


def _plain(sign: str, left: str | None, right: str | None) -> str | None:
    if left is None and right is None:
        return None
    raise ArithmeticFailure("X303", f"`{sign}` works on plain numbers, not on {left or right}")


_UNIT_RULES: Final[dict[str, Callable[[str, str | None, str | None], str | None]]] = {
    "+": _same, "-": _same, "%": _same, "*": _times, "/": _per, "//": _per, "**": _plain,
}  # fmt: skip


# Values ---------------------------------------------------------------------------------------------------------------


def _divide(left: Plain, right: Plain) -> Plain:
    """Divide; exact if there is no remainder: 4096 / 8 is the whole number 512."""
    if right == 0:
        raise ArithmeticFailure("X307", "division by zero")
    if isinstance(left, int) and isinstance(right, int):
        return number(Fraction(left, right))
    return _guarded(operator.truediv, left, right)


def _floor_divide(left: Plain, right: Plain) -> Plain:
    if right == 0:
        raise ArithmeticFailure("X307", "division by zero")
    return _guarded(operator.floordiv, left, right)


def _modulo(left: Plain, right: Plain) -> Plain:
    if right == 0:
        raise ArithmeticFailure("X307", "division by zero")
    return _guarded(operator.mod, left, right)


def _power(base: Plain, exponent: Plain) -> Plain:
    if base == 0 and exponent < 0:
        raise ArithmeticFailure("X307", "zero cannot have a negative power")
    if base < 0 and exponent != int(exponent):
        raise ArithmeticFailure("X307", "a negative number cannot have a fractional power")
    # Check the size before computing: 9 ** 9 ** 9 would take all memory.
    digits = base.bit_length() if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1 else 0
    if digits * exponent > 2 * _LARGEST_BITS:
        raise ArithmeticFailure("X307", "the result is too large")
    return _guarded(operator.pow, base, exponent)


def _guarded(operation: Callable[[Plain, Plain], Plain], left: Plain, right: Plain) -> Plain:
    try:
        return operation(left, right)
    except OverflowError:
        raise ArithmeticFailure("X307", "the result is too large") from None


def _with_guard(operation: Callable[[Plain, Plain], Plain]) -> Callable[[Plain, Plain], Plain]:
    return lambda left, right: _guarded(operation, left, right)


_OPERATIONS: Final[dict[str, Callable[[Plain, Plain], Plain]]] = {
    "+": _with_guard(operator.add), "-": _with_guard(operator.sub), "*": _with_guard(operator.mul),
    "/": _divide, "//": _floor_divide, "%": _modulo, "**": _power,
}  # fmt: skip
