"""`StagePlay`: forward and backward of one microbatch through one stage of the model, in bytes alive."""

from collections.abc import Callable, Hashable
from functools import partial

from attrs import define, field, frozen

from .gathering import Units
from .head_memory import Ends
from .local import Local
from .memory_simulator import Handling, Played, Recompute, backward, bytes_for_backward, exchange, forward
from .op_trace import FsdpUnit, OpTrace, TracedOp


@define
class Plays:
    """A block, and plays of it and of stages, each made once."""

    trace: OpTrace
    unit: FsdpUnit | None
    recompute: Recompute | None
    _found: dict[tuple[Hashable, ...], Played] = field(factory=dict)

    @property
    def owners(self) -> list[TracedOp]:
        """Operations with parameters."""
        return [op for op in self.trace.ops if op.weights]

    def saved_bytes(self, again: bool) -> int:
        return bytes_for_backward(self.trace, self.recompute if again else None)

    def forward(self, again: bool) -> Played:
        how = self.recompute if again else None
        return self.once(("block", again), lambda: forward(self.trace, self.unit, how))

    def backward(self, again: bool, handling: Handling, first: bool) -> Played:
        how = self.recompute if again else None
        play = partial(backward, self.trace, self.unit, how, handling, first=first)
        return self.once(("block", again, handling, first), play)

    def once(self, key: tuple[Hashable, ...], play: Callable[[], Played]) -> Played:
        """What `play` gives, for each key played once."""
        if key not in self._found:
            self._found[key] = play()
        return self._found[key]


@frozen(kw_only=True)
class StagePlay:
    """One stage on a rank.

    blocks: whether each is computed again in the backward. embeds, predicts: it has an end of the model. What it takes
    from other stages, and gradients it takes, lie in buffers that stay. beside, behind: the next stage, or the one
    before, is on the same rank, and what is passed on takes the place of such a buffer.
    """

    stage: int
    plays: Plays
    units: Units
    root: FsdpUnit | None
    local: Local
    ends: Ends
    blocks: tuple[bool, ...]
    embeds: bool
    predicts: bool
    tied: bool
    beside: bool = False
    behind: bool = False

    @property
    def rotation(self) -> int:
        """Cosines and sines of all positions."""
        return 2 * self.local.tokens * self.local.head_dim * self.local.width

    @property
    def loss(self) -> int:
        return self.ends.loss if self.predicts else 0

    @property
    def unsharded(self) -> int:
        """Gathered parameters, as many as are alive at once."""
        dense, experts = self.units.dense, self.units.experts
        block = sum(unit.whole for unit in (dense, experts) if unit is not None)
        count = 1 if dense is not None and dense.reshards else len(self.blocks)
        return (self.root.whole if self.root is not None else 0) + block * count

    @property
    def resident(self) -> int:
        """Those of them that stay from the forward of a microbatch to its backward."""
        dense = self.units.dense
        root = self.root.whole if self.root is not None else 0
        return root if dense is None or dense.reshards else self.unsharded

    @property
    def unreduced(self) -> int:
        """Gradients of all units, whole, in the format they are summed in."""
        dense, experts = self.units.dense, self.units.experts
        block = sum(unit.summed for unit in (dense, experts) if unit is not None)
        return (self.root.summed if self.root is not None else 0) + block * len(self.blocks)

    @property
    def captured(self) -> int:
        """Gradients that the first part of a split backward leaves for the second: of what matrices and norms give."""
        return len(self.blocks) * sum(op.outputs[0].gradient for op in self.plays.owners)

    def inputs_only(self, handling: Handling) -> Played:
        """The first part of a split backward: everything stays that it meets, and the gradient of what went in."""
        if self.embeds:
            return Played(0, 0)  # torch leaves all of it to the second part
        weights = len(self.blocks) * sum(op.weights for op in self.plays.owners)
        passed = 0 if self.behind else self.local.stream
        peak = self.captured + max(0, self.backward(handling).peak - weights)
        return Played(peak, self.captured + passed)

    def weights_only(self, handling: Handling) -> Played:
        """The second part: it computes a block again for each of its matrices and norms, and keeps most of it."""
        whole = self.backward(handling)
        if self.embeds:
            return whole
        each = self.plays.saved_bytes(False) - self.plays.trace.input.size
        again = sum(self.blocks) * (len(self.plays.owners) - 3) * each
        return Played(max(0, whole.peak) + again, whole.net - self.captured)

    def forward(self) -> Played:
        """net: what one microbatch leaves for its backward, the loss included."""
        return self.plays.once(("forward", *self._kind), self._forward)

    def backward(self, handling: Handling) -> Played:
        """Alive before is what the forward left."""
        return self.plays.once(("backward", handling, *self._kind), lambda: self._backward(handling))

    @property
    def _kind(self) -> tuple[Hashable, ...]:
        """What stages that cost the same have in common."""
        return (self.blocks, self.embeds, self.predicts, self.beside)

    def _forward(self) -> Played:
        stream, live, peak = self.local.stream, self.rotation, 0
        if self.embeds:
            live += stream + self.ends.embedded
        for again in self.blocks:
            played = self.plays.forward(again)
            peak = max(peak, live + played.peak)
            live += played.net
        if self.predicts:
            last = self.units.experts or self.units.dense  # what was gathered last, in its buffer
            peak = max(peak, live + self.ends.forward + (last.flat if last is not None else 0))
            live += self.ends.saved + self.ends.loss
        elif self.beside:
            live -= stream
        return Played(max(peak, live), live)

    def _backward(self, handling: Handling) -> Played:
        stream, live, peak, unit = self.local.stream, 0, 0, self.units.dense
        in_place = handling.again and not handling.casts and handling.sums != "each"
        if self.predicts:
            peak = self.ends.backward
            live += stream - (self.ends.loss - self.ends.weight) - self.ends.saved
            live -= stream + (self.ends.weight if in_place else 0)
        else:
            live += stream  # the gradient lies in a buffer that stays
        early = unit.flat if unit is not None and unit.reshards else 0
        for number, again in enumerate(reversed(self.blocks)):
            played = self.plays.backward(again, handling, not number)
            peak = max(peak, live + early + played.peak)
            live += played.net
        if self.embeds:
            peak = max(peak, live + self.ends.start)
            live += (0 if in_place or (self.tied and self.predicts) else self.ends.embedding) - self.ends.embedded
        if not self.embeds:
            live += stream  # what it was given lies in a buffer too
        live -= stream + self.rotation
        if not self.predicts and not self.beside:
            live -= stream
        last = exchange(self.root, unit.buffer if unit is not None else 0, handling)
        return Played(max(peak, live + last.peak), live + last.net)

    def reduce(self) -> Played:
        """The exchange of all gradients of a stage of a pipeline at the end, unit by unit."""
        live = peak = buffer = 0
        dense, experts = self.units.dense, self.units.experts
        for unit in (self.root, *(unit for _ in self.blocks for unit in (dense, experts))):
            if unit is not None:
                live -= unit.whole + buffer
                peak = max(peak, live + unit.buffer)
                live += unit.buffer - unit.summed + unit.output
                peak = max(peak, live + (unit.shard if unit.casts_back else 0))
                live += unit.shard - unit.output
                buffer = unit.buffer
        return Played(peak, live - buffer)
