"""`OpTrace`: the forward of a block as operations, with the bytes that each makes, keeps and sends.

It is to a block of the model what autograd's graph is: simulated forward and backward (`memory_simulator.py`), it
gives the bytes alive at any moment. Fp8 products (`runtime/nn/number_formats.py`) add copies in memory and scales that
ranks share. Shapes there: T tokens, K inputs and N outputs of a matrix, on a rank.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from attrs import Factory, define, field, frozen

from xtrain.dsl.schema.precision import Recipe

if TYPE_CHECKING:
    from xtrain.plan.estimates import TrafficOp


MATMUL: Final = "matmul"
ATTENTION: Final = "attention"
ALL_TO_ALL: Final = "all_to_all"
TP: Final = "setup.parallel.tp"
CP: Final = "setup.parallel.cp"
INDEX: Final = 8  # bytes of an index


@define(eq=False)
class TracedTensor:
    """A tensor: the bytes of its storage, or none if it is a view `of` another, and those of its gradient."""

    size: int
    gradient: int
    of: "TracedTensor | None" = None

    @property
    def storage(self) -> "TracedTensor":
        return self if self.of is None else self.of.storage


@frozen
class CollectiveCall:
    """One collective: its axis and node as in `Traffic`, and the larger of what goes in and what comes out. meanwhile:
    operations that are computed while it is under way."""

    axis: str
    op: "TrafficOp"
    node: str
    bytes: int
    meanwhile: int = 0


@frozen(kw_only=True)
class FsdpUnit:
    """Parameters that FSDP gathers and exchanges together, in bytes on one rank.

    whole: gathered, in the format of the computation, uneven shards padded. Of those that are trained, gradients,
    summed: of the pieces the rank computes with, in the format of the computation and in that of sums; buffer:
    `summed`, padded, as it is exchanged; output, shard: the rank's part of it, in the format of sums and in that of the
    parameters; largest: the gradient of the largest, in the format of sums. shards, copies: ranks that share the
    parameters, and that hold the same part of them. moved: parts are not cut along the first dim and have to be put in
    order. reshards: gathered parameters are freed after the forward.
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
        """The buffer in which all parameters are gathered at once; a rank that shares with nobody needs none."""
        return self.whole if self.shards > 1 else 0

    @property
    def casts_back(self) -> bool:
        """Sums are put into another format than they were exchanged in."""
        return self.output != self.shard


@frozen(eq=False)
class PieceTrace:
    """One of the pieces of positions in which an operation is done. trace: its operations. wider: gradients of
    parameters are summed over pieces in a format so many times as wide as that of the computation."""

    trace: "OpTrace"
    wider: int


@define(eq=False, kw_only=True)
class TracedOp:
    """One operation.

    inputs, outputs: what it takes and makes. receivers: the inputs that its backward gives a gradient, by default all.
    runs_back: it has a backward. forgone: what it would keep if it had one. extra: what it makes beside. keeps: what it
    needs in the backward. results: what selective recomputation keeps of it, under the word `saved`. fresh: it makes
    new gradients of its inputs, where others hand on that of their output. weights: bytes of gradients of `parameters`,
    which are named as inside the block. added: bytes of gradients of parameters that are complete behind its backward,
    as those of slices are not. scratch: what is alive only while its forward, and its backward, runs. flops: of its
    forward. attends: they grow with the pairs of positions of a document. fp8: they are of products
    in fp8. calls, back_calls, weight_calls: those of its forward, of gradients of what it takes, and of those of its
    parameters. opens, closes: an FSDP unit whose module
    begins here, or ends. piece: of one that is done in pieces, which the backward does again one after the
    other; it keeps what it takes before it computes.
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
    opens: FsdpUnit | None = None
    closes: FsdpUnit | None = None
    piece: PieceTrace | None = None
    runs_back: bool = True
    forgone: tuple[TracedTensor, ...] = ()
    receivers: tuple[TracedTensor, ...] = Factory(lambda op: op.inputs, takes_self=True)


@define(eq=False)
class OpTrace:
    """The operations of a block in order, from its `input`. choices: bytes of what its router decided. scopes: the
    operations of functions, whose names go when they return; those called by others stand before these."""

    input: TracedTensor
    ops: list[TracedOp] = field(factory=list)
    choices: int = 0
    scopes: list[range] = field(factory=list)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is recorded meanwhile is done by one function."""
        first = len(self.ops)
        yield
        self.scopes.append(range(first, len(self.ops)))

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
        named: Sequence[TracedTensor] = (),
    ) -> TracedTensor:
        """Record an operation that makes a value of `makes` bytes; `extra`: sizes of others that it makes and keeps;
        `arranged`: the same of what it makes of its inputs first, which is no result of it; `named`: values that the
        backward does not need, and that have a name until the function is done."""
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
                forgone=tuple(value.storage for value in named),
            )
        )
        return output

    def views(
        self, x: TracedTensor, parts: int = 1, *, back_calls: Sequence[CollectiveCall] = ()
    ) -> list[TracedTensor]:
        """`x` in equal parts that share its storage, whose gradients are put together anew."""
        outputs = tuple(TracedTensor(0, x.gradient // parts, x) for _ in range(parts))
        self.ops.append(TracedOp(inputs=(x,), outputs=outputs, back_calls=tuple(back_calls)))
        return list(outputs)

    def split(self, x: TracedTensor, *gradients: int) -> list[TracedTensor]:
        """The same of parts of such sizes."""
        outputs = tuple(TracedTensor(0, size, x) for size in gradients)
        self.ops.append(TracedOp(inputs=(x,), outputs=outputs))
        return list(outputs)

    def slices(self, *weights: int, parameters: Sequence[str] = ()) -> None:
        """Parameters cut into slices, whose gradients stay until those of each parameter, of so many bytes, are put
        together anew."""
        self.ops.append(TracedOp(added=sum(weights), scratch=(0, max(weights)), parameters=tuple(parameters)))

    def add(self, left: TracedTensor, right: TracedTensor) -> TracedTensor:
        """A sum, whose gradient is that of both."""
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
        fp8: "Fp8Product | None" = None,
    ) -> TracedTensor:
        """x · Wᵀ, which keeps x; `weight`: bytes of the gradient of W. unpacked: bytes while W is computed. fp8: how it
        is multiplied, if not in the format of the computation."""
        out = self.op(
            x,
            makes=makes,
            keeps=(x,),
            weights=weight,
            added=added,
            parameters=parameters,
            scratch=(unpacked, unpacked) if fp8 is None else fp8.scratch,
            saved=MATMUL,
            flops=flops,
            calls=() if fp8 is None else fp8.calls,
            back_calls=() if fp8 is None else fp8.input_calls,
        )
        if fp8 is not None:
            self.ops[-1].fp8, self.ops[-1].weight_calls = True, tuple(fp8.weight_calls)
        return out

    @property
    def parameters(self) -> list[str]:
        """The parameters in the order in which the forward uses them."""
        return list(dict.fromkeys(name for op in self.ops for name in op.parameters))

    @property
    def single(self) -> "Iterator[TracedOp]":
        """The operations, of those that are done in pieces the ones of a piece."""
        for op in self.ops:
            yield from (op,) if op.piece is None else op.piece.trace.ops

    def mark(self, *, opens: FsdpUnit | None = None, closes: FsdpUnit | None = None) -> None:
        """An FSDP unit inside the block begins or ends here; None: there is none."""
        if opens is not None or closes is not None:
            self.ops.append(TracedOp(opens=opens, closes=closes))


NODE: Final = "setup.float8"
EXACT: Final = 4  # bytes of a number that is scaled
Axes = tuple[str, ...]


@frozen(kw_only=True)
class Fp8Product:
    """One of T tokens. width: bytes of a number that it takes and gives; exact: of one that is multiplied where fp8 is
    emulated, 0 where kernels multiply it. inputs, outputs, spread: axes whose ranks have the other inputs, outputs and
    tokens. trained: the matrix is."""

    recipe: Recipe
    tokens: int
    outputs_wide: int
    inputs_wide: int
    width: int
    exact: int
    inputs: Axes = ()
    outputs: Axes = ()
    spread: Axes = ()
    trained: bool = True

    # Scales -----------------------------------------------------------------------------------------------------------

    @property
    def calls(self) -> list[CollectiveCall]:
        """Those of the forward."""
        if self.recipe.scales == "row":
            return list(self._shared((self.tokens, self.inputs), (self.outputs_wide, self.inputs)))
        return list(self._shared((1, (*self.inputs, *self.spread)), (1, (*self.inputs, *self.outputs))))

    @property
    def input_calls(self) -> list[CollectiveCall]:
        """Those of the gradient of what is multiplied."""
        recipe = self.recipe
        rows = (self.tokens, self.outputs)
        gradient = rows if recipe.scales == "row" else (1, (*self.outputs, *self.spread))
        whole = recipe.scales == "tensor" or recipe.whole_weight
        weight = (1, (*self.inputs, *self.outputs)) if whole else (self.inputs_wide, self.outputs)
        return list(self._shared(gradient, weight))

    @property
    def weight_calls(self) -> list[CollectiveCall]:
        """Those of the gradient of the matrix."""
        if not self.recipe.weight_gradient or not self.trained:
            return []
        if self.recipe.scales == "row":
            return list(self._shared((self.outputs_wide, self.spread), (self.inputs_wide, self.spread)))
        return list(self._shared((1, (*self.outputs, *self.spread)), (1, (*self.inputs, *self.spread))))

    def _shared(self, one: tuple[int, Axes], other: tuple[int, Axes]) -> Iterator[CollectiveCall]:
        """Largest numbers of two matrices: in one message where the same ranks share both."""
        pairs = [(one[0] + other[0], one[1])] if one[1] == other[1] else [one, other]
        for numbers, axes in pairs:
            for axis in axes:
                yield CollectiveCall(axis, "all_reduce", NODE, numbers * self.width)

    # Memory -----------------------------------------------------------------------------------------------------------

    @property
    def scratch(self) -> tuple[int, int]:
        """Bytes that are alive for a while beside what goes in and comes out: in the forward, and in the backward
        beside both gradients."""
        x, weight, y = (
            self.tokens * self.inputs_wide,
            self.outputs_wide * self.inputs_wide,
            self.tokens * self.outputs_wide,
        )
        made = x * self.width + (weight * self.width if self.trained else 0)
        inputs = self._product(y, weight, x, turned=weight)
        weights = x * self.width
        if self.trained and self.recipe.weight_gradient:
            weights += self._product(y, x, weight, turned=y + x)
        elif self.trained:
            weights += weight * self.width
        return self._product(x, weight, y) - y * self.width, max(inputs, weights) - made

    def _product(self, one: int, other: int, out: int, *, turned: int = 0) -> int:
        """The most bytes while two matrices of so many numbers are scaled and multiplied, the result among them.
        turned: numbers that kernels want in another order."""
        scaled = 1 if self.width == EXACT else 2  # copies of all numbers in fp32 while codes are made
        coding = max(one + scaled * EXACT * one, one + other + scaled * EXACT * other)
        result = out * self.width
        if not self.exact:
            return max(coding, one + other + turned + result)
        cast = out * self.exact if self.exact != self.width else 0
        multiplying = self.exact * (one + other) + one + other + max(result, cast)
        return max(coding, multiplying, cast + result + one + other)
