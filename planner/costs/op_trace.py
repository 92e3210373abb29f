"""`Tape`: a forward written down as what every operation makes, keeps for its backward and sends, in bytes.

It is to a block of the model what a graph of autograd is: played forward and backward (`replay`), it says how much is
alive at any moment, which the sizes of single tensors do not.
"""

from collections.abc import Sequence
from typing import Final

from attrs import define, field, frozen

from ..plan import TrafficOp

MATMUL: Final = "matmul"
ATTENTION: Final = "attention"
ALL_TO_ALL: Final = "all_to_all"


@define(eq=False)
class Value:
    """A tensor: the bytes of its storage, or none if it is a view `of` another, and those of its gradient.

    keepers: how many operations need the storage in the backward.
    """

    size: int
    gradient: int
    of: "Value | None" = None
    keepers: int = 0

    @property
    def storage(self) -> "Value":
        return self if self.of is None else self.of.storage


@frozen
class Call:
    """One collective: its axis and node as in `Traffic`, and the larger of what goes in and what comes out."""

    axis: str
    op: TrafficOp
    node: str
    bytes: int


@frozen(kw_only=True)
class Unit:
    """Parameters that FSDP gathers and exchanges together, in bytes on one rank.

    whole: gathered, in the format of the computation, uneven shards padded. gradients, summed: of the pieces the rank
    computes with, in the format of the computation and in that of sums. buffer: `summed`, padded, as it is exchanged.
    output, shard: the rank's part of it, in the format of sums and in that of the parameters. largest: of the
    parameters, the gradient of the largest, in the format of sums. shards, copies: ranks that share the parameters,
    and that hold the same part of them. moved: parts are not cut along the first dim and have to be put in order.
    reshards: gathered parameters are freed after the forward.
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


@define(eq=False, kw_only=True)
class Op:
    """One operation.

    inputs, outputs: what gradients flow to and from. extra: what it makes beside. keeps: what it needs in the backward.
    fresh: it makes new gradients of its inputs, where others hand on that of their output. weights: bytes of gradients
    of parameters. scratch: what is alive only while its forward, and its backward, runs. saved: the word under which
    selective recomputation keeps its results. flops: of its forward. attends: they grow with the pairs of
    positions of a document. opens, closes: an FSDP unit whose module begins here, or ends.
    """

    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    extra: tuple[Value, ...] = ()
    keeps: tuple[Value, ...] = ()
    fresh: bool = True
    weights: int = 0
    scratch: tuple[int, int] = (0, 0)
    saved: str = ""
    flops: int = 0
    attends: bool = False
    calls: tuple[Call, ...] = ()
    back_calls: tuple[Call, ...] = ()
    opens: Unit | None = None
    closes: Unit | None = None


@define(eq=False)
class Tape:
    """The operations of a block in order, from its `input`. choices: bytes of what its router decided."""

    input: Value
    ops: list[Op] = field(factory=list)
    choices: int = 0

    def op(
        self,
        *inputs: Value,
        makes: int,
        keeps: Sequence[Value] = (),
        keeps_output: bool = False,
        extra: Sequence[int] = (),
        fresh: bool = True,
        weights: int = 0,
        scratch: tuple[int, int] = (0, 0),
        saved: str = "",
        flops: int = 0,
        attends: bool = False,
        calls: Sequence[Call] = (),
        back_calls: Sequence[Call] = (),
    ) -> Value:
        """Record an operation that makes a value of `makes` bytes; `extra`: sizes of others that it makes and keeps."""
        output = Value(makes, makes)
        others = tuple(Value(size, 0) for size in extra)
        kept = tuple(value.storage for value in (*keeps, *others, *((output,) if keeps_output else ())))
        for value in kept:
            value.keepers += 1
        self.ops.append(
            Op(
                inputs=inputs,
                outputs=(output,),
                extra=others,
                keeps=kept,
                fresh=fresh,
                weights=weights,
                scratch=scratch,
                saved=saved,
                flops=flops,
                attends=attends,
                calls=tuple(calls),
                back_calls=tuple(back_calls),
            )
        )
        return output

    def views(self, x: Value, parts: int = 1, *, scratch: int = 0, back_calls: Sequence[Call] = ()) -> list[Value]:
        """`x` in equal parts that share its storage, whose gradients are put together anew; `scratch`: meanwhile."""
        outputs = tuple(Value(0, x.gradient // parts, x) for _ in range(parts))
        self.ops.append(Op(inputs=(x,), outputs=outputs, scratch=(0, scratch), back_calls=tuple(back_calls)))
        return list(outputs)

    def add(self, left: Value, right: Value) -> Value:
        """A sum, whose gradient is that of both."""
        return self.op(left, right, makes=left.gradient, fresh=False)

    def linear(self, x: Value, makes: int, *, weight: int, flops: int) -> Value:
        """x · Wᵀ, which keeps x; `weight`: bytes of the gradient of W."""
        return self.op(x, makes=makes, keeps=(x,), weights=weight, saved=MATMUL, flops=flops)

    def mark(self, *, opens: Unit | None = None, closes: Unit | None = None) -> None:
        """An FSDP unit inside the block begins or ends here; None: there is none."""
        if opens is not None or closes is not None:
            self.ops.append(Op(opens=opens, closes=closes))
