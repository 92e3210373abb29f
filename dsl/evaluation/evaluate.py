"""Expressions to values. Constants may stand in any order; a circle of them is reported with its chain."""

from collections.abc import Mapping as MappingOf
from typing import Any

from attrs import define, field

from xtrain.dsl.diagnostics.diagnostic import Diagnostics
from xtrain.dsl.diagnostics.fixes import renamed
from xtrain.dsl.diagnostics.source import Span
from xtrain.dsl.diagnostics.suggest import did_you_mean
from xtrain.dsl.evaluation.arithmetic import ArithmeticFailure, binary, negative
from xtrain.dsl.evaluation.functions import FUNCTIONS, call
from xtrain.dsl.evaluation.values import FAILED, Bounds, Called, Items, Links, Mapping, Value, ValueStep, Word, describe
from xtrain.dsl.schema.setting import AUTO
from xtrain.dsl.syntax import tree as s

_CONSTANTS = {"true": True, "false": False, "none": None, "auto": AUTO}
_DEEPEST = 200  # nested expressions; a spec written by hand has less than ten


@define(eq=False)
class Definition:
    """A `let` or `param`. replaced: what `--set` put in its place. names: those its expression may use.

    twice: another definition has the same name, so that nobody knows its value.
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
    """The constants an expression may refer to: the `let`s of its file and the `param`s of all files."""

    params: dict[str, Definition] = field(factory=dict)
    lets: dict[str, Definition] = field(factory=dict)

    def find(self, name: str) -> Definition | None:
        return self.lets.get(name) or self.params.get(name)

    @property
    def all(self) -> MappingOf[str, Definition]:
        return {**self.params, **self.lets}


class Evaluator:
    """Evaluates expressions; what is wrong goes to `diagnostics`, and the value is `FAILED`."""

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
        """The value of a `let` or `param`. depth: of the expressions, through all constants, that led here."""
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
        return Value(found.data, node.span, (ValueStep(kind, node.text, span), *found.via))

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
                        "X220", "an argument without name follows one with a name", argument.span,
                        hint="put it before them",
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
            self.diagnostics.error("X308", f"`{name}` takes no argument called `{keyword}`", span)
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
        """Whether a value can be computed with; a name that nobody defined cannot, and is reported."""
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
    return tuple(dict.fromkeys(step for trail in trails for step in trail))
