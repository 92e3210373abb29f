"""Symbolic evaluation of a user function's body from its text: assignments, `if`, and expressions of known values.

`BodyReader` handles Python's numbers and statements; subclasses define what may be called and which other values exist.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, Final

from attrs import field

from xtrain.dsl.diagnostics.diagnostic import SourceText, Span
from xtrain.dsl.diagnostics.suggest import did_you_mean
from xtrain.dsl.user_parts.files import nested_too_deeply
from xtrain.lazy_attrs import frozen

_MOST_CALLS: Final = 1000  # calls of functions of the module, per body
_LARGEST: Final = 2**63
_NUMBERS: Final[dict[type, Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_COMPARED: Final[dict[type, Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
_CALLED: Final[dict[str, Callable[..., Any]]] = {"int": int, "float": float, "round": round, "min": min, "max": max}


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class BodyError(Exception):
    """An unreadable body, with its place and what to write instead."""

    def __init__(self, message: str, span: Span, hint: str) -> None:
        super().__init__(message)
        self.message, self.span, self.hint = message, span, hint


@frozen(eq=False)
class ModuleText:
    """A user module. imports: name → full dotted name. functions: top-level functions. layers: those with `@layer`, by
    name. wrapped: names of functions with a decorator that is not xtrain's. others: name of another top-level object
    → the statement that defines it, and the import that it replaces."""

    source: SourceText
    imports: dict[str, str] = field(factory=dict)
    functions: dict[str, ast.FunctionDef] = field(factory=dict)
    layers: dict[str, Any] = field(factory=dict)
    wrapped: set[str] = field(factory=set)
    others: dict[str, tuple[ast.stmt, str]] = field(factory=dict)

    def span(self, node: Any) -> Span:
        start = offset(self.source, node.lineno, node.col_offset)
        return Span(self.source, start, max(start + 1, offset(self.source, node.end_lineno, node.end_col_offset)))

    def name_span(self, node: Definition) -> Span:
        begin = offset(self.source, node.lineno, node.col_offset)
        start = self.source.text.find(node.name, begin + len("class" if isinstance(node, ast.ClassDef) else "def"))
        return Span(self.source, start, start + len(node.name))

    def check_depth(self, function: ast.FunctionDef) -> None:
        """Check the nesting depth of a function. Raises BodyError if it is too deep."""
        if (found := nested_too_deeply(function)) is not None:
            raise BodyError("this is nested too deeply", self.span(found), "split it into several statements")

    def dotted(self, node: ast.expr) -> str:
        """Return the full name of an imported name, such as `torch.nn.functional.relu`; empty if the module
        defines it."""
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, "")
        base = self.dotted(node.value) if isinstance(node, ast.Attribute) else ""
        return f"{base}.{node.attr}" if base and isinstance(node, ast.Attribute) else ""


@frozen(eq=False)
class FunctionBody:
    """A function with the module around it."""

    module: ModuleText
    node: ast.FunctionDef

    @property
    def first(self) -> str:
        """Name of its first parameter."""
        return [*self.node.args.posonlyargs, *self.node.args.args][0].arg

    def code(self) -> str:
        """Return its code and the module's functions that it calls, without comments and layout.

        Raises BodyError.
        """
        seen: dict[str, str] = {}
        waiting = [self.node]
        while waiting:
            node = waiting.pop()
            if node.name not in seen:
                self.module.check_depth(node)
                body = [each for each in node.body if not _is_text(each)]
                seen[node.name] = "\n".join([ast.unparse(node.args), *map(ast.unparse, body)])
                names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                waiting += [self.module.functions[name] for name in sorted(names) if name in self.module.functions]
        return "\n".join(seen[name] for name in sorted(seen))


class BodyReader:
    """Evaluates the return value of a body. Raises BodyError.

    under_way: functions of the module being evaluated, the outermost first. calls: number of evaluated calls.
    """

    what = "a value"

    def __init__(self, module: ModuleText) -> None:
        self.module, self.calls = module, 0
        self.under_way: list[str] = []

    # What another kind of value can do --------------------------------------------------------------------------------

    def call(self, name: str, node: ast.Call, given: list[Any], named: dict[str, Any]) -> Any:
        """Return the result of a call of an imported function. name: dotted, or a plain name that nothing defines."""
        raise self.unknown(node, name)

    def method(self, value: Any, name: str, node: ast.Call, given: list[Any], named: dict[str, Any]) -> Any:
        raise self.wrong(f"`{name}` cannot be called here", node, self.hint)

    def attribute(self, value: Any, node: ast.Attribute) -> Any:
        raise self.wrong(f"`{ast.unparse(node)}` is unknown before a run", node, self.hint)

    def binary(self, sign: type, left: Any, right: Any, node: ast.expr) -> Any:
        raise self.wrong(f"`{ast.unparse(node)}` is unknown before a run", node, self.hint)

    def negative(self, value: Any, node: ast.expr) -> Any:
        raise self.wrong(f"`{ast.unparse(node)}` is unknown before a run", node, self.hint)

    def own(self, name: str, node: ast.Call, given: list[Any], named: dict[str, Any]) -> Any:
        """Return the result of a call of a function of the module."""
        function = self.module.functions[name]
        arguments = function.args
        placed = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        both = placed[: len(given)]
        known = [*placed, *(each.arg for each in arguments.kwonlyargs)]
        names = {**dict(zip(placed, given, strict=False)), **named}
        defaults = dict(zip(placed[len(placed) - len(arguments.defaults) :], arguments.defaults, strict=True))
        defaults |= {a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d}
        names = {**{each: self.value(default, {}) for each, default in defaults.items() if each not in names}, **names}
        if len(given) > len(placed) or set(names) != set(known) or set(both) & set(named) or arguments.vararg:
            raise self.wrong(f"`{name}` takes {', '.join(known) or 'nothing'}", node, "pass each of them once")
        if name in self.module.wrapped:
            raise self.wrong(f"`{name}` has a decorator, which may change its result", node, "remove it")
        if name in self.under_way:
            raise self.wrong(f"`{name}` calls itself", node, "write it without recursion")
        self.calls += 1
        if self.calls > _MOST_CALLS:
            message = f"reading this takes more than {_MOST_CALLS} calls of functions of this file"
            raise self.wrong(message, node, "use fewer calls between functions")
        self.module.check_depth(function)
        self.under_way.append(name)
        try:
            return self.returned(function, names)
        except RecursionError:
            message = "function calls are nested too deeply here"
            raise self.wrong(message, node, "nest fewer function calls") from None
        finally:
            self.under_way.pop()

    # Statements -------------------------------------------------------------------------------------------------------

    def returned(self, function: ast.FunctionDef, names: Mapping[str, Any]) -> Any:
        """Return the return value of a function. names: its parameters."""
        found = self._run(function.body, dict(names))
        if found is _NOTHING:
            raise BodyError(f"`{function.name}` returns nothing", self.module.span(function), f"return {self.what}")
        return found

    def _run(self, body: list[ast.stmt], names: dict[str, Any]) -> Any:
        for node in body:
            match node:
                case ast.Return(value=ast.expr() as value):
                    return self.value(value, names)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    names[name] = self.value(value, names)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    names[name] = self.value(value, names)
                case ast.If():
                    found = self._run(node.body if self._plain(node.test, names) else node.orelse, names)
                    if found is not _NOTHING:
                        return found
                case ast.Pass():
                    pass
                case _ if not _is_text(node):
                    hint = f"write assignments, `if` and `return` with {self.what}"
                    raise self.wrong("this statement cannot be read without running the code", node, hint)
        return _NOTHING

    # Expressions ------------------------------------------------------------------------------------------------------

    def value(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        """Return the value of an expression."""
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return value
            case ast.Name(id=name):
                if name in names:
                    return names[name]
                if name in self.module.imports or name in self.module.functions:
                    raise self.wrong(f"`{name}` is not a value here", node, f"call it: `{name}(…)`")
                raise self.undefined(name, names, node)
            case ast.Attribute(value=base) if not self._imported(node, names):
                return self.attribute(self.value(base, names), node)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = self.value(operand, names)
                return -value if is_number(value) else self.negative(value, node)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._plain(operand, names)
            case ast.BinOp(left=left, right=right, op=sign):
                return self._binary(type(sign), self.value(left, names), self.value(right, names), node)
            case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _COMPARED:
                return self._numbers(_COMPARED[type(sign)], self._plain(left, names), self._plain(right, names), node)
            case ast.BoolOp(op=sign, values=values):
                found = None
                for each in values:
                    found = self._plain(each, names)
                    if bool(found) is isinstance(sign, ast.Or):
                        break
                return found
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.value(body if self._plain(test, names) else orelse, names)
            case ast.Call():
                return self._call(node, names)
        raise self.wrong(f"`{ast.unparse(node)}` cannot be read without running the code", node, self.hint)

    def _call(self, node: ast.Call, names: Mapping[str, Any]) -> Any:
        if any(isinstance(each, ast.Starred) for each in node.args) or any(k.arg is None for k in node.keywords):
            raise self.wrong("`*` and `**` cannot be read without running the code", node, "write out the arguments")
        given = [self.value(each, names) for each in node.args]
        named = {str(each.arg): self.value(each.value, names) for each in node.keywords}
        target = node.func
        if self._imported(target, names):
            return self.call(self.module.dotted(target), node, given, named)
        if isinstance(target, ast.Name) and target.id not in names:
            if target.id in self.module.layers or target.id in self.module.functions:
                return self.own(target.id, node, given, named)
            if target.id in _CALLED and all(map(is_number, (*given, *named.values()))):
                return self._numbers(_CALLED[target.id], *given, node, **named)
            return self.call(target.id, node, given, named)
        if isinstance(target, ast.Attribute):
            return self.method(self.value(target.value, names), target.attr, node, given, named)
        raise self.wrong(f"`{ast.unparse(target)}` cannot be called here", node, self.hint)

    def _imported(self, node: ast.expr, names: Mapping[str, Any]) -> bool:
        """Return True if a name, dotted or not, is imported."""
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        return isinstance(root, ast.Name) and root.id not in names and bool(self.module.dotted(node))

    def _binary(self, sign: type, left: Any, right: Any, node: ast.expr) -> Any:
        if not (is_number(left) and is_number(right)):
            return self.binary(sign, left, right, node)
        if sign not in _NUMBERS or (sign is ast.Pow and abs(right) > 64):
            raise self.wrong(f"`{ast.unparse(node)}` cannot be read without running the code", node, self.hint)
        return self._numbers(_NUMBERS[sign], left, right, node)

    def _numbers(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Apply a function of numbers; the last one of `given` is the node, for errors."""
        *values, node = given
        try:
            found = function(*values, **named)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise self.wrong(f"`{ast.unparse(node)}`: {error}", node, "write a valid expression") from None
        if isinstance(found, complex) or (is_number(found) and not (isfinite(found) and abs(found) < _LARGEST)):
            raise self.wrong(f"`{ast.unparse(node)}` is not a valid number of a plan", node, "write a smaller number")
        return found

    def _plain(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        found = self.value(node, names)
        if found is None or isinstance(found, bool | int | float | str):
            return found
        raise self.wrong(f"`{ast.unparse(node)}` is known only in a run", node, "decide by settings")

    # Mistakes ---------------------------------------------------------------------------------------------------------

    @property
    def hint(self) -> str:
        return f"write {self.what} with numbers and settings"

    def wrong(self, message: str, node: Any, hint: str) -> BodyError:
        return BodyError(message, self.module.span(node), hint)

    def undefined(self, name: str, names: Mapping[str, Any], node: ast.expr) -> BodyError:
        known = [*names, *self.module.layers]
        if name in self.module.others:
            statement, replaced = self.module.others[name]
            what = "a class" if isinstance(statement, ast.ClassDef) else "a value"
            message = f"`{name}` is {what} defined in line {statement.lineno}, which is not read"
            hint = f"rename it: it replaces the import of `{replaced}`" if replaced else self.hint
            return self.wrong(message, node, hint)
        return self.wrong(
            f"`{name}` is not defined here", node, did_you_mean(name, known) or f"there is {_list(known)}"
        )

    def unknown(self, node: ast.Call, name: str, known: Any = ()) -> BodyError:
        """Return the error of a name that cannot be called."""
        last = name.rpartition(".")[2]
        hint = did_you_mean(last, known) or f"there is {_list(known)}"
        return self.wrong(f"`{ast.unparse(node.func)}` cannot be called here", node.func, hint)


_NOTHING: Final = object()


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _list(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def offset(source: SourceText, line: int, column: int) -> int:
    """Return the offset of Python's position: a line (from 1) and a column in bytes of UTF-8 (from 0)."""
    text = source.line(line)
    return source.line_start(line) + len(text.encode()[:column].decode(errors="ignore"))
