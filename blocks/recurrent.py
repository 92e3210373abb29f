"""Recurrent mixers: layers whose positions see earlier ones by a state, after a short causal convolution.

Inputs of heads are convolved and move a state; each position reads the state after it. The runtime computes chunks of
positions at a time, and the backward keeps the inputs and computes the rest again.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any, ClassVar, Final

from xtrain.blocks.block import AxisRanks, Layer
from xtrain.blocks.op_trace import ALL_TO_ALL, ATTENTION, CP, INDEX, CollectiveCall, TracedTensor
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, BlockParameter, Initial

if TYPE_CHECKING:
    from xtrain.blocks.tracer import Tracer


CHUNK: Final = 64  # positions that are computed together


@frozen(kw_only=True)
class RecurrentLayer(Layer):
    """Base of recurrent mixers. kernel: positions of the convolution.

    Tensor parallelism cuts heads. Context parallelism gives each rank whole rows for some of the heads, or a ring
    passes states.
    """

    composable: ClassVar[bool] = False
    attends: ClassVar[bool] = True
    adapts: ClassVar[bool] = True
    keeps_state: ClassVar[bool] = True

    kernel: int

    def convolved(self) -> Sequence[tuple[str, int, int]]:
        """Return the name, width and number of heads of each convolved projection."""
        raise NotImplementedError

    def state(self) -> int:
        """Return how many numbers the state of one row has."""
        raise NotImplementedError

    def outputs(self) -> int:
        """Return the width of the outputs of all heads."""
        raise NotImplementedError

    def scratch(self, numbers: int, exact: int, chunks: int, *, cast: bool) -> tuple[int, int]:
        """Return the bytes that a forward and a backward need in addition to inputs, outputs and gradients, as the
        runtime frees them. numbers: of the outputs. chunks: of a row. cast: the inputs have another format than exact
        sums."""
        raise NotImplementedError

    def maps(self) -> int:
        """Return how many numbers describe what positions do to the state of one row, without what they add."""
        raise NotImplementedError

    def moving(self) -> int:
        """Return the width of all projections that the recurrence takes."""
        raise NotImplementedError

    def document_bytes(self, ring: int, width: int, exact: int) -> int:
        """Return the bytes that all ranks of a ring gather of a document: of two pieces a rank, what each does to a
        state and its last positions. width, exact: bytes of a number of projections, and of a state."""
        piece = (self.maps() + self.state()) * exact + (self.kernel - 1) * self.channels * width
        return 2 * ring * piece

    def most_documents(self, ring: int, heads: int, positions: int, width: int, exact: int) -> int:
        """Return the largest number of documents with which ranks of a ring send fewer bytes when they gather documents
        than when they exchange positions for heads; if they cannot share the heads evenly, the largest of all.

        heads: number of heads that a ring would share. positions: of all rows on all ranks. width, exact: see
        `document_bytes`.
        """
        if heads % ring:
            return positions
        exchanged = positions // ring * (self.moving() + self.outputs()) * width
        return (exchanged - 1) // self.document_bytes(ring, width, exact)

    def ring_heads(self, arch: Architecture, tp: int, ulysses: int) -> int:
        """Return the number of heads that a ring would share."""
        spread = self.spread_heads(arch)
        return (arch.heads if spread is None else spread[0]) // (tp * ulysses)

    def _scans(self, arch: Architecture, rows: int, sequence: int, formats: tuple[int, int], ways: AxisRanks) -> bool:
        """Return True if a ring passes states of rows that are one document each. formats: bytes of a number of
        projections, and of a state."""
        heads = self.ring_heads(arch, ways.tp, ways.ulysses)
        return ways.ring > 1 and rows <= self.most_documents(ways.ring, heads, rows * sequence, *formats)

    def _chunks(self, sequence: int, ring: int) -> int:
        """Return the chunks of a piece of a row, with the positions before it."""
        return -(-(sequence // (2 * ring) + self.kernel - 1) // CHUNK)

    def shared(self, arch: Architecture, rows: int, sequence: int, formats: tuple[int, int], ways: AxisRanks) -> int:
        """Return the bytes of the indices of a ring's pieces (`runtime/nn/state_scan.py`)."""
        if not self._scans(arch, rows, sequence, formats, ways):
            return 0
        in_chunks = 2 * rows * self._chunks(sequence, ways.ring) * CHUNK
        return INDEX * (rows * sequence // ways.ring + 3 * 2 * rows * (self.kernel - 1)) + 5 * in_chunks

    @property
    def channels(self) -> int:
        return sum(width for _, width, _ in self.convolved())

    def cached(self, arch: Architecture, tp: int, positions: int, plain: Set[str], exact: int = 1) -> int:
        return (exact * self.state() + (self.kernel - 1) * self.channels) // tp

    def of_heads(self, initials: Iterable[tuple[str, int, Initial]]) -> Iterator[BlockParameter]:
        """Yield vectors with numbers of each head: (name, extent, initial values)."""
        for name, extent, initial in initials:
            yield BlockParameter(
                name=f"{self.name}.{name}", shape=(extent,), decays=False, initial=initial, cut="column"
            )

    def projections(
        self, arch: Architecture, widths: Iterable[tuple[str, int, int]], *, bias: bool = False
    ) -> Iterator[BlockParameter]:
        """Yield the matrices before the mixer: (name, width, heads)."""
        for name, width, heads in widths:
            yield BlockParameter(
                name=f"{self.name}.{name}_proj.weight",
                shape=(width, arch.dim),
                decays=True,
                initial="normal",
                cut="column",
                heads=heads,
            )
            if bias:
                yield from self.of_heads([(f"{name}_proj.bias", width, "zeros")])

    def convolutions(self, *, bias: bool = False) -> Iterator[BlockParameter]:
        for name, width, heads in self.convolved():
            yield BlockParameter(
                name=f"{self.name}.{name}_conv.weight",
                shape=(width, 1, self.kernel),
                decays=True,
                initial="normal",
                cut="column",
                heads=heads,
                linear=False,
            )
            if bias:
                yield from self.of_heads([(f"{name}_conv.bias", width, "zeros")])

    def output(self, arch: Architecture, heads: int) -> BlockParameter:
        """Return the matrix after the mixer."""
        return BlockParameter(
            name=f"{self.name}.out_proj.weight",
            shape=(arch.dim, self.outputs()),
            decays=True,
            initial="residual",
            cut="row",
            heads=heads,
        )

    def mixed(self, on: "Tracer", makes: int, parts: Sequence[TracedTensor], names: Sequence[str]) -> TracedTensor:
        """Record the convolution and the recurrence. makes: bytes of the outputs. parts: projections. names: parameters
        inside."""
        ops, local, axes = on.ops, on.local, on.axes
        arch, ways = on.resolved.architecture, AxisRanks(on.resolved.size("tp"), axes.ring, axes.ulysses)
        scans = self._scans(arch, local.rows, local.sequence, (local.width, local.exact), ways)
        axes_of = {"ulysses": axes.ulysses, "ring": 1 if scans else axes.ring}
        groups = [axis for axis, ranks in axes_of.items() if ranks > 1]
        if groups:
            joined = ops.op(*parts, makes=sum(part.size for part in parts))
            for axis in groups:
                joined = self._exchanged(on, joined, axis)
            parts = (joined,)
        names = [f"{self.name}.{each}" for each in names]
        numbers, cast = makes // local.width, local.exact != local.width
        chunks, before, flops = -(-local.sequence // CHUNK), self.kernel - 1, self.position_flops(arch)
        sent: dict[str, Any] = {}
        of_pieces = 0
        if scans:
            pieces, share = 2 * local.rows, ways.tp * ways.ulysses
            halo = pieces * before * self.channels // share * local.width
            of_pieces = pieces * (self.maps() + self.state()) // share * local.exact
            if halo:
                gathered = CollectiveCall("ring", "all_gather", CP, halo * axes.ring)
                summed = CollectiveCall("ring", "reduce_scatter", CP, halo * axes.ring)
                shared = 2 * halo * axes.ring
                taken = ops.op(*parts, makes=halo, scratch=(shared, shared), calls=(gathered,), back_calls=(summed,))
                parts = (*parts, taken)
            call = CollectiveCall("ring", "all_gather", CP, of_pieces * axes.ring)
            sent = {"extra": (of_pieces,), "calls": (call,), "back_calls": (call,)}
            chunks = pieces * self._chunks(local.sequence, axes.ring)
            numbers = numbers * chunks * CHUNK // (local.rows * local.sequence // axes.ring)
        scratch = self.scratch(numbers, local.exact, chunks, cast=cast)
        if scans:
            laid_out = numbers // self.outputs() * self.moving() * local.width
            forward, backward = (each + laid_out + 2 * axes.ring * of_pieces for each in scratch)
            scratch = (forward, backward)
        out = ops.op(
            *parts,
            makes=makes,
            keeps=parts,
            weights=on.bytes_of(*names),
            parameters=names,
            scratch=scratch,
            saved=ATTENTION,
            flops=makes // local.width * (flops + 2 * self.kernel * self.channels) // self.outputs(),
            apart=True,
            **sent,
        )
        for axis in reversed(groups):
            out = self._exchanged(on, out, axis)
        return out

    def _exchanged(self, on: "Tracer", x: TracedTensor, axis: str) -> TracedTensor:
        call = CollectiveCall(axis, "all_to_all", CP, x.size)
        sent = on.ops.op(x, makes=x.size, scratch=(x.size, x.size))
        received = on.ops.op(sent, makes=x.size, saved=ALL_TO_ALL, calls=(call,), back_calls=(call,))
        return on.ops.op(received, makes=x.size)
