"""`model NAME { … }` with user code: a function with `@family` in a module named by `use`.

The block is read from the function's text. The function is never called; the plan holds the block as data. Layers that
mix positions are called in a process of their own, on small tensors.
"""

import ast
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Final, get_origin

from xtrain.blocks.block import BlockPiece, Chain, Layer, is_composable, piece, pieces
from xtrain.blocks.layer_reader import check_argument, read_layer
from xtrain.blocks.mixer import UserMixer
from xtrain.blocks.user_layer import is_reserved
from xtrain.contracts.models import PlannedModel
from xtrain.dsl.diagnostics.suggest import did_you_mean
from xtrain.dsl.schema.component import COMPUTED, UserComponent, named
from xtrain.dsl.schema.model import FAMILIES, ExpertTransformer, Resuming, TransformerSettings
from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.user_parts.bodies import BodyError, BodyReader, FunctionBody
from xtrain.dsl.user_parts.files import expression, is_file
from xtrain.dsl.user_parts.reader import Declared
from xtrain.dsl.user_parts.signatures import REQUIRED
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture

_OWN: Final = ("own", "family", "vocab")  # fields of an architecture that a block does not use


class _OwnFamily(UserComponent):
    """Common base of user-defined model families."""

    hands_on = False  # the plan has what its function makes of its texts
    family: str
    other: ClassVar[Resuming] = "width"

    @classmethod
    def base_of(cls, declared: Declared) -> type:
        """Return the base class; the one with expert settings if a piece of the block needs them."""
        pieces = (each for each in _pieces_of(declared.body) if isinstance(each, type) and issubclass(each, Layer))
        return UserExpertFamily if any(issubclass(each.settings, ExpertTransformer) for each in pieces) else UserFamily

    @classmethod
    def block(cls, arch: Architecture) -> BlockPiece:
        return BlockPiece.from_json(arch.own["block"])

    def composed(self, arch: Architecture, report: Callable[[BodyError], None]) -> dict[str, Any]:
        user = {"module": self.module, "function": self.function, "digest": self.digest}
        mixers: dict[str, Any] = {}
        try:
            block = _FamilyReader(self.declaration, arch).block()
            mixers = {each.name: self._measured(each, arch) for each in block.layers() if isinstance(each, UserMixer)}
        except BodyError as wrong:
            report(wrong)
            block = Chain.of()
        found = {"user": {**user, "line": self.declaration.span.line}, "block": block.to_json()}
        return {**found, "mixers": mixers} if mixers else found

    def _measured(self, layer: UserMixer, arch: Architecture) -> Mapping[str, Any]:
        """Return the description of a layer that mixes positions, whose function a child process calls. Raises
        BodyError if it does not compute what it declares."""
        from xtrain.dsl.checking.inspections import ChildFailed, inspected

        assert self.declaration.body is not None
        path = Path(self.declaration.body.module.source.path).absolute()
        user = {"module": path.as_posix() if is_file(self.module) else self.module, "digest": self.digest}
        request = json.dumps({"layer": layer.to_json(), "user": user, "width": arch.dim}, sort_keys=True)
        told = f"calling `{layer.function}` of {self.module} on small tensors (once for each version of its file)"
        declared = self.declaration.body.module.layers[layer.function]
        try:
            described = inspected("mixers", request, told, (version("torch"),))
        except (ChildFailed, PackageNotFoundError) as failure:
            message = f"the layer `{layer.function}` was not called: {failure}"
            raise BodyError(message, declared.span, "run `xtrain plan`; if it fails, `xtrain doctor`") from failure
        if "problem" in described:
            message = f"the layer `{layer.function}` does not mix positions as it declares: {described['problem']}"
            hint = "return activations and the states after them: f(x, states) of a document, whole or in parts"
            raise BodyError(message, declared.span, hint)
        return described

    def idle(self) -> dict[str, tuple[str, str]]:
        found = dict(super().idle())  # type: ignore[misc]
        read = set(_settings_read(self.declaration.body))
        for name in ("ffn", "qk_norm"):
            if name not in read and not isinstance(getattr(self, name), Auto):
                found[name] = (f"the block of {self.family} does not read it", "remove it")
        return found


@FAMILIES.user
@frozen
class UserFamily(_OwnFamily, TransformerSettings, PlannedModel):
    """`model NAME { … }`: a block composed by a function of your own."""

    family: str = named("")


@frozen
class UserExpertFamily(_OwnFamily, ExpertTransformer, PlannedModel):
    """`model NAME { … }`: a block with experts composed by a function of your own."""

    family: str = named("")


def _pieces_of(body: FunctionBody | None) -> Iterator[Any]:
    """Yield the pieces, and functions of pieces, that a body names."""
    assert body is not None
    for node in ast.walk(body.node):
        if isinstance(node, ast.Name | ast.Attribute) and (found := _piece(body.module.dotted(node))) is not None:
            yield found


def _settings_read(body: FunctionBody) -> Iterator[str]:
    """Yield the settings that a block reads: by pieces, by layers, and by name."""
    for part in _pieces_of(body):
        yield from getattr(part, "reads", ())
    for node in ast.walk(body.node):
        if isinstance(node, ast.Attribute):
            yield node.attr
        if isinstance(node, ast.Name) and node.id in body.module.layers:
            for weight in body.module.layers[node.id].weights:
                texts = (expression(each) for each in weight.shape if isinstance(each, str))
                yield from (n.id for each in texts if each for n in ast.walk(each) if isinstance(n, ast.Name))


def _piece(name: str) -> Any:
    """Return the piece, function of pieces, or class method that an imported name refers to."""
    *package, last = name.split(".")
    if last == "of" and package:
        cls = _piece(".".join(package))
        return getattr(cls, "of", None)
    found = piece(last)
    if found is None or not is_composable(found):
        return None
    return found if ".".join(package) in ("xtrain", getattr(found, "__module__", "")) else None


class _FamilyReader(BodyReader):
    """Reads the block that the body of a family returns."""

    what = "pieces of a block"

    def __init__(self, declared: Declared, arch: Architecture) -> None:
        assert declared.body is not None
        super().__init__(declared.body.module)
        self.declared, self.arch, self.body = declared, arch, declared.body
        self.known = {name: each for name, each in arch.to_json().items() if name not in _OWN}
        self.places: dict[str, ast.Call] = {}

    def block(self) -> BlockPiece:
        """Return the block that the user's function returns. Raises BodyError if the function cannot be read or returns
        no block."""
        own = {each.name: self.arch.own[each.name] for each in self.declared.parameters}
        block = self.returned(self.body.node, {self.body.first: self.arch, **own})
        if not isinstance(block, BlockPiece):
            raise BodyError(f"`{self.declared.name}` returns no piece", self.declared.span, "return the decoder block")
        layers: dict[str, Layer] = {}
        for layer in block.layers():
            if layer.name in layers:
                message = f"two layers of the block are called `{layer.name}`"
                raise self._fault(message, layer.name, "give each a name of its own")
            if (problem := layer.unfit(self.arch)) is not None:
                raise self._fault(problem, layer.name, "give another value")
            if layer.gives or layer.takes:
                message = f"`{layer.name}` shares values with other blocks, but all blocks are this one"
                raise self._fault(message, layer.name, "remove `gives` and `takes`")
            layers[layer.name] = layer
        mixing = [layer for layer in layers.values() if layer.attends and not layer.keeps_state]
        others = any(layer.keeps_state for layer in layers.values())
        if len(mixing) > 1 or not (mixing or others):
            message = f"a block has one attention layer, and the block of `{self.declared.name}` has {len(mixing)}"
            hint = 'put one `AttentionLayer("self_attn")`, or a layer of your own that mixes positions, into it'
            raise BodyError(message, self.declared.span, hint)
        routed = [layer for layer in layers.values() if issubclass(layer.settings, ExpertTransformer)]
        if len(routed) != int(self.arch.is_moe):
            message = (
                f"a block has at most one layer of experts, and the block of `{self.declared.name}` has {len(routed)}"
            )
            raise BodyError(message, self.declared.span, "use one `ExpertsLayer` on each path through the function")
        return block

    # Values other than numbers ----------------------------------------------------------------------------------------

    def attribute(self, value: Any, node: ast.Attribute) -> Any:
        if value is not self.arch:
            return super().attribute(value, node)
        if node.attr not in self.known or node.attr in {each.name for each in self.declared.parameters}:
            hint = did_you_mean(node.attr, self.known) or f"there are {', '.join(self.known)}"
            raise self.wrong(f"`{self.body.first}` has no setting `{node.attr}`", node, hint)
        return self.known[node.attr]

    def call(self, name: str, node: ast.Call, given: list[Any], named: dict[str, Any]) -> Any:
        piece = _piece(name)
        if piece is None:
            raise self.unknown(node, name, [*pieces(), *self.module.layers])
        title = ast.unparse(node.func)
        try:
            signature = inspect.signature(piece)
            bound = signature.bind(*given, **named)
        except TypeError as error:
            takes = ", ".join(inspect.signature(piece).parameters)
            raise self.wrong(f"`{title}`: {error}", node, f"it takes {takes}") from None
        for each, value in bound.arguments.items():
            kind = signature.parameters[each].annotation
            many = value if signature.parameters[each].kind is inspect.Parameter.VAR_POSITIONAL else (value,)
            for one in many:
                self._check(each, kind, one, node)
        try:
            found = piece(*given, **named)
        except ValueError as error:
            raise self.wrong(f"`{title}`: {error}", node, "give another value") from None
        if not getattr(found, "pieces", (found,)):
            raise self.wrong(f"`{title}` has no pieces", node, "put one in")
        if isinstance(found, Layer):
            self._name(found.name, node)
        return found

    def own(self, name: str, node: ast.Call, given: list[Any], named: dict[str, Any]) -> Any:
        """Read a call of a layer class of the module; other functions are read inline."""
        layer = self.module.layers.get(name)
        if layer is None:
            return super().own(name, node, given, named)
        if len(given) != 1 or not isinstance(given[0], str):
            raise self.wrong(f"`{name}` takes its name in the block, and settings", node, f'write `{name}("mlp")`')
        self._name(given[0], node)
        known = {each.name: each for each in layer.parameters}
        for each, value in named.items():
            if each not in known:
                hint = did_you_mean(each, known) or f"it takes {', '.join(known) or 'none'}"
                raise self.wrong(f"`{name}` has no setting `{each}`", node, hint)
            parameter = known[each]
            problem = check_argument(each, parameter.type, value)
            if problem is None and parameter.check is not None and value is not None:
                bad = parameter.check(value)
                problem = f"`{each}` {bad}" if bad else None
            if problem is not None:
                raise self.wrong(problem, node, "give another value")
        values = {each: named.get(each, parameter.default) for each, parameter in known.items()}
        missing = [each for each, value in values.items() if value is REQUIRED or value is COMPUTED]
        if missing:
            raise self.wrong(f"`{name}` needs `{missing[0]}`", node, f'write `{name}("{given[0]}", {missing[0]}=…)`')
        return read_layer(layer, given[0], values, self.known, self.arch.dim)

    def _check(self, name: str, kind: Any, value: Any, node: ast.Call) -> None:
        """Check that an argument of a piece has the type its class declares."""
        if isinstance(kind, type) and issubclass(kind, BlockPiece):
            if not isinstance(value, BlockPiece):
                raise self.wrong(
                    f"`{name}` is a piece of a block", node, "put a piece there, not its class or a number"
                )
            return
        plain = kind in (int, float, str, bool) or get_origin(kind) is not None
        problem = check_argument(name, kind, value) if plain else None
        if isinstance(value, BlockPiece | Architecture):
            problem = f"`{name}` takes no piece"
        if problem is not None:
            raise self.wrong(problem, node, "give another value")

    def _name(self, name: str, node: ast.Call) -> None:
        if not name.isidentifier() or is_reserved(name):
            why = "which modules of torch already have" if is_reserved(name) else "which is not a name"
            raise self.wrong(f"a layer cannot be called `{name}`, {why}", node, 'give it another, as "mlp"')
        self.places[name] = node

    def _fault(self, message: str, name: str, hint: str) -> BodyError:
        return self.wrong(message, self.places[name], hint)
