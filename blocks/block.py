"""Pieces of a decoder block and their composition: chains, residuals, sums, RMSNorm, multi-token prediction.

A family composes its block from these pieces. The inventory, the cost and the modules of the runtime follow from that
one tree. Every piece takes activations [tokens, dim] and returns activations of the same shape.

Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): at each position t, module k takes the input of the
head of the module before it, or of the model, and the embedding of token t + k. From both, a block of its own and a
norm predict token t + k + 1. Embedding and head are shared with the model.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping, Set
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, Self, TypeVar

import attrs

from xtrain.blocks.op_trace import INDEX, TP, CollectiveCall, TracedTensor
from xtrain.dsl.schema.component import load_offered
from xtrain.dsl.schema.model import ExpertTransformer, Model, TransformerSettings
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import EMBEDDING, Architecture, BlockParameter, LayerKind, Partial, RotaryAngles

if TYPE_CHECKING:
    from xtrain.blocks.tracer import Tracer


F = TypeVar("F", bound=Callable[..., Any])
# Name → piece class or composing function. Plans are read back by these names, and families in a user's module are
# composed from them.
_PIECES: Final[dict[str, Callable[..., Any]]] = {}


def composed(function: F) -> F:
    """Register a function that composes pieces."""
    _PIECES[function.__name__] = function
    return function


def later(default: Any) -> Any:
    """Declare a field that was added to a piece after plans of it existed; plans omit its default."""
    return attrs.field(default=default, metadata={"later": True})


def piece(name: str) -> Callable[..., Any] | None:
    """Return the piece class, or the composing function, with this name; None if there is none."""
    if name not in _PIECES:
        pieces()
    if name not in _PIECES:
        load_offered()
    return _PIECES.get(name)


@cache
def pieces() -> Mapping[str, Callable[..., Any]]:
    """Return xtrain's own pieces and composing functions that families of a user may call, by name."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")
    own = {name: each for name, each in _PIECES.items() if each.__module__.startswith(f"{__package__}.")}
    return {name: each for name, each in own.items() if is_composable(each)}


def is_composable(made_by: Callable[..., Any]) -> bool:
    """Return True if families of a user may call a piece class or composing function."""
    return not isinstance(made_by, type) or bool(getattr(made_by, "composable", False))


class AxisRanks(NamedTuple):
    """Ranks of the axes that cut layers and rows."""

    tp: int
    ring: int
    ulysses: int


class BlockPiece:
    """Part of a block, or all of it. Two pieces with equal settings compute the same with the same parameters.

    composable: families of a user may call the class; its subclasses say it for themselves.
    """

    composable: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.composable = vars(cls).get("composable", True)
        _PIECES[cls.__name__] = cls

    def to_json(self) -> dict[str, Any]:
        """Return the piece as JSON, the input of `from_json`."""
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

    def further(self, *, plus_one: bool, scale: float) -> "BlockPiece":
        """Return the block of a module that predicts further tokens, following this one, the last block."""
        return further_block(self, plus_one=plus_one, scale=scale)

    def layers(self) -> "Iterator[Layer]":
        """Yield the named pieces inside, in the order in which modules are registered."""
        raise NotImplementedError

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        """Record the operations on `x` with the bytes they make, keep and send; return the result."""
        raise NotImplementedError

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        """Yield the parameters in the order in which modules register them."""
        for layer in self.layers():
            yield from layer.parameters(arch)

    def buffers(self, arch: Architecture) -> dict[str, list[int]]:
        """Return name → shape of the tensors in a checkpoint that are not parameters."""
        return {name: shape for layer in self.layers() for name, shape in layer.buffers(arch).items()}

    def shared(self, arch: Architecture, rows: int, sequence: int, formats: tuple[int, int], ways: AxisRanks) -> int:
        """Return the bytes of tensors, without the angles, that all layers of the model use together.

        rows, sequence: the rows of a microbatch and their positions. formats: bytes of a number in the compute format,
        and in exact sums."""
        return max((layer.shared(arch, rows, sequence, formats, ways) for layer in self.layers()), default=0)

    def angles(self, arch: Architecture) -> RotaryAngles | None:
        """Return the RoPE angles of the attention layer; None without RoPE."""
        found = (layer.angles(arch) for layer in self.layers() if layer.attends)
        return next((angles for angles in found if angles is not None), None)

    @property
    def tiles(self) -> bool:
        """True if the piece, or a layer of it, can be computed in pieces of the positions (`Tracer.in_pieces`)."""
        return any(layer.tiles for layer in self.layers())

    @property
    def routes(self) -> bool:
        """True if the piece has experts."""
        return any(layer.has_experts for layer in self.layers())


def block_of(kind: LayerKind) -> BlockPiece:
    """Return the decoder block of a kind of layers as a piece, which can be traced and built."""
    assert isinstance(kind.block, BlockPiece)
    return kind.block


@frozen
class Layer(BlockPiece):
    """Piece that is a module, under its name. `runtime/nn/block.py` builds the layers of this folder; the module that
    `torch_module` names builds layers that a family defines itself.

    settings: settings class of the families that can use the layer. reads: optional settings that it reads. adapts: its
    matrices can have adapters and can be stored in codes, because the runtime's `Linear` and `Experts` compute their
    products and `Tracer.linear` records them. attends: attention or a recurrent mixer; at most one of a block has RoPE.
    keeps_state: a position sees earlier ones by a state that passes from each position to the next, which generation
    keeps instead of tensors of earlier positions. window: for an attention layer, the number of positions of its
    document that a query sees; None: all earlier ones. gives: name of values that it gives to layers of later blocks.
    takes: name of the values that it takes, of the nearest earlier block that gives them. embeds: it takes the ids of
    tokens. whole_rows: it needs scores of all positions of a row at once, which no rank of a ring has. index_loss:
    weight of the loss of its indexer; 0: none.
    """

    composable: ClassVar[bool] = False
    settings: ClassVar[type[Model]] = TransformerSettings
    reads: ClassVar[tuple[str, ...]] = ()
    adapts: ClassVar[bool] = False
    attends: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = False
    window: ClassVar[int | None] = None
    gives: ClassVar[str] = ""
    takes: ClassVar[str] = ""
    embeds: ClassVar[bool] = False
    whole_rows: ClassVar[bool] = False
    index_loss: ClassVar[float] = 0.0

    name: str

    @classmethod
    def torch_module(cls) -> str:
        """Return the name of the module that ranks import: this class's module name + `_torch`."""
        return f"{cls.__module__}_torch"

    def layers(self) -> "Iterator[Layer]":
        yield self

    @property
    def has_experts(self) -> bool:
        return issubclass(self.settings, ExpertTransformer)

    @property
    def tiles(self) -> bool:
        return False

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        raise NotImplementedError

    def buffers(self, arch: Architecture) -> dict[str, list[int]]:
        return {}

    def shared(self, arch: Architecture, rows: int, sequence: int, formats: tuple[int, int], ways: AxisRanks) -> int:
        return 0

    def angles(self, arch: Architecture) -> RotaryAngles | None:
        """Return the RoPE angles of an attention layer; None without RoPE."""
        return None

    def unfit(self, arch: Architecture) -> str | None:
        """Return why it does not fit the sizes of a model; None if it does."""
        return None

    def taken(self, layer: int) -> str:
        """Return the name of the values that it takes in the block of a layer."""
        return self.takes

    def words(self, arch: Architecture) -> tuple[str, ...]:
        """Return words that distinguish it from layers of the same name in other blocks of the model, for display."""
        return ()

    def pair_flops(self, arch: Architecture) -> int:
        """Return the forward FLOPs of an attention layer for one pair of positions."""
        return 0

    def position_flops(self, arch: Architecture) -> int:
        """Return the forward FLOPs of one position that are not products with parameters and do not grow with the
        number of positions."""
        return 0

    def spread_heads(self, arch: Architecture) -> tuple[int, str] | None:
        """Return the number of heads that tp times ulysses must divide, and what they are called; None: the model's."""
        return None

    def own(self, arch: Architecture) -> Architecture:
        """Return the architecture with the key/value heads and the head width of this layer."""
        return arch

    def shares_experts(self, arch: Architecture) -> bool:
        """Return True if it has shared experts, which every token is sent to."""
        return False

    def cached(self, arch: Architecture, tp: int, positions: int, plain: Set[str], exact: int = 1) -> int:
        """Return how many numbers one of `tp` ranks caches while it generates a text of `positions` positions; 0 unless
        the layer looks at other positions. plain: the block's parameters that are stored in a number format and have
        no adapter. exact: numbers that a number in exact sums takes the memory of."""
        return 0


@frozen
class Chain(BlockPiece):
    """Pieces applied one after the other."""

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
    """x + scale · pieces(x), with the pieces applied one after the other."""

    scale: float = later(1.0)

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        branch = super().trace(on, x)
        return on.ops.add(x, branch if self.scale == 1 else on.ops.op(branch, makes=branch.gradient))


@frozen
class ScaledChain(Chain):
    """after · pieces(before · x), with the pieces applied one after the other."""

    before: float = later(1.0)
    after: float = later(1.0)

    @classmethod
    def of(cls, *pieces: BlockPiece, before: float = 1.0, after: float = 1.0) -> Self:
        return cls(pieces, before=before, after=after)

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        out = super().trace(on, x if self.before == 1 else on.ops.op(x, makes=x.size))
        return out if self.after == 1 else on.ops.op(out, makes=out.gradient)


@frozen
class Sum(Chain):
    """Sum of the outputs of pieces that all take x."""

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        first, *others = self.pieces
        total = _traced(first, on, x)
        for piece in others:
            total = on.ops.add(total, _traced(piece, on, x))
        return total


def _traced(piece: BlockPiece, on: "Tracer", x: TracedTensor) -> TracedTensor:
    if not isinstance(piece, Layer):
        return piece.trace(on, x)
    with on.ops.scope(piece.name):
        return piece.trace(on, x)


def not_above_zero(piece: BlockPiece, *names: str) -> str | None:
    """Return what is wrong with the first of these numbers that is not above 0; None is skipped."""
    values = ((name, getattr(piece, name)) for name in names)
    wrong = next(((name, value) for name, value in values if value is not None and value <= 0), None)
    return None if wrong is None else "`{}` is {}, and must be above 0".format(*wrong)


def row_bias(module: str, width: int, partial: Partial = "by_position") -> BlockParameter:
    """Return the bias of a matrix that is cut by input: it is added once, to the sum over ranks; sequence parallelism
    leaves each rank its own positions of that sum."""
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


@frozen
class NormLayer(Layer):
    """RMSNorm over the width of the residual stream. plus_one: multiply by 1 + weight. scale: factor of its output."""

    plus_one: bool = later(False)
    scale: float = later(1.0)

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        yield norm_weight(self.name, arch.dim, "by_position", plus_one=self.plus_one)

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        return on.norm(x, self.name, on.local.between)


@frozen
class FactorLayer(Layer):
    """x times a number that is stored with the weights and not trained; 1 in a new model."""

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        return iter(())

    def buffers(self, arch: Architecture) -> dict[str, list[int]]:
        return {f"{self.name}.factor": [1]}

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        return on.ops.op(x, makes=x.gradient)


@composed
def pre_norm(attention: BlockPiece, feed_forward: BlockPiece, plus_one: bool = False, scale: float = 1.0) -> BlockPiece:
    """Compose x + scale · attention(norm(x)), then x + scale · feed_forward(norm(x)). plus_one: for both norms."""
    return Chain.of(
        Residual((NormLayer("input_layernorm", plus_one=plus_one), attention), scale=scale),
        Residual((NormLayer("post_attention_layernorm", plus_one=plus_one), feed_forward), scale=scale),
    )


@composed
def post_norm(attention: BlockPiece, feed_forward: BlockPiece) -> BlockPiece:
    """Compose x + norm(attention(x)), then x + norm(feed_forward(x))."""
    return Chain.of(
        Residual.of(attention, NormLayer("post_attention_layernorm")),
        Residual.of(feed_forward, NormLayer("post_feedforward_layernorm")),
    )


@composed
def sandwich_norm(attention: BlockPiece, feed_forward: BlockPiece, plus_one: bool = False) -> BlockPiece:
    """Compose x + norm(attention(norm(x))), then x + norm(feed_forward(norm(x))). plus_one: for all four norms."""
    before, after, before_next, after_next = (
        NormLayer(f"{name}_layernorm", plus_one=plus_one)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
    )
    return Chain.of(Residual.of(before, attention, after), Residual.of(before_next, feed_forward, after_next))


def norm_weight(
    name: str,
    width: int,
    partial: Partial = "never",
    cut: Literal["column"] | None = None,
    *,
    plus_one: bool = False,
) -> BlockParameter:
    """Return the weight of an RMSNorm. plus_one: the factor is 1 + weight; it starts at 1 in either case."""
    initial = "zeros" if plus_one else "ones"
    return BlockParameter(
        name=f"{name}.weight", shape=(width,), decays=False, initial=initial, cut=cut, partial=partial
    )


JOIN: Final = "join"


@frozen
class JoinLayer(Layer):
    """Projection of [norm(embedding of token t + k); norm(x)] from twice the width of the residual stream back to it.
    plus_one: for both norms.

    Tensor parallelism does not cut the matrix: each rank computes its own positions.
    """

    composable: ClassVar[bool] = False
    embeds: ClassVar[bool] = True

    plus_one: bool = later(False)

    def parameters(self, arch: Architecture) -> Iterator[BlockParameter]:
        for norm in ("enorm", "hnorm"):
            yield norm_weight(f"{self.name}.{norm}", arch.dim, "by_position", plus_one=self.plus_one)
        yield BlockParameter(
            name=f"{self.name}.eh_proj.weight",
            shape=(arch.dim, 2 * arch.dim),
            decays=True,
            initial="normal",
            partial="by_position",
        )

    def trace(self, on: "Tracer", x: TracedTensor) -> TracedTensor:
        embedded, own = on.norm(self._embedded(on), f"{self.name}.enorm", on.local.between), x
        own = on.norm(own, f"{self.name}.hnorm", on.local.between)
        both = on.ops.op(embedded, own, makes=embedded.size + own.size)
        return on.linear(both, f"{self.name}.eh_proj", on.local.between)

    def _embedded(self, on: "Tracer") -> TracedTensor:
        """Record the embedding. The gradient of its table is kept until the first embedding's gradient is ready
        (`StageCosts`)."""
        local, tensor = on.local, on.axes.tensor
        trained = any(each.trained for each in on.resolved.inventory.tensors if each.name == f"{EMBEDDING}.weight")
        table = local.vocab * local.dim * local.width if trained else 0
        calls: tuple[CollectiveCall, ...] = ()
        back: tuple[CollectiveCall, ...] = ()
        if tensor:
            calls = (CollectiveCall("tp", "reduce_scatter" if on.axes.sequence else "all_reduce", TP, local.whole),)
            back = (CollectiveCall("tp", "all_gather", TP, local.whole),) if on.axes.sequence and table else ()
        return on.ops.op(
            makes=local.stream,
            extra=(local.tokens * (INDEX + 1),) if tensor and table else (),
            scratch=(0, table),
            calls=calls,
            back_calls=back,
        )


def further_block(last: BlockPiece, *, plus_one: bool = False, scale: float = 1.0) -> BlockPiece:
    """Compose a prediction module as a block: the join, `last` (the block that it follows) and a norm. plus_one: for
    its norms. scale: of the head's input."""
    return Chain.of(JoinLayer(JOIN, plus_one=plus_one), last, NormLayer("norm", plus_one=plus_one, scale=scale))
