"""Reader that turns the source text of a user's `@layer` function into a `UserLayer`.

It reads the body operation by operation: inputs and outputs, tensors kept for the backward, and the cut by tensor
parallelism. Shapes, memory, traffic and operations follow, and so does the check that several ranks compute the same as
one.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from attrs import evolve

from xtrain.blocks.mixer import LayerState, UserMixer
from xtrain.blocks.user_layer import UNARY, LayerOp, UserFunction, UserLayer, is_reserved
from xtrain.dsl.user_parts.bodies import BodyError, BodyReader, ModuleText, is_number
from xtrain.dsl.user_parts.files import expression, fits
from xtrain.dsl.user_parts.reader import Declared
from xtrain.dsl.user_parts.signatures import Weight
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import BlockParameter

# State of values in a layer whose matrices are cut: whole on every rank, cut along the last dimension, or summands of a
# sum over ranks.
WHOLE, CUT, SUMMAND = "whole", "cut", "summand"
_NN: Final = "torch.nn.functional"
_SIGNS: Final = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow"}
_OPERATIONS: Final = ("linear", "rms_norm", *UNARY, "softmax")


@frozen
class AcceptedArgument:
    """Argument that a function accepts in addition to a tensor. fits: returns True for a valid value; `takes` describes
    valid values. required: it has no default. named: it is keyword-only."""

    fits: Callable[[Any], bool]
    takes: str
    required: bool = False
    named: bool = False


_IN_PLACE: Final = AcceptedArgument(lambda value: value is False, "False, as values are not changed in place")
_NUMBER: Final = AcceptedArgument(is_number, "a number")
_NONZERO: Final = AcceptedArgument(lambda value: is_number(value) and value != 0, "a number other than 0")
_LAST: Final = AcceptedArgument(
    lambda value: value == -1 and is_number(value), "-1: all of the last dimension", required=True
)
_APPROXIMATE: Final = AcceptedArgument(lambda value: value in ("none", "tanh"), '"none" or "tanh"', named=True)
# Elementwise functions and softmax: from `torch.nn.functional`, and those that are both tensor methods and functions of
# `torch`, with their signatures there.
FUNCTIONAL: Final[dict[str, dict[str, AcceptedArgument]]] = {
    "relu": {"inplace": _IN_PLACE},
    "sigmoid": {},
    "tanh": {},
    "silu": {"inplace": _IN_PLACE},
    "gelu": {"approximate": _APPROXIMATE},
    "mish": {"inplace": _IN_PLACE},
    "softplus": {"beta": _NONZERO, "threshold": _NUMBER},
    "leaky_relu": {"negative_slope": _NUMBER, "inplace": _IN_PLACE},
    "hardswish": {"inplace": _IN_PLACE},
    "softmax": {"dim": _LAST},
}
METHODS: Final[dict[str, dict[str, AcceptedArgument]]] = {
    **{name: {} for name in ("relu", "sigmoid", "tanh", "exp", "sin", "cos", "abs", "square")},
    "pow": {"exponent": evolve(_NUMBER, required=True)},
    "softmax": {"dim": _LAST},
}


@frozen(eq=False)
class Activations:
    """Result of an operation: `width` numbers for each position. `place`: WHOLE, CUT or SUMMAND."""

    index: int
    width: int
    place: str
    node: Any = None


@frozen(eq=False)
class GivenWeight:
    """Parameter, or a value computed from a vector and numbers."""

    of: BlockParameter
    name: str

    @property
    def width(self) -> int:
        return self.of.shape[-1]

    @property
    def place(self) -> str:
        return CUT if self.of.cut else WHOLE


def read_layer(
    declared: Declared, name: str, given: Mapping[str, Any], known: Mapping[str, Any], width: int
) -> UserFunction:
    """Read a declared layer under a name, with the arguments of its call. known: settings that shapes may name. width:
    of its input and output. Raises BodyError."""
    assert declared.body is not None
    weights = tuple(_weight(declared, each, {**known, **given}) for each in declared.weights)
    if not weights:
        raise BodyError(f"`{declared.name}` has no weight", declared.span, 'give a parameter `weight("ffn", "dim")`')
    if declared.states:
        return _mixer(declared, name, given, {**known, **given}, weights)
    is_cut = any(weight.cut for weight in weights)
    reader = _LayerReader(declared, weights, width)
    ops = reader.ops(given)
    return UserLayer(
        name=name,
        function=declared.name,
        arguments=dict(given),
        code=blake2b(declared.body.code().encode(), digest_size=8).hexdigest(),
        weights=tuple(
            evolve(
                each, name=f"{each.name}.weight", partial="never" if each.cut else "always" if is_cut else "by_position"
            )
            for each in weights
        ),
        ops=ops,
    )


def _mixer(
    declared: Declared,
    name: str,
    given: Mapping[str, Any],
    known: Mapping[str, Any],
    weights: tuple[BlockParameter, ...],
) -> UserMixer:
    """Return a layer that mixes positions, whose body is not read but measured."""
    assert declared.body is not None
    if any(weight.cut for weight in weights):
        cut = next(each for each in declared.weights if each.cut)
        message = f"`{declared.name}` mixes positions, and every tensor-parallel rank has all of it"
        raise BodyError(message, cut.span, "remove `cut`")
    states = (
        LayerState(shape=_weight(declared, each, known).shape, initial=each.initial)  # type: ignore[arg-type]
        for each in declared.states
    )
    return UserMixer(
        name=name,
        function=declared.name,
        arguments=dict(given),
        code=blake2b(declared.body.code().encode(), digest_size=8).hexdigest(),
        weights=tuple(evolve(each, name=f"{each.name}.weight", partial="by_position") for each in weights),
        states=tuple(states),
    )


def check_argument(name: str, kind: Any, value: Any) -> str | None:
    """Return the fault of an argument of a layer or a piece, as the end of a sentence; None if it is valid."""
    if fits(kind, value):
        return None
    word = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}.get(kind, "of another type")
    return f"`{name}` must be {word}"


def _weight(declared: Declared, weight: Weight, known: Mapping[str, Any]) -> BlockParameter:
    assert declared.body is not None
    if is_reserved(weight.name):
        message = f"a weight cannot be named `{weight.name}`: torch modules already have this attribute"
        raise BodyError(message, weight.span, "give it another name")
    reader, shape = _ShapeReader(declared.body.module, weight), []
    for extent in weight.shape:
        found = reader.extent(extent, known) if isinstance(extent, str) else extent
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            message = f"`{extent}` of `{weight.name}` comes to {found}, which is not a valid size"
            raise BodyError(message, weight.span, "use a whole number above 0; `//` divides without remainder")
        shape.append(found)
    return BlockParameter(
        name=weight.name,
        shape=tuple(shape),
        decays=len(shape) > 1,
        initial=weight.initial,  # type: ignore[arg-type]
        cut=weight.cut,  # type: ignore[arg-type]
    )


class _ShapeReader(BodyReader):
    what = "a size"

    def __init__(self, module: ModuleText, weight: Weight) -> None:
        super().__init__(module)
        self.weight = weight

    def extent(self, text: str, known: Mapping[str, Any]) -> Any:
        node = expression(text)
        if node is None:
            raise self.wrong(f"`{text}` is not an expression", None, 'write settings and numbers, such as "2 * ffn"')
        return self.value(node, known)

    def wrong(self, message: str, node: Any, hint: str) -> BodyError:
        """Return an error at the weight's place, because nodes belong to a text of their own."""
        return BodyError(f"the shape of `{self.weight.name}`: {message}", self.weight.span, hint)


class _LayerReader(BodyReader):
    """Reader of the body of a layer, operation by operation."""

    what = "activations"

    def __init__(self, declared: Declared, weights: tuple[BlockParameter, ...], width: int) -> None:
        assert declared.body is not None
        super().__init__(declared.body.module)
        self.declared, self.width, self.body = declared, width, declared.body
        self.weights = {weight.name: GivenWeight(weight, weight.name) for weight in weights}
        self.found: list[LayerOp] = []
        self.values: list[Activations] = []

    def ops(self, given: Mapping[str, Any]) -> tuple[LayerOp, ...]:
        """Return the layer's operations. Raises BodyError if one cannot be read, does not fit, or is unused."""
        body, cut = self.body, any(weight.of.cut for weight in self.weights.values())
        names = {body.first: Activations(0, self.width, WHOLE), **given, **self.weights}
        out, span = self.returned(body.node, names), self.declared.span
        if not isinstance(out, Activations) or out.index == 0:
            raise BodyError(
                f"`{self.declared.name}` does not return the result of an operation", span, "compute something"
            )
        if out.width != self.width:
            message = f"`{self.declared.name}` returns {out.width} numbers for each position, but gets {self.width}"
            raise BodyError(message, span, "end with a matrix whose first extent is `dim`")
        wanted = SUMMAND if cut else WHOLE
        if out.place != wanted:
            hint = 'give its last matrix `cut="row"`' if cut else "remove `cut`"
            message = (
                f"under tensor parallelism `{self.declared.name}` would return a value that is {out.place} on a rank"
            )
            raise BodyError(message, span, hint)
        used = {index for op in self.found for index in op.of} | {out.index}
        for value in self.values:
            if value.index not in used:
                raise self.wrong("this result is not used", value.node, "remove it")
        if out.index != len(self.found):
            raise self.wrong("this result is not used", self.values[-1].node, "remove it")
        for name in self.weights.keys() - {name for op in self.found for name in op.weights}:
            place = next(each.span for each in self.declared.weights if each.name == name)
            raise BodyError(f"weight `{name}` is not used", place, "use it, or remove it")
        return tuple(self.found)

    def _operation(
        self, name: str, of: list[Activations], width: int, place: str, node: Any, *weights: GivenWeight
    ) -> Any:
        self.found.append(LayerOp(name=name, of=tuple(v.index for v in of), weights=tuple(w.name for w in weights)))
        self.values.append(Activations(len(self.found), width, place, node))
        return self.values[-1]

    # Calls ------------------------------------------------------------------------------------------------------------

    def call(self, name: str, node: ast.Call, given: list[Any], named: dict[str, Any]) -> Any:
        package, _, last = name.rpartition(".")
        for title, names, read in (
            (f"{_NN}.linear", ("input", "weight", "bias"), self._linear),
            ("xtrain.rms_norm", ("x", "weight_D", "eps"), self._norm),
        ):
            if name == title:
                return read(node, *map(self._arguments(node, given, named, names).get, names))
        known = {_NN: FUNCTIONAL, "torch": METHODS}.get(package, {})
        if last not in known:
            raise self.unknown(node, name, _OPERATIONS)
        return self._single(last, node, known[last], given, named)

    def method(self, value: Any, name: str, node: ast.Call, given: list[Any], named: dict[str, Any]) -> Any:
        if name not in METHODS:
            raise self.unknown(node, name, METHODS)
        return self._single(name, node, METHODS[name], [value, *given], named)

    def _arguments(
        self, node: ast.Call, given: list[Any], named: dict[str, Any], placed: Sequence[str], more: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return the arguments of a call by name. placed: names that may be positional; more: keyword-only names."""
        found = dict(zip(placed, given, strict=False))
        if len(given) > len(placed) or found.keys() & named or named.keys() - {*placed, *more}:
            raise self.wrong(f"this takes {', '.join((*placed, *more))}", node, "give each of them once")
        return found | named

    def _linear(self, node: ast.Call, x: Any, weight: Any, bias: Any) -> Any:
        if not isinstance(x, Activations) or not isinstance(weight, GivenWeight) or len(weight.of.shape) != 2:
            raise self.wrong("`linear` takes activations and a weight of two extents", node, "F.linear(x, up)")
        if any(weight.name in op.weights for op in self.found):
            message = f"`{weight.name}` is used twice, and a plan counts each matrix once"
            raise self.wrong(message, node, "declare another weight of the same shape")
        outputs, inputs = weight.of.shape
        if inputs != x.width:
            message = f"`{weight.name}` takes {inputs} numbers for each position, and there are {x.width}"
            raise self.wrong(message, node, "its second extent must be the width of its input")
        place = {
            (WHOLE, None): WHOLE,
            (WHOLE, "column"): CUT,
            (CUT, "row"): SUMMAND,
            (SUMMAND, None): SUMMAND,
        }.get((x.place, weight.of.cut))
        if place is None:
            message = (
                f"under tensor parallelism `{weight.name}` ({weight.of.cut or 'not cut'}) cannot take a value that is "
            )
            hint = 'a matrix with `cut="row"` follows those with `cut="column"`'
            raise self.wrong(f"{message}{x.place} on a rank", node, hint)
        extra = () if bias is None else (bias,)
        if bias is not None:
            good = isinstance(bias, GivenWeight) and bias.of.shape == (outputs,)
            if not good or bias.place != place:
                why = f"a bias of {place} outputs" if good else f"a vector of {outputs} numbers"
                hint = "a bias is cut like the outputs; a matrix with a row cut has no bias"
                raise self.wrong(f"`{weight.name}` takes {why}", node, hint)
        return self._operation("linear", [x], outputs, place, node, weight, *extra)

    def _norm(self, node: ast.Call, x: Any, weight: Any, eps: Any) -> Any:
        good = isinstance(x, Activations) and isinstance(weight, GivenWeight) and is_number(eps)
        if not good or weight.of.shape != (x.width,):
            raise self.wrong(
                "`rms_norm` takes activations, a vector as wide, and a number", node, "rms_norm(x, gain, 1e-6)"
            )
        if x.place != WHOLE or weight.of.cut:
            message = f"under tensor parallelism a rank has no whole rows of a value that is {x.place}"
            raise self.wrong(message, node, "norm before matrices that are cut")
        return self._operation("rms_norm", [x], x.width, WHOLE, node, weight)

    def _single(
        self, name: str, node: ast.Call, takes: Mapping[str, AcceptedArgument], given: list[Any], named: dict[str, Any]
    ) -> Any:
        """Read an elementwise function, or a softmax over the last dimension. takes: its arguments after the first."""
        placed = ["input", *(each for each, argument in takes.items() if not argument.named)]
        found = self._arguments(node, given, named, placed, [each for each in takes if each not in placed])
        for each, argument in takes.items():
            if argument.required and each not in found:
                raise self.wrong(f"`{name}` needs `{each}`", node, f"it is {argument.takes}")
            if each in found and not argument.fits(found[each]):
                raise self.wrong(f"`{each}` of `{name}` must be {argument.takes}", node, "give another value")
        x = found.get("input")
        if isinstance(x, GivenWeight) and len(x.of.shape) == 1 and name != "softmax":
            return x
        if not isinstance(x, Activations):
            raise self.wrong(
                f"`{name}` takes activations", node, "apply it to a value computed from the first parameter"
            )
        if name == "softmax":
            if x.place != WHOLE:
                raise self.wrong(
                    "a softmax is taken over all of the last dimension", node, "softmax(x, -1) of a whole value"
                )
            return self._operation("softmax", [x], x.width, WHOLE, node)
        self._no_sum(x, node)
        return self._operation(name, [x], x.width, x.place, node)

    def _no_sum(self, x: Activations, node: Any) -> None:
        if x.place == SUMMAND:
            message = "under tensor parallelism this is a summand on each rank, which only allows sums and scaling"
            raise self.wrong(message, node, 'compute it before the matrix with `cut="row"`')

    # Operators --------------------------------------------------------------------------------------------------------

    def negative(self, value: Any, node: ast.expr) -> Any:
        return self.binary(ast.Mult, value, -1, node)

    def attribute(self, value: Any, node: ast.Attribute) -> Any:
        raise self.wrong(f"`.{node.attr}` is known only in a run", node, "use settings and numbers")

    def binary(self, sign: type, left: Any, right: Any, node: ast.expr) -> Any:
        name = _SIGNS.get(sign, "")
        tensors = [each for each in (left, right) if isinstance(each, Activations)]
        vectors = [each for each in (left, right) if isinstance(each, GivenWeight)]
        numbers = [each for each in (left, right) if is_number(each)]
        if len(tensors) + len(vectors) + len(numbers) != 2 or not name or any(len(v.of.shape) > 1 for v in vectors):
            raise self.wrong(f"`{ast.unparse(node)}` cannot be read without running the code", node, _HINT)
        if not tensors:
            if len(vectors) == 1:
                return vectors[0]  # as the gradient is passed on to it, and it is small
            raise self.wrong("two weights do not make activations", node, _HINT)
        x = tensors[0]
        if numbers:
            return self._with_number(name, x, left is x, node)
        width = max(each.width for each in (*tensors, *vectors))
        if any(each.width != width for each in (*tensors, *vectors)):
            widths = " and ".join(str(each.width) for each in (left, right))
            raise self.wrong(f"widths of {widths} do not fit", node, "give both sides the same width")
        if vectors:
            return self._with_vector(name, x, vectors[0], left is x, node)
        places = {each.place for each in tensors}
        if name in ("add", "sub") and len(places) == 1:
            return self._operation(name, tensors, width, x.place, node)
        if name in ("mul", "div") and len(places) == 1 and SUMMAND not in places:
            return self._operation(name, tensors, width, x.place, node)
        if name == "pow":
            raise self.wrong("only numbers can be exponents", node, _HINT)
        message = f"under tensor parallelism values that are {tensors[0].place} and {tensors[1].place} on a rank"
        raise self.wrong(
            f"{message} cannot be combined this way", node, "combine values with the same cut, before the row cut"
        )

    def _with_number(self, name: str, x: Activations, first: bool, node: ast.expr) -> Any:
        if (name == "pow" and not first) or (name == "div" and not first):
            raise self.wrong(f"`{ast.unparse(node)}` cannot be read without running the code", node, _HINT)
        if name != "mul" and name != "div":
            self._no_sum(x, node)
        operation = {
            "mul": "scaled",
            "div": "scaled",
            "add": "shifted",
            "sub": "shifted" if first else "scaled",
            "pow": "pow",
        }
        return self._operation(operation[name], [x], x.width, x.place, node)

    def _with_vector(self, name: str, x: Activations, vector: GivenWeight, first: bool, node: ast.expr) -> Any:
        wanted = {WHOLE: WHOLE, CUT: CUT, SUMMAND: WHOLE}[x.place]
        if name not in ("add", "mul") and not (name == "sub" and first):
            raise self.wrong(f"`{ast.unparse(node)}` cannot be read without running the code", node, _HINT)
        if vector.place != wanted:
            message = f"under tensor parallelism `{vector.name}` is {vector.place} on a rank, but the other value is "
            raise self.wrong(message + x.place, node, 'a vector has `cut="column"` where activations are cut')
        if name != "mul":
            self._no_sum(x, node)
        return self._operation("mul" if name == "mul" else "shifted", [x], x.width, x.place, node, vector)


_HINT: Final = "write +, -, *, / and ** of activations, vectors and numbers"
