"""How a block is put together: pieces with parameters, one behind the other, side by side, around a residual stream.

A family composes its block of them. The inventory, the cost and the modules of the runtime follow from that one tree.
Every piece takes activations [tokens, dim], and gives as many.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping, Set
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeVar

import attrs
from attrs import frozen

from xtrain.dsl.schema.component import load_offered
from xtrain.dsl.schema.model import ExpertTransformer, Model, TransformerSettings
from xtrain.planner.architecture import Architecture, BlockParameter, Partial, RotaryAngles
from xtrain.planner.costs.op_trace import TracedTensor

if TYPE_CHECKING:
    from xtrain.planner.costs.block_trace import Tracer


F = TypeVar("F", bound=Callable[..., Any])
# Class of pieces, or function that puts some together → itself, by its name: what a plan is read back by, and what a
# family in a module of the user's is put together of.
_PIECES: Final[dict[str, Callable[..., Any]]] = {}


def composed(function: F) -> F:
    """Registers a function that puts pieces together."""
    _PIECES[function.__name__] = function
    return function


def later(default: Any) -> Any:
    """Declare a field that was added to a piece when there were plans already: they are silent on its default."""
    return attrs.field(default=default, metadata={"later": True})


def piece(name: str) -> Callable[..., Any] | None:
    """Return the class of pieces, or the function that puts some together, with this name; None if there is none."""
    if name not in _PIECES:
        pieces()
    if name not in _PIECES:
        load_offered()
    return _PIECES.get(name)


@cache
def pieces() -> Mapping[str, Callable[..., Any]]:
    """Return xtrain's own pieces and functions of pieces, by name."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")
    return {name: each for name, each in _PIECES.items() if each.__module__.startswith(f"{__package__}.")}


class BlockPiece:
    """A part of a block, or all of it. Two with equal settings compute the same with the same parameters."""

    def __init_subclass__(cls) -> None:
        _PIECES[cls.__name__] = cls

    def to_json(self) -> dict[str, Any]:
        """The piece as JSON, which `from_json` makes it of again."""
        return {
            "piece": type(self).__name__,
            **{a.name: _json(value) for a, value in self._said()},
        }

    def _said(self) -> "Iterator[tuple[attrs.Attribute, Any]]":
        for attribute in attrs.fields(type(self)):
            value = getattr(self, attribute.name)
            if "later" not in attribute.metadata or value != attribute.default:
                yield attribute, value

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "BlockPiece":
        values = {name: _value(each) for name, each in content.items() if name != "piece"}
        made_by = piece(content["piece"])
        if made_by is None:
            raise KeyError(content["piece"])
        return made_by(**values)

    def further(self, *, plus_one: bool) -> "BlockPiece":
        """The block of a module behind this one, the last, that predicts further tokens (`further.py`)."""
        further_block = piece("further_block")  # it is made of pieces itself
        assert further_block is not None
        return further_block(self, plus_one=plus_one)

    def layers(self) -> "Iterator[Layer]":
        """The pieces with a name inside it, in the order in which modules are registered."""
        raise NotImplementedError

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        """Write down what it makes of `x`, keeps and sends; the result."""
        raise NotImplementedError

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        """In the order in which modules register them."""
        for layer in self.layers():
            yield from layer.parameters(arch)

    def buffers(self, arch: Architecture) -> dict[str, list[int]]:
        """Name → shape of the tensors beside parameters that a checkpoint has."""
        return {name: shape for layer in self.layers() for name, shape in layer.buffers(arch).items()}

    def angles(self, arch: Architecture) -> RotaryAngles | None:
        """Those of the layer that attends."""
        return next((layer.angles(arch) for layer in self.layers() if layer.attends), None)

    @property
    def tiles(self) -> bool:
        """Whether it, or a layer of it, can be computed in pieces of the positions (`Tracer.in_pieces`)."""
        return any(layer.tiles for layer in self.layers())

    @property
    def routes(self) -> bool:
        """Whether it has experts."""
        return any(issubclass(layer.settings, ExpertTransformer) for layer in self.layers())


@frozen
class Layer(BlockPiece):
    """A piece that is a module, under its name. `runtime/models/block.py` builds those of this folder; a piece that a
    family defines itself is built by the module that `torch_module` names.

    settings: those of the families that can have it. reads: the settings that it reads which no layer has to.
    adapts: adapters can be of its matrices, and these can be stored in codes: their products are computed by the
    runtime's `Linear` and `Experts`, and written down by `Tracer.linear`.
    attends: it mixes positions, which one layer of a block does. window: of one that attends, how many positions of its
    document a query sees; None: all before it.
    """

    settings: ClassVar[type[Model]] = TransformerSettings
    reads: ClassVar[tuple[str, ...]] = ()
    adapts: ClassVar[bool] = False
    attends: ClassVar[bool] = False
    window: ClassVar[int | None] = None

    name: str

    @classmethod
    def torch_module(cls) -> str:
        """The module that ranks import for it: `…_torch`, beside its own."""
        return f"{cls.__module__}_torch"

    def layers(self) -> "Iterator[Layer]":
        yield self

    @property
    def tiles(self) -> bool:
        return False

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        raise NotImplementedError

    def buffers(self, arch: Architecture) -> dict[str, list[int]]:
        return {}

    def angles(self, arch: Architecture) -> RotaryAngles | None:
        """By how much a layer that attends turns its queries and keys; None: not at all."""
        return None

    def words(self, arch: Architecture) -> tuple[str, ...]:
        """What tells it from layers of the same name in other blocks of the model, for people."""
        return ()

    def pair_flops(self, arch: Architecture) -> int:
        """Operations of the forward for two positions, of a layer that attends."""
        return 0

    def shares_experts(self, arch: Architecture) -> bool:
        """Whether it has experts, and some of them that every token is sent to."""
        return False

    def cached(self, arch: Architecture, tp: int, positions: int, plain: Set[str]) -> int:
        """Numbers that one of `tp` ranks keeps of a text of so many positions while it is generated: those of a layer
        that looks at other positions than its own. plain: those of the block's parameters that are stored in a number
        format, and that no adapter is added to."""
        return 0


@frozen
class Chain(BlockPiece):
    """Pieces one behind the other."""

    pieces: tuple[BlockPiece, ...]

    @classmethod
    def of(cls, *pieces: BlockPiece) -> Self:
        return cls(pieces)

    def layers(self) -> Iterator[Layer]:
        for piece in self.pieces:
            yield from piece.layers()

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        for piece in self.pieces:
            x = _traced(piece, on, x)
        return x


@frozen
class Residual(Chain):
    """x + what the pieces, one behind the other, make of x."""

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        return on.ops.add(x, super().trace(on, x))


@frozen
class Sum(Chain):
    """The sum of what each piece makes of x."""

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        first, *others = self.pieces
        total = _traced(first, on, x)
        for piece in others:
            total = on.ops.add(total, _traced(piece, on, x))
        return total


def _traced(piece: BlockPiece, on: "Tracer", x: TracedTensor) -> TracedTensor:
    if not isinstance(piece, Layer):
        return piece.trace(on, x)
    with on.ops.scope():
        return piece.trace(on, x)


def row_bias(module: str, width: int, partial: Partial = "by_position") -> BlockParameter:
    """The bias of a matrix that is cut by input: it is added once, to the sum of what ranks have, of which sequence
    parallelism leaves each rank its own positions."""
    return BlockParameter(name=f"{module}.bias", shape=(width,), decays=False, initial="zeros", partial=partial)


def _json(value: Any) -> Any:
    if isinstance(value, BlockPiece):
        return value.to_json()
    if isinstance(value, tuple | list):
        return [_json(each) for each in value]
    if isinstance(value, Mapping):
        return {name: _json(each) for name, each in value.items()}
    return attrs.asdict(value, value_serializer=lambda _, __, each: _json(each)) if attrs.has(type(value)) else value


def _value(content: Any) -> Any:
    if isinstance(content, Mapping):
        return BlockPiece.from_json(content) if "piece" in content else {n: _value(each) for n, each in content.items()}
    return tuple(map(_value, content)) if isinstance(content, list | tuple) else content
