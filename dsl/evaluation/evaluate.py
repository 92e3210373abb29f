"""Evaluation of expressions: constants in any order, operators, and functions (`min max round ceil floor sqrt env`).

A cycle of constants is reported with its chain.
"""

import math
import os
from collections.abc import Callable
from collections.abc import Mapping as MappingOf
from typing import Any, Final

from attrs import field

from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SourceText, Span
from xtrain.dsl.diagnostics.suggest import did_you_mean, renamed
from xtrain.dsl.evaluation.values import (
    FAILED,
    ArithmeticFailure,
    Bounds,
    Called,
    Items,
    Links,
    Mapping,
    Value,
    ValueStep,
    Word,
    binary,
    checked,
    describe,
    is_number,
    negative,
)
from xtrain.dsl.schema.setting import AUTO
from xtrain.dsl.syntax import tree as s
from xtrain.dsl.syntax.lexer import read_number
from xtrain.dsl.values import EnvText, Quantity, Variable
from xtrain.lazy_attrs import define


def call(name: str, arguments: list[Any]) -> Any:
    """Return the result of a function of `FUNCTIONS`. Raises ArithmeticFailure."""
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
    """Return the text of an environment variable as the type of its default."""
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
        "X301", f"the environment variable {variable} is not of the type of its default, {describe(default)}"
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


_CONSTANTS = {"true": True, "false": False, "none": None, "auto": AUTO}
MOST_STEPS: Final = 20  # names that a value is said to come through; more do not help a reader
_DEEPEST = 200  # nested expressions; a spec written by hand has less than ten


@define(eq=False)
class Definition:
    """A `let` or `param`. replaced: the value from `--set`. names: constants that its expression may use.

    twice: another definition has the same name, so its value is unknown.
    """

    kind: str
    name: s.Name
    expression: s.Expression
    names: "Names"
    replaced: Value | None = None
    value: Value | None = None
    used: bool = False
    twice: bool = False


@define(eq=False)
class Names:
    """Constants that an expression may refer to: the `let`s of its file and the `param`s of all files."""

    params: dict[str, Definition] = field(factory=dict)
    lets: dict[str, Definition] = field(factory=dict)

    def find(self, name: str) -> Definition | None:
        return self.lets.get(name) or self.params.get(name)

    @property
    def all(self) -> MappingOf[str, Definition]:
        return {**self.params, **self.lets}


class Evaluator:
    """Evaluates expressions; mistakes go to `diagnostics`, and their value is `FAILED`."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self.diagnostics = diagnostics
        self.under_way: list[Definition] = []

    def value(self, node: s.Expression, names: Names, depth: int = 0) -> Value:
        if depth > _DEEPEST:
            self.diagnostics.error("X307", "this expression is nested too deeply", node.span)
            return Value(FAILED, node.span)
        match node:
            case s.Unread(span=span):
                return Value(FAILED, span)
            case s.Number(span=span, value=number):
                return Value(number, span)
            case s.String(span=span, value=text):
                return Value(text, span)
            case s.FixedWord(span=span, word=word):
                return Value(_CONSTANTS[word], span)
            case s.Reference():
                return self._reference(node, names, depth)
            case s.Negative(span=span, operand=operand):
                return self._negative(span, self.value(operand, names, depth + 1), names)
            case s.Binary():
                return self._binary(node, names, depth)
            case s.ListOf(span=span, items=items):
                return self._gather(span, [self.value(item, names, depth + 1) for item in items], Items)
            case s.ChainExpression(span=span, links=links):
                return self._gather(span, [self.value(link, names, depth + 1) for link in links], Links)
            case s.IntervalExpression(span=span, low=low, high=high):
                ends = self.value(low, names, depth + 1), self.value(high, names, depth + 1)
                return self._interval(span, *ends, names)
            case s.Map():
                return self._map(node, names, depth)
            case s.Call():
                return self._call(node, names, depth)

    def definition(self, definition: Definition, depth: int = 0) -> Value:
        """Return the value of a `let` or `param`. depth: nesting of expressions, through all constants, so far."""
        definition.used = True
        if definition.value is not None:
            return definition.value
        if definition in self.under_way:
            self._circle(definition)
            return Value(FAILED, definition.name.span)
        self.under_way.append(definition)
        found = definition.replaced or self.value(definition.expression, definition.names, depth + 1)
        self.under_way.pop()
        if definition.twice:
            found = Value(FAILED, found.span)
        definition.value = found
        return found

    def _circle(self, definition: Definition) -> None:
        circle = [*self.under_way[self.under_way.index(definition) :], definition]
        chain = " -> ".join(f"`{d.name.text}`" for d in circle)
        first = min(circle, key=lambda d: (d.name.span.source.order, d.name.span.start))
        self.diagnostics.error(
            "X212", f"`{first.name.text}` is defined in terms of itself", first.name.span,
            hint=f"the cycle is {chain}",
            notes=[(f"`{d.name.text}` is defined here", d.name.span) for d in circle[:-1] if d is not first],
        )  # fmt: skip
        for member in circle:
            member.value = Value(FAILED, member.name.span)

    def _reference(self, node: s.Reference, names: Names, depth: int) -> Value:
        definition = names.find(node.text)
        if definition is None:
            return Value(Word(node.text), node.span)
        found = self.definition(definition, depth)
        kind = "set" if definition.replaced else definition.kind
        span = definition.replaced.span if definition.replaced else definition.name.span
        return Value(found.data, node.span, _join((ValueStep(kind, node.text, span),), found.via))

    def _negative(self, span: Any, operand: Value, names: Names) -> Value:
        if not self._usable(operand, names):
            return Value(FAILED, span)
        try:
            return Value(negative(operand.data), span, operand.via)
        except ArithmeticFailure as failure:
            return self._failed(failure, operand.span, (operand,), span)

    def _binary(self, node: s.Binary, names: Names, depth: int) -> Value:
        left = self.value(node.left, names, depth + 1)
        right = self.value(node.right, names, depth + 1)
        usable = [self._usable(left, names), self._usable(right, names)]
        if not all(usable):
            return Value(FAILED, node.span)
        try:
            return Value(binary(node.operator, left.data, right.data), node.span, _join(left.via, right.via))
        except ArithmeticFailure as failure:
            place = node.span
            if failure.code == "X309":
                place = next(side for side in (right, left) if f"not on {describe(side.data)}" in failure.message).span
            elif failure.message == "division by zero":
                place = right.span
            notes = []
            if failure.code == "X303":
                notes = [(f"this is {describe(side.data)}", side.span) for side in (left, right)]
            return self._failed(failure, place, (left, right), node.span, notes)

    def _map(self, node: s.Map, names: Names, depth: int) -> Value:
        entries: dict[str, Value] = {}
        keys: dict[str, Span] = {}
        for entry in node.entries:
            key = entry.key.text if isinstance(entry.key, s.Name) else entry.key.value
            if key in entries:
                self.diagnostics.error("X206", f"the key `{key}` is given twice", entry.key.span, hint="keep one")
            entries[key] = self.value(entry.value, names, depth + 1)
            keys[key] = entry.key.span
        return Value(Mapping(entries, keys), node.span)

    def _call(self, node: s.Call, names: Names, depth: int) -> Value:
        name = node.function.text
        positional: list[Value] = []
        keywords: dict[str, tuple[Any, Value]] = {}
        for argument in node.arguments:
            found = self.value(argument.value, names, depth + 1)
            if argument.name is None:
                if keywords:
                    self.diagnostics.error(
                        "X220", "a positional argument follows a named one", argument.span,
                        hint="move it before the named ones",
                    )  # fmt: skip
                positional.append(found)
            elif argument.name.text in keywords:
                self.diagnostics.error("X206", f"`{argument.name.text}` is given twice", argument.span)
            else:
                keywords[argument.name.text] = (argument.name.span, found)
        if name not in FUNCTIONS:
            return Value(Called(name, node.function.span, tuple(positional), keywords), node.span)
        plain = name == "env" and (given := keywords.pop("plain", None)) is not None and given[1].data is True
        for keyword, (span, _) in keywords.items():
            self.diagnostics.error("X308", f"`{name}` has no argument `{keyword}`", span)
        usable = [self._usable(value, names) for value in positional]
        if keywords or not all(usable):
            return Value(FAILED, node.span)
        try:
            result = call(name, [value.data for value in positional])
        except ArithmeticFailure as failure:
            return self._failed(failure, node.span, tuple(positional), node.span)
        via = _join(*(value.via for value in positional))
        if name == "env":
            result = str(result) if plain and isinstance(result, str) else result
            via = (*via, ValueStep("env", str(positional[0].data), node.span))
        return Value(result, node.span, via)

    def _gather(self, span: Any, values: list[Value], kind: type) -> Value:
        return Value(kind(tuple(values)), span, _join(*(value.via for value in values)))

    def _interval(self, span: Any, low: Value, high: Value, names: Names) -> Value:
        usable = [self._usable(low, names), self._usable(high, names)]
        return Value(Bounds(low, high) if all(usable) else FAILED, span, _join(low.via, high.via))

    def _usable(self, value: Value, names: Names) -> bool:
        """Check that a value can be computed with; report a name that is not defined."""
        if isinstance(value.data, Word):
            self.diagnostics.error(
                "X202", f"`{value.data.text}` is not defined", value.span,
                hint=did_you_mean(value.data.text, names.all) or "define it with `let` or `param`",
                fix=renamed(value.span, value.data.text, names.all),
            )  # fmt: skip
            return False
        return value.data is not FAILED

    def _failed(
        self, failure: ArithmeticFailure, place: Any, sides: tuple[Value, ...], span: Any, notes: Any = ()
    ) -> Value:
        trail = [note for side in sides for note in side.notes]
        self.diagnostics.error(
            failure.code, failure.message, place, hint=failure.hint, notes=dict.fromkeys([*notes, *trail])
        )
        return Value(FAILED, span)


def _join(*trails: tuple[ValueStep, ...]) -> tuple[ValueStep, ...]:
    """Return the steps of all trails, each once: the first MOST_STEPS of them, and all variables of the environment."""
    steps = tuple(dict.fromkeys(step for trail in trails for step in trail))
    if len(steps) <= MOST_STEPS:
        return steps
    return steps[:MOST_STEPS] + tuple(step for step in steps[MOST_STEPS:] if step.kind == "env")
