"""Parameters of user functions, from their text: values of a spec, and weights of a layer."""

import ast
from collections.abc import Callable
from math import isfinite
from types import NoneType
from typing import Any, Final, Literal, Union, get_args, get_origin

from attrs import field

from xtrain.dsl.diagnostics.diagnostic import Diagnostics, Span
from xtrain.dsl.schema import setting
from xtrain.dsl.schema.component import COMPUTED
from xtrain.dsl.schema.setting import Range
from xtrain.dsl.syntax.tree import CONSTANTS
from xtrain.dsl.user_parts.bodies import ModuleText
from xtrain.dsl.user_parts.files import annotated, fits, optional, parameter_type
from xtrain.dsl.user_parts.kinds import PART_KINDS, Kind
from xtrain.lazy_attrs import frozen

REQUIRED: Final = object()
WEIGHT: Final = "weight"  # declares a parameter of a layer as a parameter of the model
STATE: Final = "state"  # declares a parameter of a layer as its state
BEGINNINGS: Final = ("zeros", "ones")
CUTS: Final = ("column", "row")
INITIALS: Final = ("normal", "residual", "ones", "zeros")
# Bounds in annotations, `Annotated[int, at_least(1)]`; the ones in the first line take numbers.
_BOUNDS: Final[dict[str, Any]] = {
    "at_least": setting.at_least, "between": setting.between,
    "positive": setting.positive, "not_negative": setting.not_negative, "proper_fraction": setting.proper_fraction,
}  # fmt: skip


@frozen
class Parameter:
    """A parameter. type: an annotation of `convert`, or Any. default: a value, REQUIRED or COMPUTED. named:
    keyword-only. check: bounds from its annotation. doc: text from its annotation."""

    name: str
    type: Any
    default: Any
    named: bool
    span: Span = field(repr=False)
    check: Range | None = None
    doc: str = ""

    @property
    def required(self) -> bool:
        """True without a default."""
        return self.default is REQUIRED


@frozen
class Weight:
    """A parameter of a layer that is a parameter of the model, or a state of the layer.

    shape: numbers, and expressions that a plan computes from settings. cut, initial: as of a `BlockParameter` of the
    plan; initial of a state: its value at the first position of a document.
    """

    name: str
    shape: tuple[int | str, ...]
    cut: str | None
    initial: str
    span: Span = field(repr=False)


@frozen
class SignatureReader:
    """Reads the parameters of functions of one module, and reports mistakes."""

    module: ModuleText
    diagnostics: Diagnostics

    def parameters(self, node: ast.FunctionDef, kind: Kind, filled: tuple[str, ...]) -> tuple[Parameter, ...] | None:
        """Return the parameters that a spec sets: without the first ones, passed by the run, and those the run fills by
        name."""
        arguments, about = node.args, PART_KINDS[kind]
        inputs = ("self", *about.inputs) if about.methods else about.inputs
        first = len(inputs)
        for starred in (arguments.vararg, arguments.kwarg):
            if starred is not None:
                sign = "*" if starred is arguments.vararg else "**"
                message = f"`{sign}{starred.arg}` of `{node.name}` accepts any argument"
                self._wrong(message, self.module.span(starred), "name every parameter")
                return None
        placed = [*arguments.posonlyargs, *arguments.args]
        defaults: list[ast.expr | None] = [None] * (len(placed) - len(arguments.defaults))
        defaults += arguments.defaults
        pairs = [(each, default, False) for each, default in zip(placed, defaults, strict=True)]
        if len(placed) < first:
            missing = "its input" if first == 1 else " and ".join(f"`{each}`" for each in inputs)
            hint = f"write `def {node.name}({', '.join(inputs)})`"
            self._wrong(f"`{node.name}` has no parameter for {missing}", self.module.name_span(node), hint)
            return None
        pairs = pairs[first:]
        if arguments.posonlyargs[first:]:
            hint = "remove the `/`"
            self._wrong(f"`{node.name}` receives its arguments by name", self.module.name_span(node), hint)
            return None
        pairs += [
            (each, default, True) for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        ]
        given = [
            self._parameter(*pair)
            for pair in pairs
            if pair[0].arg not in filled and not (kind == "layer" and self._declares(pair[1], WEIGHT, STATE))
        ]
        if None in given:
            return None
        for each in given:
            assert each is not None
            if kind != "layer" and (not each.name.isascii() or each.name in CONSTANTS):
                hint = "use the letters a-z, digits and `_`"
                if each.name in CONSTANTS:
                    hint = "rename it: this name is a value of the language"
                self._wrong(f"`{each.name}` cannot be set in a spec", each.span, hint)
                return None
            if each.name in about.refused:
                message = f"a parameter of {about.noun} cannot be named `{each.name}`"
                self._wrong(message, each.span, about.refused[each.name])
                return None
            if (about.block or about.composes) and each.default is COMPUTED:
                message = f"the default of `{each.name}` is known only when the code is run"
                self._wrong(message, each.span, "write a plain value: a number, a string, a list, `True`, `None`")
                return None
        return tuple(each for each in given if each is not None)

    def tool(self, method: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, Any] | None:
        """Return the definition of a method that a model may call, with the JSON schema of its parameters; None after
        reporting a mistake."""
        does, arguments = (ast.get_docstring(method) or "").strip(), method.args
        name, named = self.module.name_span(method), [*arguments.args[1:], *arguments.kwonlyargs]
        if isinstance(method, ast.AsyncFunctionDef) or arguments.vararg or arguments.kwarg or arguments.posonlyargs:
            hint = "write `def` without `async`, and name every parameter"
            self._wrong(f"the tool `{method.name}` does not name what a model may pass", name, hint)
            return None
        if not does:
            message = f"the tool `{method.name}` has no docstring, from which a model knows what it does"
            self._wrong(message, name, "describe it in the first line of the function")
            return None
        defaults: list[ast.expr | None] = [None] * (len(arguments.args) - len(arguments.defaults))
        values = [*[*defaults, *arguments.defaults][1:], *arguments.kw_defaults]
        properties, required = {}, []
        for argument, default in zip(named, values, strict=True):
            parameter = self._parameter(argument, default, True)
            if parameter is None:
                return None
            form = _json_schema(parameter.type)
            if form is None:
                message = f"the type of `{argument.arg}` of the tool `{method.name}` has no JSON schema"
                hint = "annotate it as `int`, `float`, `str`, `bool`, a `list` or `dict` of these, or a `Literal`"
                self._wrong(message, self.module.span(argument), hint)
                return None
            bounds = {} if parameter.check is None else _bounds_of(parameter.check)
            properties[argument.arg] = {**form, **bounds, **({"description": parameter.doc} if parameter.doc else {})}
            if parameter.required:
                required.append(argument.arg)
        schema = {"type": "object", "properties": properties, "required": required}
        function = {"name": method.name, "description": does.split("\n")[0].strip(), "parameters": schema}
        return {"type": "function", "function": function}

    def _parameter(self, node: ast.arg, default: ast.expr | None, named: bool) -> Parameter | None:
        """Return a parameter; None after reporting an unreadable annotation."""
        kind, value = parameter_type(node.annotation), _default(default)
        plain = value not in (REQUIRED, COMPUTED)
        if plain and value is not None and not fits(kind, value):
            assert node.annotation is not None
            message = f"the default of `{node.arg}` does not match its type, `{ast.unparse(node.annotation)}`"
            self._wrong(message, self.module.span(default), "change the default or the type")
            return None
        kind = optional(kind) if plain and value is None else kind
        check, doc = None, ""
        for extra in annotated(node.annotation):
            if isinstance(extra, ast.Constant) and isinstance(extra.value, str):
                doc = extra.value
                continue
            if check is not None:
                self._wrong(f"`{node.arg}` has two bounds", self.module.span(extra), "write one, as `between(1, 8)`")
                return None
            check = self._bounds(extra)
            if check is None:
                known = "`at_least(1)`, `between(0, 1)`, `positive`, `not_negative` or `proper_fraction`"
                self._wrong(
                    f"`{ast.unparse(extra)}` is not a bound of a number",
                    self.module.span(extra),
                    f"write {known} of xtrain",
                )
                return None
            if kind not in (int, float):
                message = f"`{node.arg}` is not a number and cannot have a bound"
                self._wrong(
                    message,
                    self.module.span(extra),
                    ("annotate it as `int` or `float`, with a matching default if any"),
                )
                return None
            if not check.has_values(whole=kind is int):
                what = "whole number" if kind is int else "number"
                message = f"no {what} satisfies `{ast.unparse(extra)}`"
                self._wrong(message, self.module.span(extra), "write bounds with numbers between them")
                return None
            problem = check(value) if plain else None
            if problem is not None:
                self._wrong(f"the default of `{node.arg}` {problem}", self.module.span(node), "give another default")
                return None
        return Parameter(node.arg, kind, value, named, self.module.span(node), check, doc)

    def _bounds(self, node: ast.expr) -> Range | None:
        """Return the bounds in a part of an annotation."""
        call = node if isinstance(node, ast.Call) and not node.keywords else None
        package, _, name = self.module.dotted(call.func if call else node).rpartition(".")
        known = _BOUNDS.get(name) if package == "xtrain" else None
        if call is None:
            return known if isinstance(known, Range) else None
        numbers = [_default(each) for each in call.args]
        good = all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)
        wanted = {"at_least": 1, "between": 2}.get(name)
        return known(*numbers) if known is not None and good and len(numbers) == wanted else None

    def _declares(self, node: ast.expr | None, *names: str) -> ast.Call | None:
        """Return the call of one of these functions of xtrain, or None."""
        named = isinstance(node, ast.Call) and self.module.dotted(node.func) in {f"xtrain.{name}" for name in names}
        return node if named and isinstance(node, ast.Call) else None

    def weights(self, node: ast.FunctionDef) -> tuple[Weight, ...] | None:
        """Return the model parameters of a layer; None after reporting a mistake in one."""
        return self._all(node, WEIGHT, self._weight)

    def states(self, node: ast.FunctionDef) -> tuple[Weight, ...] | None:
        """Return the states of a layer; None after reporting a mistake in one."""
        return self._all(node, STATE, self._state)

    def _all(
        self, node: ast.FunctionDef, name: str, read: Callable[[ast.arg, ast.Call], Weight | None]
    ) -> tuple[Weight, ...] | None:
        arguments = node.args
        placed = [*arguments.posonlyargs, *arguments.args]
        pairs = [*zip(placed[len(placed) - len(arguments.defaults) :], arguments.defaults, strict=True)]
        pairs += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None]
        found = []
        for argument, default in pairs:
            call = self._declares(default, name)
            if call is not None:
                declared = read(argument, call)
                if declared is None:
                    return None
                found.append(declared)
        return tuple(found)

    def _state(self, argument: ast.arg, call: ast.Call) -> Weight | None:
        span, example = self.module.span(call), 'write `state("heads", "dim", initial="zeros")`'
        shape = [_default(each) for each in call.args]
        given = {str(each.arg): _default(each.value) for each in call.keywords}
        if given.keys() - {"initial"} or not shape or not all(map(_is_extent, shape)):
            self._wrong("a state has extents, numbers or expressions of settings as text", span, example)
            return None
        initial = given.get("initial", BEGINNINGS[0])
        if initial not in BEGINNINGS:
            self._wrong(f"a state does not begin with `{initial}`", span, f"write one of {', '.join(BEGINNINGS)}")
            return None
        return Weight(argument.arg, tuple(shape), None, initial, self.module.span(argument))

    def _weight(self, argument: ast.arg, call: ast.Call) -> Weight | None:
        span, example = self.module.span(call), 'write `weight("ffn", "dim", cut="column")`'
        shape = [_default(each) for each in call.args]
        strange = [each.arg for each in call.keywords if each.arg not in ("cut", "initial")]
        if strange or not all(_is_extent(each) for each in shape) or len(shape) not in (1, 2):
            what = f"`weight` has no argument `{strange[0]}`" if strange else "a weight has one or two extents"
            self._wrong(f"{what}, numbers or expressions of settings as text", span, example)
            return None
        given = {str(each.arg): _default(each.value) for each in call.keywords}
        cut, initial = given.get("cut"), given.get("initial", "ones" if len(shape) == 1 else "normal")
        if (cut is not None and cut not in CUTS) or initial not in INITIALS:
            name, words = ("initial", INITIALS) if initial not in INITIALS else ("cut", CUTS)
            hint = f"write one of {', '.join(words)} as a plain string"
            self._wrong(f"there is no `{name}` `{given[name]}`", span, hint)
            return None
        if cut == "row" and len(shape) == 1:
            self._wrong("a row cut divides the input of a matrix, but a vector has none", span, 'write `cut="column"`')
            return None
        return Weight(argument.arg, tuple(shape), cut, initial, self.module.span(argument))

    def _wrong(self, message: str, span: Span, hint: str) -> None:
        self.diagnostics.error("X223", message, span, hint=hint)


_JSON_TYPES: Final = {int: "integer", float: "number", str: "string", bool: "boolean"}


def _json_schema(kind: Any) -> dict[str, Any] | None:
    """Return the JSON schema of a type of `type_of`; None for one without."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in _JSON_TYPES:
        return {"type": _JSON_TYPES[kind]}
    if origin is Literal:
        return {"type": "string", "enum": list(parts)}
    if origin in (tuple, dict):
        inner = _json_schema(parts[0] if origin is tuple else parts[1])
        if inner is None:
            return None
        word, held = ("array", "items") if origin is tuple else ("object", "additionalProperties")
        return {"type": word, held: inner}
    if origin is Union:
        inner = _json_schema(next(part for part in parts if part is not NoneType))
        return None if inner is None else {"anyOf": [inner, {"type": "null"}]}
    return None


def _bounds_of(check: Range) -> dict[str, Any]:
    """Return the bounds of a number in the words of JSON schemas."""
    named = {"minimum": check.low, "exclusiveMinimum": check.above}
    named |= {"maximum": check.high, "exclusiveMaximum": check.below}
    return {name: bound for name, bound in named.items() if bound is not None}


def _default(node: ast.expr | None) -> Any:
    """Return a default that a spec can write, as a tuple if it is a list; else REQUIRED or COMPUTED."""
    if node is None:
        return REQUIRED
    try:
        return _plain(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return COMPUTED


def _is_extent(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool) and value > 0)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(each) for key, each in value.items()}
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and isfinite(value)):
        return value
    raise ValueError(value)
