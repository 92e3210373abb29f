"""`OpTrace`: the forward of a block as operations, with the bytes that each makes, keeps and sends.

It corresponds to autograd's graph: a simulated forward and backward (`memory_simulator.py`) gives the bytes alive at
any moment.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from attrs import Factory, field

from xtrain.lazy_attrs import define, frozen

if TYPE_CHECKING:
    from xtrain.plan.estimates import TrafficOp

    class ScaledProduct(Protocol):
        """Product with a matrix that is not multiplied as stored: collectives and temporary bytes of its forward and
        backward. fp8: it multiplies fp8 numbers. masks_inputs: the gradient of its input needs the input."""

        @property
        def fp8(self) -> bool: ...
        @property
        def masks_inputs(self) -> bool: ...
        @property
        def calls(self) -> "Sequence[CollectiveCall]": ...
        @property
        def input_calls(self) -> "Sequence[CollectiveCall]": ...
        @property
        def weight_calls(self) -> "Sequence[CollectiveCall]": ...
        @property
        def scratch(self) -> tuple[int, int]: ...


MATMUL: Final = "matmul"
ATTENTION: Final = "attention"
ALL_TO_ALL: Final = "all_to_all"
REDUCE_SCATTER: Final = "reduce_scatter"
TP: Final = "setup.parallel.tp"
CP: Final = "setup.parallel.cp"
INDEX: Final = 8  # bytes of an index


@define(eq=False)
class TracedTensor:
    """Tensor: the bytes of its storage (0 for a view `of` another tensor) and of its gradient."""

    size: int
    gradient: int
    of: "TracedTensor | None" = None

    @property
    def storage(self) -> "TracedTensor":
        return self if self.of is None else self.of.storage


@frozen
class CollectiveCall:
    """One collective: its axis and node as in `Traffic`, and the larger of input and output in bytes. meanwhile: FLOPs
    computed while it runs."""

    axis: str
    op: "TrafficOp"
    node: str
    bytes: int
    meanwhile: int = 0


@frozen(kw_only=True)
class FsdpUnit:
    """Parameters that FSDP gathers and exchanges together, in bytes on one rank.

    whole: gathered, in the compute format, uneven shards padded. gradients, summed: gradients of the trained pieces
    that the rank computes with, in the compute format and in the reduce format. buffer: `summed` padded for the
    exchange. output, shard: the rank's part of it, in the reduce format and in the format of the parameters. largest:
    the largest gradient, in the reduce format. shards: ranks that share the parameters; copies: ranks that hold the
    same part of them. moved: parts are not cut along the first dim and have to be reordered. reshards: gathered
    parameters are freed after the forward.
    """

    whole: int
    gradients: int
    summed: int
    buffer: int
    output: int
    shard: int
    largest: int
    shards: int
    copies: int
    moved: bool
    reshards: bool

    @property
    def flat(self) -> int:
        """Bytes of the buffer in which all parameters are gathered at once; 0 if one rank holds them all."""
        return self.whole if self.shards > 1 else 0

    @property
    def casts_back(self) -> bool:
        """True if reduced gradients are cast to another format after the exchange."""
        return self.output != self.shard


@frozen(eq=False)
class PieceTrace:
    """One piece of positions of an operation that is done in pieces. trace: its operations. wider: width of the format
    in which parameter gradients are summed over pieces, divided by the width of the compute format."""

    trace: "OpTrace"
    wider: int


@define(eq=False, kw_only=True)
class TracedOp:
    """One operation.

    inputs, outputs: tensors that it takes and makes. receivers: inputs that get a gradient from its backward, by
    default all. runs_back: it has a backward. forgone: tensors that it would keep with a backward. extra: further
    tensors that it makes. keeps: tensors that its backward needs. results: tensors kept by selective recomputation,
    under the word `saved`. fresh: its backward makes new gradients of its inputs; otherwise it passes on its output's
    gradient. weights: bytes of the gradients of `parameters`, which have names inside the block. added: bytes of
    parameter gradients that are complete after its backward; gradients of slices are not. scratch: bytes alive only
    during its forward and only during its backward. flops: of its forward. attends: flops grow with the pairs of
    positions of a document. fp8: flops are fp8 products. calls, back_calls, weight_calls: collectives of its forward,
    of input gradients and of parameter gradients. opens, closes: FSDP unit whose module begins or ends here. piece: set
    if the operation is done in pieces; its backward computes them again one after the other, and it keeps its inputs.
    apart: torch.compile leaves it out of compiled code. masks_inputs: the gradient of its input needs the input.
    """

    inputs: tuple[TracedTensor, ...] = ()
    outputs: tuple[TracedTensor, ...] = ()
    extra: tuple[TracedTensor, ...] = ()
    keeps: tuple[TracedTensor, ...] = ()
    results: tuple[TracedTensor, ...] = ()
    fresh: bool = True
    weights: int = 0
    added: int = 0
    parameters: tuple[str, ...] = ()
    scratch: tuple[int, int] = (0, 0)
    saved: str = ""
    flops: int = 0
    attends: bool = False
    calls: tuple[CollectiveCall, ...] = ()
    back_calls: tuple[CollectiveCall, ...] = ()
    weight_calls: tuple[CollectiveCall, ...] = ()
    fp8: bool = False
    masks_inputs: bool = False
    opens: FsdpUnit | None = None
    closes: FsdpUnit | None = None
    piece: PieceTrace | None = None
    apart: bool = False
    runs_back: bool = True
    forgone: tuple[TracedTensor, ...] = ()
    receivers: tuple[TracedTensor, ...] = Factory(lambda op: op.inputs, takes_self=True)


@define(eq=False)
class OpTrace:
    """Operations of a block in order, from its `input`. choices: bytes of the router's decisions. scopes: operations of
    each function, whose local names are freed on return; called functions come before their callers. layers: name of a
    layer → its operations. compiled: torch.compile compiles the block as a whole. given: values for later blocks, by
    name. taken: values of earlier blocks, where their bytes count, by name. blocks: number of blocks that take each of
    these names, which share one gradient."""

    input: TracedTensor
    ops: list[TracedOp] = field(factory=list)
    choices: int = 0
    scopes: list[range] = field(factory=list)
    layers: dict[str, range] = field(factory=dict)
    compiled: bool = False
    given: dict[str, tuple[TracedTensor, ...]] = field(factory=dict)
    taken: dict[str, tuple[TracedTensor, ...]] = field(factory=dict)
    blocks: dict[str, int] = field(factory=dict)

    @contextmanager
    def scope(self, layer: str = "") -> Iterator[None]:
        """Record the enclosed operations as one function's. layer: name of the layer whose forward it is."""
        first = len(self.ops)
        yield
        self.scopes.append(range(first, len(self.ops)))
        if layer:
            self.layers[layer] = self.scopes[-1]

    def op(
        self,
        *inputs: TracedTensor,
        makes: int,
        keeps: Sequence[TracedTensor] = (),
        keeps_output: bool = False,
        extra: Sequence[int] = (),
        arranged: Sequence[int] = (),
        fresh: bool = True,
        weights: int = 0,
        added: int | None = None,
        parameters: Sequence[str] = (),
        scratch: tuple[int, int] = (0, 0),
        saved: str = "",
        flops: int = 0,
        attends: bool = False,
        calls: Sequence[CollectiveCall] = (),
        back_calls: Sequence[CollectiveCall] = (),
        piece: PieceTrace | None = None,
        apart: bool = False,
        named: Sequence[TracedTensor] = (),
    ) -> TracedTensor:
        """Record an operation that makes a value of `makes` bytes. extra: sizes of further tensors that it makes and
        keeps. arranged: the same for tensors that it first makes from its inputs, which are not results. named:
        tensors that the backward does not need, but that have a name until the function returns."""
        output = TracedTensor(makes, makes)
        others = tuple(TracedTensor(size, 0) for size in extra)
        first = tuple(TracedTensor(size, 0) for size in arranged)
        storages = tuple(value.storage for value in (*keeps, *others, *first, *((output,) if keeps_output else ())))
        self.ops.append(
            TracedOp(
                inputs=inputs,
                outputs=(output,),
                extra=(*others, *first),
                keeps=storages,
                results=(output, *others) if saved else (),
                fresh=fresh,
                weights=weights,
                added=weights if added is None else added,
                parameters=tuple(parameters),
                scratch=scratch,
                saved=saved,
                flops=flops,
                attends=attends,
                calls=tuple(calls),
                back_calls=tuple(back_calls),
                piece=piece,
                apart=apart,
                forgone=tuple(value.storage for value in named),
            )
        )
        return output

    def views(
        self, x: TracedTensor, parts: int = 1, *, back_calls: Sequence[CollectiveCall] = ()
    ) -> list[TracedTensor]:
        """Split `x` into equal parts that share its storage; their gradients are joined into a new tensor."""
        outputs = tuple(TracedTensor(0, x.gradient // parts, x) for _ in range(parts))
        self.ops.append(TracedOp(inputs=(x,), outputs=outputs, back_calls=tuple(back_calls)))
        return list(outputs)

    def split(self, x: TracedTensor, *gradients: int) -> list[TracedTensor]:
        """Split `x` into parts of the given sizes that share its storage."""
        outputs = tuple(TracedTensor(0, size, x) for size in gradients)
        self.ops.append(TracedOp(inputs=(x,), outputs=outputs))
        return list(outputs)

    def detached(self, x: TracedTensor) -> TracedTensor:
        """Record a view of `x` that passes no gradient on."""
        out = TracedTensor(0, x.gradient, x)
        self.ops.append(TracedOp(inputs=(x,), outputs=(out,), runs_back=False, receivers=()))
        return out

    def give(self, name: str, *values: TracedTensor) -> None:
        """Give values to later blocks under a name."""
        self.given[name] = values

    def take(self, name: str, *sizes: int, blocks: int = 1) -> tuple[TracedTensor, ...]:
        """Take values of these sizes that an earlier block gives under a name, or the first values that this one
        gives, which are then its own. blocks: see `OpTrace`."""
        if name in self.given:
            own, self.given[name] = self.given[name][: len(sizes)], self.given[name][len(sizes) :]
            return own
        self.taken[name], self.blocks[name] = tuple(TracedTensor(0, size) for size in sizes), blocks
        return self.taken[name]

    def slices(self, *weights: int, parameters: Sequence[str] = ()) -> None:
        """Record parameters cut into slices. The gradients of slices are kept until each parameter's, of `weights`
        bytes, is joined into a new tensor."""
        self.ops.append(TracedOp(added=sum(weights), scratch=(0, max(weights)), parameters=tuple(parameters)))

    def add(self, left: TracedTensor, right: TracedTensor) -> TracedTensor:
        """Record a sum; its gradient is passed on to both summands."""
        return self.op(left, right, makes=left.gradient, fresh=False)

    def linear(
        self,
        x: TracedTensor,
        makes: int,
        *,
        weight: int,
        flops: int,
        parameters: Sequence[str] = (),
        added: int | None = None,
        unpacked: int = 0,
        scaled: "ScaledProduct | None" = None,
    ) -> TracedTensor:
        """Record x · Wᵀ, which keeps x. weight: bytes of the gradient of W. unpacked: bytes while W is computed.
        scaled: how it is multiplied, if not as stored."""
        out = self.op(
            x,
            makes=makes,
            keeps=(x,),
            weights=weight,
            added=added,
            parameters=parameters,
            scratch=(unpacked, unpacked) if scaled is None else scaled.scratch,
            saved=MATMUL,
            flops=flops,
            calls=() if scaled is None else scaled.calls,
            back_calls=() if scaled is None else scaled.input_calls,
        )
        if scaled is not None:
            self.ops[-1].fp8, self.ops[-1].weight_calls = scaled.fp8, tuple(scaled.weight_calls)
            self.ops[-1].masks_inputs = scaled.masks_inputs
        return out

    @property
    def parameters(self) -> list[str]:
        """Parameters in the order in which the forward uses them."""
        return list(dict.fromkeys(name for op in self.ops for name in op.parameters))

    @property
    def single(self) -> "Iterator[TracedOp]":
        """Operations; for operations done in pieces, the operations of one piece."""
        for op in self.ops:
            yield from (op,) if op.piece is None else op.piece.trace.ops

    def mark(self, *, opens: FsdpUnit | None = None, closes: FsdpUnit | None = None) -> None:
        """Mark where an FSDP unit inside the block begins or ends; None: no unit."""
        if opens is not None or closes is not None:
            self.ops.append(TracedOp(opens=opens, closes=closes))
