"""`StagePlay`: forward and backward of one microbatch through one stage of the model, in bytes alive."""

from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial

from attrs import frozen

from ..architecture import RotaryAngles
from .gathering import BlockUnits
from .head_memory import Ends
from .local import Local
from .memory_simulator import Handling, Played, Recompute, backward, bytes_for_backward, exchange, forward
from .op_trace import FsdpUnit, OpTrace, TracedOp


@frozen(eq=False)
class BlockPlay:
    """A block as those of one kind of layers are. layer: the first of them. angles: by which positions turn it."""

    layer: int
    angles: RotaryAngles | None
    trace: OpTrace
    units: BlockUnits
    recompute: Recompute | None

    @property
    def owners(self) -> list[TracedOp]:
        """Operations with parameters."""
        return [op for op in self.trace.ops if op.weights]

    def saved_bytes(self, again: bool) -> int:
        return bytes_for_backward(self.trace, self.recompute if again else None)

    def forward(self, again: bool) -> Played:
        return forward(self.trace, self.units.dense, self.recompute if again else None)

    def backward(self, again: bool, handling: Handling, behind: FsdpUnit | None, ahead: FsdpUnit | None) -> Played:
        how = self.recompute if again else None
        return backward(self.trace, self.units.dense, how, handling, behind=behind, ahead=ahead)


@frozen(kw_only=True, eq=False)
class StagePlay:
    """One stage on a rank.

    blocks: each, and whether it is computed again in the backward. found: plays of blocks and of stages, each made
    once. embeds, predicts: it has an end of the model. What it takes from other stages, and gradients it takes, lie in
    buffers that stay. beside, behind: the next stage, or the one before, is on the same rank, and what is passed on
    takes the place of such a buffer.
    """

    stage: int
    found: dict[Hashable, Played]
    root: FsdpUnit | None
    local: Local
    ends: Ends
    blocks: tuple[tuple[BlockPlay, bool], ...]
    embeds: bool
    predicts: bool
    tied: bool
    beside: bool = False
    behind: bool = False

    @property
    def counts(self) -> Counter[tuple[BlockPlay, bool]]:
        """How many blocks of each kind there are, apart those that are computed again."""
        return Counter(self.blocks)

    def _once(self, key: Hashable, play: Callable[[], Played]) -> Played:
        if key not in self.found:
            self.found[key] = play()
        return self.found[key]

    @property
    def rotation(self) -> int:
        """Cosines and sines of all positions, once for all blocks with the same angles."""
        angles = {block.angles for block, _ in self.blocks}
        return 2 * self.local.tokens * self.local.width * sum(each.width for each in angles if each is not None)

    @property
    def loss(self) -> int:
        return self.ends.loss if self.predicts else 0

    @property
    def unsharded(self) -> int:
        """Gathered parameters, as many as are alive at once."""
        blocks = [sum(unit.whole for unit in block.units.all) for block, _ in self.blocks]
        alive = max(blocks) if self._reshards else sum(blocks)
        return (self.root.whole if self.root is not None else 0) + alive

    @property
    def resident(self) -> int:
        """Those of them that stay from the forward of a microbatch to its backward."""
        root = self.root.whole if self.root is not None else 0
        return root if self._reshards is not False else self.unsharded

    @property
    def _reshards(self) -> bool | None:
        """Whether blocks let go of gathered parameters; None where nothing is gathered."""
        dense = self.blocks[0][0].units.dense
        return None if dense is None else dense.reshards

    @property
    def unreduced(self) -> int:
        """Gradients of all units, whole, in the format they are summed in."""
        blocks = sum(unit.summed for block, _ in self.blocks for unit in block.units.all)
        return (self.root.summed if self.root is not None else 0) + blocks

    @property
    def captured(self) -> int:
        """Gradients that the first part of a split backward leaves for the second: of what matrices and norms give."""
        return sum(op.outputs[0].gradient for block, _ in self.blocks for op in block.owners)

    def inputs_only(self, handling: Handling) -> Played:
        """The first part of a split backward: everything stays that it meets, and the gradient of what went in."""
        if self.embeds:
            return Played(0, 0)  # torch leaves all of it to the second part
        weights = sum(op.weights for block, _ in self.blocks for op in block.owners)
        passed = 0 if self.behind else self.local.stream
        peak = self.captured + max(0, self.backward(handling).peak - weights)
        return Played(peak, self.captured + passed)

    def weights_only(self, handling: Handling) -> Played:
        """The second part: it computes a block again for each of its matrices and norms, and keeps most of it."""
        whole = self.backward(handling)
        if self.embeds:
            return whole
        more = 0
        for (block, again), count in self.counts.items():
            more += count * again * (len(block.owners) - 3) * (block.saved_bytes(False) - block.trace.input.size)
        return Played(max(0, whole.peak) + more, whole.net - self.captured)

    def forward(self) -> Played:
        """net: what one microbatch leaves for its backward, the loss included."""
        return self._once(("forward", *self._kind), self._forward)

    def backward(self, handling: Handling) -> Played:
        """Alive before is what the forward left."""
        return self._once(("backward", handling, *self._kind), lambda: self._backward(handling))

    @property
    def _kind(self) -> tuple[Hashable, ...]:
        """What stages that cost the same have in common."""
        return (self.blocks, self.embeds, self.predicts, self.beside)

    def _forward(self) -> Played:
        stream, live, peak = self.local.stream, self.rotation, 0
        if self.embeds:
            live += stream + self.ends.embedded
        for block, again in self.blocks:
            played = self._once((block, again), partial(block.forward, again))
            peak = max(peak, live + played.peak)
            live += played.net
        if self.predicts:
            last = self.blocks[-1][0].units.all[-1:]  # what was gathered last, in its buffer
            peak = max(peak, live + self.ends.forward + sum(unit.flat for unit in last))
            live += self.ends.saved + self.ends.loss
        elif self.beside:
            live -= stream
        return Played(max(peak, live), live)

    def _backward(self, handling: Handling) -> Played:
        stream, live, peak = self.local.stream, 0, 0
        in_place = handling.again and not handling.casts and handling.sums != "each"
        if self.predicts:
            peak = self.ends.backward
            live += stream - (self.ends.loss - self.ends.weight) - self.ends.saved
            live -= stream + (self.ends.weight if in_place else 0)
        else:
            live += stream  # the gradient lies in a buffer that stays
        units = [block.units.dense for block, _ in self.blocks]
        # The buffers that the first unit to go backwards, and the last, were gathered in early.
        early, late = (unit.flat if unit is not None and unit.reshards else 0 for unit in (units[-1], units[0]))
        for place in reversed(range(len(units))):
            block, again = self.blocks[place]
            behind = units[place + 1] if place + 1 < len(units) else None
            ahead = units[max(0, place - 1)]
            key = (block, again, handling, behind, ahead)
            played = self._once(key, partial(block.backward, again, handling, behind, ahead))
            peak = max(peak, live + early + played.peak)
            live += played.net
        live += early - late
        if self.embeds:
            peak = max(peak, live + self.ends.start)
            live += (0 if in_place or (self.tied and self.predicts) else self.ends.embedding) - self.ends.embedded
        if not self.embeds:
            live += stream  # what it was given lies in a buffer too
        live -= stream + self.rotation
        if not self.predicts and not self.beside:
            live -= stream
        last = exchange(self.root, units[0].buffer if units[0] is not None else 0, handling)
        return Played(max(peak, live + last.peak), live + last.net)

    def reduce(self) -> Played:
        """The exchange of all gradients of a stage of a pipeline at the end, unit by unit."""
        live = peak = buffer = 0
        for unit in (self.root, *(unit for block, _ in self.blocks for unit in block.units.all)):
            if unit is not None:
                live -= unit.whole + buffer
                peak = max(peak, live + unit.buffer)
                live += unit.buffer - unit.summed + unit.output
                peak = max(peak, live + (unit.shard if unit.casts_back else 0))
                live += unit.shard - unit.output
                buffer = unit.buffer
        return Played(peak, live - buffer)
