"""The functions of the language: `min max round ceil floor sqrt env`."""

import math
import os
from collections.abc import Callable
from typing import Any, Final

from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.diagnostics.source import SourceText
from xtrain.dsl.env_text import EnvText, Variable
from xtrain.dsl.evaluation.arithmetic import ArithmeticFailure, checked
from xtrain.dsl.evaluation.values import describe, is_number
from xtrain.dsl.quantity import Quantity
from xtrain.dsl.syntax.numbers import read_number


def call(name: str, arguments: list[Any]) -> Any:
    """The result of a function of `FUNCTIONS`. Raises ArithmeticFailure."""
    return FUNCTIONS[name](name, arguments)


def _extreme(name: str, arguments: list[Any]) -> Any:
    if len(arguments) < 2:
        raise ArithmeticFailure("X308", f"`{name}` takes two or more numbers", f"write `{name}(a, b)`")
    units = {_unit(name, argument) for argument in arguments}
    if len(units) > 1:
        names = " and ".join(sorted(unit or "plain numbers" for unit in units))
        raise ArithmeticFailure("X303", f"`{name}` cannot compare {names}", "all arguments need the same unit")
    pick = min if name == "min" else max
    return pick(arguments, key=_amount)


def _rounded(name: str, arguments: list[Any]) -> Any:
    if name == "round" and len(arguments) == 2 and isinstance(arguments[1], int):
        return _on_amount(name, arguments[0], lambda value: round(value, max(-300, min(300, arguments[1]))))
    if len(arguments) != 1:
        raise ArithmeticFailure("X308", f"`{name}` takes one number", f"write `{name}(a)`")
    operation = {"round": round, "ceil": math.ceil, "floor": math.floor}[name]
    return _on_amount(name, arguments[0], operation)


def _sqrt(name: str, arguments: list[Any]) -> Any:
    if len(arguments) != 1 or not is_number(arguments[0]):
        raise ArithmeticFailure("X308", "`sqrt` takes one plain number", "write `sqrt(2)`")
    value = arguments[0]
    if value < 0:
        raise ArithmeticFailure("X307", "a negative number has no square root")
    if isinstance(value, int) and math.isqrt(value) ** 2 == value:
        return math.isqrt(value)
    return math.sqrt(value)


def _env(name: str, arguments: list[Any]) -> Any:
    if not 1 <= len(arguments) <= 2 or not isinstance(arguments[0], str):
        raise ArithmeticFailure(
            "X308", "`env` takes the name of an environment variable and a default", 'write `env("NAME", 1)`'
        )
    variable = arguments[0]
    text = os.environ.get(variable)
    if text is None:
        if len(arguments) == 2:
            return arguments[1]
        raise ArithmeticFailure(
            "X709", f"the environment variable {variable} is not set", f'set it, or write `env("{variable}", default)`'
        )
    found = _like(variable, text, arguments[1]) if len(arguments) == 2 else text
    return EnvText.of(Variable(variable, text)) if isinstance(found, str) else found


def _like(variable: str, text: str, default: Any) -> Any:
    """The text of an environment variable as the type its default has."""
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        if text in ("true", "false"):
            return text == "true"
        raise ArithmeticFailure("X301", f"the environment variable {variable} is neither `true` nor `false`")
    found = Diagnostics()
    stripped = text.strip()
    if stripped[:1].isascii() and stripped[:1].isdigit():
        token = read_number(SourceText(variable, stripped), 0, len(stripped), found)
        same_kind = isinstance(token.value, Quantity) == isinstance(default, Quantity)
        if token.type == "NUMBER" and token.end == len(stripped) and same_kind:
            return token.value
    raise ArithmeticFailure(
        "X301", f"the environment variable {variable} holds another kind of value than its default, {describe(default)}"
    )


def _amount(data: Any) -> int | float:
    return data.value if isinstance(data, Quantity) else data


def _unit(name: str, data: Any) -> str | None:
    if isinstance(data, Quantity):
        return data.unit
    if not is_number(data):
        raise ArithmeticFailure("X309", f"`{name}` works on numbers, not on {describe(data)}")
    return None


def _on_amount(name: str, data: Any, operation: Callable[[int | float], int | float]) -> Any:
    unit = _unit(name, data)
    result = checked(operation(_amount(data)))
    return result if unit is None else Quantity(result, unit)


FUNCTIONS: Final[dict[str, Callable[[str, list[Any]], Any]]] = {
    "min": _extreme, "max": _extreme, "round": _rounded, "ceil": _rounded, "floor": _rounded, "sqrt": _sqrt,
    "env": _env,
}  # fmt: skip
