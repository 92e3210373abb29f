"""Memory of a block simulated from its `OpTrace`: bytes alive in the forward, after it, and in the backward.

The backward runs operations in reverse order. A tensor kept by an operation is freed when the last operation that
needs it has run. Gradients are added in place if nothing else holds one of them (torch.autograd,
`InputBuffer::accumulate`). FSDP2 gathers a unit into one buffer and from there into parameters, requests the next
unit of a backward early, and keeps the buffer of an exchange until the next one (torch.distributed.fsdp,
`FSDPParamGroup`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Literal

from attrs import field

from xtrain.blocks.op_trace import FsdpUnit, OpTrace, PieceTrace, TracedOp, TracedTensor
from xtrain.lazy_attrs import define, frozen

Sums = Literal["own", "keep", "exchange", "each"]


@frozen
class Recompute:
    """Recomputation of a block in the backward. saved: words of operations whose results are kept. choices: the
    router's decisions are kept."""

    saved: frozenset[str] = frozenset()
    choices: bool = False


@frozen(kw_only=True)
class Handling:
    """Handling of parameter gradients in a backward.

    sums: gradients stay on the rank; or FSDP keeps them for a later exchange, exchanges the gradients that it kept, or
    exchanges the gradients of each microbatch. again: they are added to gradients of an earlier microbatch. casts: sums
    are kept in another format. frees: gathered parameters are freed after the backward.
    """

    sums: Sums
    again: bool
    casts: bool = False
    frees: bool = True


@frozen
class MemoryChange:
    """Change of memory in bytes. peak: maximum above the starting level; net: difference at the end."""

    peak: int
    net: int


def bytes_for_backward(trace: OpTrace, recompute: Recompute | None) -> int:
    """Return the bytes that a block leaves for its backward, including its input."""
    if recompute is None:
        kept = {id(value) for op in trace.ops for value in op.keeps}
        return kept_bytes(trace.ops) + sum(size for each, size in _given(trace, None).items() if each not in kept)
    choices = trace.choices if recompute.choices else 0
    results = {id(value): value.size for value in stored(trace, recompute)} | _given(trace, recompute)
    return trace.input.size + choices + sum(results.values())


def _given(trace: OpTrace, recompute: Recompute | None) -> dict[int, int]:
    """Return the bytes of tensors that later blocks take, by id, which stay until the end of the backward: with
    recomputation all, otherwise those that operations like the block's own keep."""
    found = {id(each.storage): each.storage.size for values in trace.given.values() for each in values}
    used = {id(value) for op in trace.ops for value in (*op.keeps, *op.forgone)} if recompute is None else found.keys()
    return {each: size for each, size in found.items() if each in used}


def kept_bytes(ops: Iterable[TracedOp], but: Set[int] = frozenset()) -> int:
    """Return the bytes that operations need in the backward, each value once. but: ids of values that do not count."""
    return sum({id(value): value.size for op in ops for value in op.keeps if id(value) not in but}.values())


def below_trained(trace: OpTrace) -> list[TracedOp]:
    """Return the operations with trained parameters, and all operations that receive a gradient through one of
    these."""
    found: list[TracedOp] = []
    reached: set[int] = set()
    for op in reversed(trace.ops):
        if op.runs_back and (op.weights or any(id(value) in reached for value in op.outputs)):
            reached |= {id(value) for value in op.receivers}
            found.append(op)
    return found


def keeps_input(trace: OpTrace) -> bool:
    """Return True if the backward needs the block's input."""
    return any(value is trace.input for op in trace.ops for value in op.keeps)


def second_run(trace: OpTrace, recompute: Recompute) -> list[TracedOp]:
    """Return the operations that the backward recomputes: none after the last one that keeps something, and none whose
    results were kept."""
    ops = until_last_keeper(trace)
    if ops and ops[-1].piece is not None:
        ops.pop()
    return [op for op in ops if op.saved not in recompute.saved]


def until_last_keeper(trace: OpTrace) -> list[TracedOp]:
    """Return the operations up to the last one that keeps something: a recomputation ends there."""
    last = max((place for place, op in enumerate(trace.ops) if op.keeps), default=-1)
    return trace.ops[: last + 1]


def forward(
    trace: OpTrace,
    unit: FsdpUnit | None,
    recompute: Recompute | None,
    early: Sequence[FsdpUnit] = (),
    *,
    gathered: bool = False,
    held: int = 0,
) -> MemoryChange:
    """Simulate the forward of a block that is the FSDP unit `unit`; its input is alive before it, its output after it.

    early: units requested one step ahead: the unit inside the block, and the following one. gathered: an earlier
    microbatch gathered the units, and none of them frees its parameters. held: bytes of the buffer of the unit before,
    which FSDP keeps until the next unit's parameters are made.
    """
    simulator = _Simulator(early=() if gathered else early, gathered=gathered, held=0 if gathered else held)
    simulator.make(simulator.held)
    simulator.gather(unit)
    simulator.ask()
    if recompute is None:
        stays = {id(value) for op in trace.ops for value in op.keeps}
    else:
        stays = {id(value) for value in stored(trace, recompute)}
    simulator.run(trace.ops, stays | _given(trace, recompute).keys(), scopes=trace.scopes)
    return MemoryChange(
        simulator.peak, bytes_for_backward(trace, recompute) - trace.input.size + trace.ops[-1].outputs[0].gradient
    )


def backward(
    trace: OpTrace,
    unit: FsdpUnit | None,
    recompute: Recompute | None,
    handling: Handling,
    *,
    behind: FsdpUnit | None,
    ahead: FsdpUnit | None,
    buffered: bool = False,
) -> MemoryChange:
    """Simulate the backward of a block; alive before: its kept tensors, and the gradient of its output.

    With FSDP, the buffer in which the unit was gathered early is also alive and, unless the unit is the first, the
    exchange buffer of `behind`, whose backward came before. ahead: the unit whose backward is next. buffered: the
    gradient of the output is in a pipeline's buffer, which outlives the backward and is never added to in place.
    """
    inner = next((op.closes for op in trace.ops if op.closes is not None and op.runs_back), None)
    simulator = _Simulator(handling, buffer=0 if behind is None else behind.buffer)
    simulator.gather_again(unit, inner or ahead)
    given = _given(trace, recompute)
    later, freed = {id(trace.input), *given}, 0  # freed at the end
    simulator.begin_back(trace, buffered=buffered)
    ops = trace.ops
    if recompute is not None:
        # Autograd computes a block again when an operation first needs a kept value.
        cut = max((place for place, op in enumerate(ops, start=1) if op.runs_back and _needs_block(op)), default=0)
        simulator.run_back(ops[cut:], later, ahead)
        ops = ops[:cut]
        results = {id(value): value.size for value in stored(trace, recompute)}
        results = {number: size for number, size in results.items() if number not in given}
        known = later | set(results)
        if not trace.compiled:  # whose code frees each result after its last use
            later, freed, results = known, sum(results.values()), {}
        stays = {id(value) for op in trace.ops for value in op.keeps} | later
        simulator.run(until_last_keeper(trace), stays, known=known, again=True, scopes=trace.scopes, there=results)
    simulator.run_back(ops, later, ahead, gathered=recompute is not None)
    simulator.exchange(unit)
    if recompute is not None:
        simulator.free(trace.input.size + freed + (trace.choices if recompute.choices else 0))
    elif keeps_input(trace):
        simulator.free(trace.input.size)
    simulator.free(sum(given.values()))
    simulator.leave(trace)
    return MemoryChange(simulator.peak, simulator.live)


def _needs_block(op: TracedOp) -> bool:
    return bool(op.keeps) or op.opens is not None or op.closes is not None


def exchange(unit: FsdpUnit | None, buffer: int, handling: Handling) -> MemoryChange:
    """Simulate the end of the backward of a unit outside blocks, whose gradients are alive. buffer: of the last
    sums."""
    simulator = _Simulator(handling, buffer=buffer)
    simulator.exchange(unit)
    if handling.sums in ("exchange", "each"):
        simulator.free(simulator.buffer)  # nothing follows it
    return MemoryChange(simulator.peak, simulator.live)


def scratch_of(piece: PieceTrace) -> tuple[int, int]:
    """Return the peak of an operation that is done in pieces: in the forward, which keeps nothing of them, and in the
    backward, in addition to its final parameter gradients."""
    trace, weights = piece.trace, sum(op.weights for op in piece.trace.ops)
    there, back = _Simulator(), _Simulator()
    there.run(trace.ops, frozenset(), scopes=trace.scopes)
    later = {id(trace.input), id(trace.ops[-1].outputs[0])}
    back.run(trace.ops, {id(value) for op in trace.ops for value in op.keeps} | later)
    back.begin_back(trace)
    back.run_back(trace.ops, later, None)
    return there.peak, piece.wider * weights + back.peak - weights


def stored(trace: OpTrace, recompute: Recompute) -> list[TracedTensor]:
    """Return the results that selective recomputation keeps."""
    return [value for op in trace.ops if op.saved in recompute.saved for value in op.results]


@define(slots=True)  # at once, and without a check of each of many assignments
class _Gradient:
    """Storage with the gradient of `holders` values."""

    size: int
    holders: int


@define(slots=True)
class _Simulator:
    """Bytes alive in addition to those at the start, and their peak. buffer: bytes of the last exchange. early: units
    whose parameters are requested early, in forward order. gathered: all units are already gathered. held: bytes of the
    buffer of the unit that the forward gathered last."""

    handling: Handling = Handling(sums="own", again=False)
    buffer: int = 0
    early: Sequence[FsdpUnit] = ()
    gathered: bool = False
    held: int = 0
    live: int = 0
    peak: int = 0
    _gradients: dict[int, _Gradient] = field(factory=dict)

    def make(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def free(self, size: int) -> None:
        self.live -= size

    def touch(self, size: int) -> None:
        """Allocate bytes that are freed at once."""
        self.peak = max(self.peak, self.live + size)

    def gather(self, unit: FsdpUnit | None, *, asked: bool = False) -> None:
        """Gather a unit in the forward; the previous unit's buffer is alive until this unit's is filled. asked: its
        buffer was requested early."""
        if unit is None or self.gathered:
            return
        self.make(0 if asked else unit.flat)
        self.free(self.held)
        self.make(unit.whole if unit.reshards else 0)
        self.touch(unit.whole if unit.moved else 0)
        self.held = unit.flat

    def ask(self, place: int = 0) -> None:
        """Request the next early unit in the forward; its buffer is alive from now on."""
        if place < len(self.early):
            self.make(self.early[place].flat)

    def gather_inside(self, unit: FsdpUnit) -> None:
        """Gather a unit inside the block in the forward, from its buffer if it was requested early."""
        self.gather(unit, asked=bool(self.early))
        self.ask(1)

    def gather_again(self, unit: FsdpUnit | None, follower: FsdpUnit | None) -> None:
        """Gather a unit in the backward from the buffer that was filled early, and fill the buffer of the next unit."""
        if unit is None or not unit.reshards:
            return
        self.copy_out(unit)
        self.free(unit.flat)
        self.make(follower.flat if follower is not None else 0)

    def copy_out(self, unit: FsdpUnit) -> None:
        """Make a unit's parameters from the buffer in which it was gathered."""
        self.make(unit.whole)
        self.touch(unit.whole if unit.moved else 0)

    def run(
        self,
        ops: list[TracedOp],
        stays: Set[int],
        *,
        known: Set[int] = frozenset(),
        again: bool = False,
        scopes: Sequence[range] = (),
        there: Mapping[int, int] | None = None,
    ) -> None:
        """Run operations. Values that do not stay are freed after their last use, and so are finished units. Values
        that only a backward would keep have a name until the functions that use them return; `scopes`: as in
        `OpTrace`.

        again: this is the recomputation. Of its last operation only the kept values are needed, units inside keep their
        parameters, and everything else is freed at the end. A unit inside is a forward of its own there: FSDP keeps its
        buffer until its module returns. known: values that exist already. there: bytes of those that this run frees.
        """
        uses: dict[int, int] = {}
        for op in ops:
            for value in op.inputs:
                uses[id(value.storage)] = uses.get(id(value.storage), 0) + 1
        forgone = {id(value) for op in ops for value in op.forgone}
        # number of operations after which the names of an operation's values are gone
        ends = list(range(1, len(ops) + 1))
        for scope in reversed(scopes):
            ends[scope.start : scope.stop] = [min(scope.stop, len(ops))] * len(ends[scope.start : scope.stop])
        until: dict[int, int] = {}  # storage → number of operations after which its names are gone
        named = Counter[int]()  # bytes freed with names, by number of operations
        allocated: dict[int, int] = {number: size for number, size in (there or {}).items() if number not in stays}
        for place, op in enumerate(ops):
            if op.opens is not None and not again:
                self.gather_inside(op.opens)
            elif op.opens is not None and op.opens.reshards:
                self.copy_out(op.opens)
            if op.closes is not None and op.closes.reshards:
                self.free(op.closes.flat if again else op.closes.whole)
            for value in op.extra if again and op is ops[-1] else (*op.outputs, *op.extra):
                if id(value) not in known:
                    self.make(value.size)
                    allocated[id(value)] = value.size
            stopped = again and op is ops[-1] and op.piece is not None
            if not stopped and (not op.results or id(op.results[0]) not in known):
                self.touch(op.scratch[0])
            for value in op.extra:
                if id(value) not in stays:
                    self.free(value.size)
            for value in op.inputs:
                storage, number = value.storage, id(value.storage)
                uses[number] -= 1
                until[number] = max(ends[place] if number in forgone else 0, until.get(number, 0))
                if not uses[number] and number in allocated and number not in stays:
                    del allocated[number]
                    named[max(place + 1, until[number])] += storage.size
            self.free(named.pop(place + 1, 0))
        if again:
            extra = {id(value) for op in ops for value in op.extra}
            self.free(sum(size for number, size in allocated.items() if number not in stays | extra))

    def begin_back(self, trace: OpTrace, *, buffered: bool = False) -> None:
        """Begin a backward with the gradient of the last output, which is alive. buffered: as in `backward`."""
        last = trace.ops[-1].outputs[0]
        self._gradients = {id(last): _Gradient(last.gradient, 2 if buffered else 1)}
        back = {id(value) for op in trace.ops if op.runs_back for value in op.outputs}
        given = (value for values in trace.given.values() for value in values if id(value) in back)
        self._gradients |= {id(value): _Gradient(value.gradient, 1) for value in given}

    def leave(self, trace: OpTrace) -> None:
        """End a backward: of the gradient of values that several blocks take, each leaves an equal share."""
        for name, values in trace.taken.items():
            for value in values:
                if id(value) in self._gradients:
                    self.free(value.gradient - value.gradient // trace.blocks[name])

    def run_back(
        self, ops: Sequence[TracedOp], later: Set[int], follower: FsdpUnit | None, *, gathered: bool = False
    ) -> None:
        """Run operations backwards.

        follower: the unit whose backward comes next; the backward of a unit inside requests it. gathered: units inside
        have their parameters.
        """
        left: dict[int, int] = {}
        for op in ops:
            for value in op.keeps:
                left[id(value)] = left.get(id(value), 0) + 1
        for op in reversed(ops):
            if not op.runs_back:
                continue
            if op.closes is not None:
                if not gathered:
                    self.gather_again(op.closes, follower)
                elif op.closes.reshards:
                    self.make(follower.flat if follower is not None else 0)
            elif op.opens is not None:
                self.exchange(op.opens)
            else:
                self._step_back(op)
                for value in op.keeps:
                    left[id(value)] -= 1
                    if not left[id(value)] and id(value) not in later:
                        self.free(value.size)

    def _step_back(self, op: TracedOp) -> None:
        given = [found for value in op.outputs if (found := self._gradients.pop(id(value), None)) is not None]
        if op.fresh:
            self.make(sum(value.gradient for value in op.receivers) + op.weights)
            self.touch(op.scratch[1])
            for gradient in given:
                self._let_go(gradient)
            new = [_Gradient(value.gradient, 1) for value in op.receivers]
        else:
            (gradient,) = given
            self.make(op.weights)
            gradient.holders += len(op.receivers)
            self._let_go(gradient)
            new = [gradient] * len(op.receivers)
        if self.handling.again and not self.handling.casts and self.handling.sums != "each":
            self.free(op.added)  # added in place
        for value, gradient in zip(op.receivers, new, strict=True):
            self._give(value, gradient)

    def _let_go(self, gradient: _Gradient) -> None:
        gradient.holders -= 1
        if not gradient.holders:
            self.free(gradient.size)

    def _give(self, value: TracedTensor, gradient: _Gradient) -> None:
        before = self._gradients.get(id(value))
        if before is None:
            self._gradients[id(value)] = gradient
        elif before.holders == 1:
            self._let_go(gradient)
        elif gradient.holders == 1:
            self._let_go(before)
            self._gradients[id(value)] = gradient
        else:
            self.make(gradient.size)
            self._let_go(gradient)
            self._let_go(before)
            self._gradients[id(value)] = _Gradient(gradient.size, 1)

    def exchange(self, unit: FsdpUnit | None) -> None:
        """End a unit's backward: free parameters, exchange or store gradients."""
        if unit is None:
            return
        how = self.handling
        if how.frees:
            self.free(unit.whole)
        if not unit.gradients:
            return
        if how.sums == "keep":
            if how.casts and how.again:
                self.free(unit.gradients)
            elif how.casts:
                self.touch(unit.largest)
                self.make(unit.summed - unit.gradients)
            return
        gradients = unit.gradients
        if how.again and how.sums == "exchange":
            self.free(unit.gradients if how.casts else 0)
            gradients = unit.summed
        self.free(self.buffer)
        self.touch(unit.largest if unit.moved else 0)
        self.make(unit.buffer)
        self.free(gradients)
        self.make(unit.output)
        if unit.casts_back:
            self.make(unit.shard)
            self.free(unit.output)
        if how.again and how.sums == "each":
            self.free(unit.shard)  # added to existing gradients
        self.buffer = unit.buffer
