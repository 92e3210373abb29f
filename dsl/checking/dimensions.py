"""What a sweep gives a setting: `[256, 512]`, `2..4`, `uniform(0.1, 0.3)`, `log(1e-4, 1e-2)` into a `Dimension`."""

from collections.abc import Sequence
from typing import Any, Final

from xtrain.dsl.checking.context import Context
from xtrain.dsl.checking.type_errors import TypeMismatch
from xtrain.dsl.dimension import Between, Dimension, Listed
from xtrain.dsl.env_text import EnvText, hidden
from xtrain.dsl.evaluation.values import Bounds, Called, Items, Value, Word, describe, is_number, quantity_text
from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.setting import AUTO
from xtrain.dsl.spec_text import value_text

SCALES: Final = ("uniform", "log")
_FORMS: Final = "a list, `a..b`, `uniform(low, high)` or `log(low, high)`"
_MOST_POINTS: Final = 1000


def dimension(value: Value, context: Context) -> Dimension:
    """Raises TypeMismatch."""
    match value.data:
        case Items(values=values):
            return _listed(values, value, context)
        case Bounds(low=low, high=high):
            return _between(False, (low, high), value, context, counted=True)
        case Called(name=name, positional=positional, keywords=keywords) if name in SCALES and not keywords:
            if len(positional) not in (2, 3):
                hint = f"write `{name}(low, high)`, or `{name}(low, high, points)` for a grid"
                raise TypeMismatch("X308", f"`{name}` takes two ends", value, hint=hint)
            return _between(name == "log", positional, value, context)
    hint = f"write `{context.name} in [{value.span.text}, …]`" if "\n" not in value.span.text else None
    raise TypeMismatch("X301", f"{context.subject} takes {_FORMS}, not {describe(value.data)}", value, hint=hint)


def _listed(values: Sequence[Value], value: Value, context: Context) -> Listed:
    texts = [_text(each, context) for each in values]
    if not texts:
        raise TypeMismatch("X304", f"{context.subject} has no values to try", value, hint="name two or more")
    twice = next((each for place, each in enumerate(values) if texts[place] in texts[:place]), None)
    if twice is not None:
        raise TypeMismatch("X304", f"{context.subject} has the same value twice", twice, hint="remove one")
    return Listed(tuple(texts))


def _text(value: Value, context: Context) -> str:
    """A value as `--set` takes it."""
    data = value.data
    if data is None or data is AUTO:
        return "auto" if data is AUTO else "none"
    match data:
        case bool():
            return str(data).lower()
        case int() | float():
            return repr(data)
        case Word(text=text):
            return text
        case EnvText():
            return value_text(hidden(data))  # each trial reads it for itself
        case str() if data.isprintable() and not set(data) & {'"', "\\"}:
            return f'"{data}"'
        case Quantity():
            return quantity_text(data)
        case Items(values=values):
            return f"[{', '.join(_text(each, context) for each in values)}]"
    message = f"{describe(data)} cannot be one of the values of {context.subject}"
    raise TypeMismatch("X301", message, value, hint="name numbers, words, texts, or lists of them")


def _between(log: bool, values: Sequence[Value], value: Value, context: Context, *, counted: bool = False) -> Between:
    (low, unit), (high, other) = _number(values[0], context), _number(values[1], context)
    if unit != other:
        units = " and ".join(each or "plain numbers" for each in (unit, other))
        raise TypeMismatch("X303", f"the ends of {context.subject} have different units, {units}", value)
    whole = isinstance(low, int) and isinstance(high, int)
    if counted and not whole:
        raise TypeMismatch("X306", f"`a..b` of {context.subject} is of whole numbers", value,
                           hint=f"write `uniform({values[0].span.text}, {values[1].span.text})`")  # fmt: skip
    if low >= high:
        raise TypeMismatch("X304", f"{context.subject} does not go up from {low:g} to {high:g}", value,
                           hint="write the lower end first")  # fmt: skip
    if log and low <= 0:
        raise TypeMismatch("X304", f"{context.subject} has a logarithm only above 0", values[0],
                           hint="begin above 0, or write `uniform`")  # fmt: skip
    points = _points(values[2], context) if len(values) == 3 else None
    return Between(low=low, high=high, log=log, whole=whole, unit=unit, points=points)


def _number(value: Value, context: Context) -> tuple[Any, str]:
    """A number and its unit, empty where it has none."""
    data = value.data
    if isinstance(data, Quantity):
        return data.value, data.unit
    if not is_number(data):
        raise TypeMismatch("X301", f"the ends of {context.subject} are numbers, not {describe(data)}", value)
    return data, ""


def _points(value: Value, context: Context) -> int:
    data = value.data
    if not isinstance(data, int) or isinstance(data, bool) or not 2 <= data <= _MOST_POINTS:
        message = f"{context.subject} takes 2 to {_MOST_POINTS:,} points of a grid, not {describe(data)}"
        raise TypeMismatch("X304", message, value)
    return data
