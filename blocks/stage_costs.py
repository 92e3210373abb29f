"""Bytes alive in forward and backward of one microbatch through a pipeline stage, and the FSDP units of a rank."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property, partial
from math import prod

from attrs import evolve

from xtrain.blocks.head_memory import Ends
from xtrain.blocks.memory_simulator import (
    Handling,
    MemoryChange,
    Recompute,
    backward,
    below_trained,
    bytes_for_backward,
    exchange,
    forward,
    keeps_input,
    kept_bytes,
    stored,
)
from xtrain.blocks.op_trace import ATTENTION, FsdpUnit, OpTrace, TracedOp
from xtrain.blocks.tracer import Local
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import ParameterSpec, RotaryAngles
from xtrain.plan.parameters import block_tensors
from xtrain.plan.pipeline import stage_end_names
from xtrain.plan.resolved import Resolved
from xtrain.text.units import BYTES


@frozen
class BlockUnits:
    """FSDP units of a block. dense: without its experts if these form a unit. None: not managed by FSDP, or the block
    has no experts."""

    dense: FsdpUnit | None
    experts: FsdpUnit | None

    @property
    def all(self) -> tuple[FsdpUnit, ...]:
        return tuple(unit for unit in (self.dense, self.experts) if unit is not None)


def units_of_block(resolved: Resolved, layer: int) -> BlockUnits:
    """Return the units that the nodes `expert_fsdp` and `fsdp` of a plan form in the block of one layer."""
    block = block_tensors(resolved.inventory, layer)
    dense = [t for t in block if not t.expert]
    experts = [t for t in block if t.expert]
    return BlockUnits(
        dense=_dense_unit(resolved, dense, reshards=resolved.reshard) if resolved.dense_fsdp else None,
        experts=_expert_unit(resolved, experts) if resolved.expert_fsdp and experts else None,
    )


def roots_of(resolved: Resolved) -> tuple[FsdpUnit | None, ...]:
    """Return the unit of each stage that the node `root_fsdp` forms from parameters outside blocks."""
    ends = {t.name: t for t in resolved.inventory.tensors if not t.name.startswith("layers.")}
    roots = []
    for stage in range(len(resolved.pipeline.spans)):
        own = [ends[name] for name in stage_end_names(resolved.architecture, resolved.pipeline, stage)]
        roots.append(_dense_unit(resolved, own, reshards=False) if resolved.dense_fsdp and own else None)
    return tuple(roots)


def _dense_unit(resolved: Resolved, tensors: Sequence[ParameterSpec], *, reshards: bool) -> FsdpUnit:
    return _unit(resolved, tensors, 0, resolved.cuts.fsdp, resolved.group_mesh.size("replicate"), reshards=reshards)


def _expert_unit(resolved: Resolved, tensors: Sequence[ParameterSpec]) -> FsdpUnit:
    sizes = {axis.name: axis.size for axis in resolved.group_mesh.expert_axes}
    dimension = resolved.cuts.expert_dimension
    return _unit(resolved, tensors, dimension, resolved.cuts.ep_fsdp, sizes["ep_replicate"], reshards=resolved.reshard)


def _unit(
    resolved: Resolved, tensors: Sequence[ParameterSpec], dimension: int, shards: int, copies: int, *, reshards: bool
) -> FsdpUnit:
    def padded_elements(shapes: Iterable[tuple[int, ...]]) -> int:
        return sum(prod(shape) // shape[dimension] * -(-shape[dimension] // shards) * shards for shape in shapes)

    shapes = [resolved.cuts.gathered_shape(tensor) for tensor in tensors if tensor.trained]
    elements, padded = [prod(shape) for shape in shapes], padded_elements(shapes)
    compute, reduce = BYTES[resolved.formats.compute], BYTES[resolved.formats.reduce]
    whole = sum(
        padded_elements([resolved.cuts.stored_shape(tensor)]) * (1 if tensor.quantised else compute)
        for tensor in tensors
    )
    return FsdpUnit(
        whole=whole,
        gradients=sum(elements) * compute,
        summed=sum(elements) * reduce,
        buffer=padded * reduce,
        output=padded // shards * reduce,
        shard=padded // shards * BYTES[resolved.formats.params],
        largest=max(elements, default=0) * reduce,
        shards=shards,
        copies=copies,
        moved=dimension > 0 and shards > 1,
        reshards=reshards,
    )


@frozen(eq=False)
class BlockCosts:
    """Costs of a block of one kind of layers. layer: the first of them. angles: its RoPE angles. below, runs_back: as
    in `TrainedKind`. prefetches: the next unit's parameters are gathered while it computes."""

    layer: int
    angles: RotaryAngles | None
    trace: OpTrace
    units: BlockUnits
    recompute: Recompute | None
    below: bool = True
    runs_back: bool = True
    prefetches: bool = False

    @property
    def experts_run_back(self) -> bool:
        """True if the experts receive a gradient."""
        return any(op.closes is not None and op.runs_back for op in self.trace.ops)

    @property
    def attends_back(self) -> bool:
        """True if attention receives a gradient."""
        return any(op.runs_back and (op.attends or op.saved == ATTENTION) for op in self.trace.ops)

    @property
    def mixes_back(self) -> bool:
        """True if attention, or other operations than products with parameters, receive a gradient."""
        ops = [op for op in self.trace.ops if op.attends or op.saved == ATTENTION or (op.flops and not op.parameters)]
        return any(op.runs_back for op in ops or self.trace.ops)

    @property
    def passing(self) -> frozenset[str]:
        """Parameters, named inside the block, whose operations pass a gradient to their inputs."""
        return frozenset(name for op in self.trace.single if op.receivers for name in op.parameters)

    @property
    def owners(self) -> list[TracedOp]:
        """Operations with trained parameters."""
        return [op for op in self.trace.ops if op.weights]

    def saved_bytes(self, again: bool) -> int:
        return bytes_for_backward(self.trace, self.recompute if again else None)

    def passed_bytes(self, again: bool) -> int:
        """Return the saved bytes that a backward no longer needs once it reaches the operations of trained
        parameters."""
        if again:  # each needed value is recomputed from the stored ones
            return 0 if self.owners else self.saved_bytes(again)
        return self.saved_bytes(again) - kept_bytes(below_trained(self.trace))

    def lasting_bytes(self, ops: list[TracedOp]) -> int:
        """Return the bytes of a recomputation that remain after one operation with trained parameters has used its own:
        values that the others of `ops` keep and the block did not store."""
        assert self.recompute is not None
        there = {id(value) for value in (self.trace.input, *stored(self.trace, self.recompute))}
        return kept_bytes((op for op in ops if not op.weights), there)

    def forward(self, again: bool, behind: "BlockCosts | None", *, gathered: bool, held: int) -> MemoryChange:
        """Simulate the forward. behind: the block whose forward comes next. gathered: its parameters are already
        gathered. held: bytes of the buffer of the unit that was gathered before it."""
        how, experts = self.recompute if again else None, self.units.experts
        early = [experts] if experts is not None else []
        if behind is not None and not (again and early):  # with recomputed experts, nothing requests the next unit
            early += behind.units.all[:1]
        early = early if self.prefetches else []
        return forward(self.trace, self.units.dense, how, early, gathered=gathered, held=held)

    def backward(
        self, again: bool, handling: Handling, behind: FsdpUnit | None, ahead: FsdpUnit | None, buffered: bool
    ) -> MemoryChange:
        how = self.recompute if again else None
        return backward(self.trace, self.units.dense, how, handling, behind=behind, ahead=ahead, buffered=buffered)


@frozen(kw_only=True, eq=False)
class StageCosts:
    """Costs of one stage on a rank.

    blocks: each block, and whether the backward recomputes it. found: cached simulations of blocks and stages. embeds,
    predicts: it holds the first or last end of the model. Its inputs from other stages, and gradients it receives, are
    in buffers that stay. beside, behind: the next stage, or the previous one, is on the same rank, and the values
    passed on replace such a buffer. alone: there is no other stage. further: number of blocks, the last ones, that are
    modules predicting further tokens after the head, each followed by the head. teacher: the stage of a teacher that
    computes each microbatch before the head does.
    """

    stage: int
    found: dict[Hashable, MemoryChange]
    root: FsdpUnit | None
    local: Local
    ends: Ends
    blocks: tuple[tuple[BlockCosts, bool], ...]
    embeds: bool
    predicts: bool
    tied: bool
    beside: bool = False
    behind: bool = False
    alone: bool = True
    further: int = 0
    teacher: "StageCosts | None" = None

    @property
    def counts(self) -> Counter[tuple[BlockCosts, bool]]:
        """Number of blocks of each kind; recomputed blocks are counted separately."""
        return Counter(self.blocks)

    @property
    def taught(self) -> tuple[int, int]:
        """Bytes of a teacher: the peak while it computes a microbatch, and the bytes left for the student's head:
        hidden states and the gathered parameters of the teacher's ends."""
        local, root = self.local, 0 if self.root is None else self.root.whole
        blocks = evolve(self, predicts=False).forward()
        norm = local.stream + (2 * local.between * local.dim * local.exact if local.width != local.exact else 0)
        gathers = 2 * local.whole if local.between < local.tokens else 0
        return root + max(blocks.peak, local.stream + max(norm, gathers)), root + local.whole

    def _once(self, key: Hashable, simulate: Callable[[], MemoryChange]) -> MemoryChange:
        if key not in self.found:
            self.found[key] = simulate()
        return self.found[key]

    @property
    def rotation(self) -> int:
        """Bytes of cosines and sines of all positions, once for all blocks with the same angles, and of token keys."""
        return self._turned_by({block.angles for block, _ in self.blocks})

    @property
    def _kept_rotation(self) -> int:
        """Bytes of them that the backward needs; a recomputed block reads all of its own again."""
        return self._turned_by({block.angles for block, again in self.blocks if block.attends_back or again})

    def _turned_by(self, angles: set[RotaryAngles | None]) -> int:
        widths = sum(each.width * (2 if each.growth else 1) for each in angles if each is not None)
        return 2 * self.local.tokens * self.local.width * widths + self.local.token_keys + self.local.shared

    @property
    def loss(self) -> int:
        return (1 + self.further) * self.ends.loss if self.predicts else 0

    @property
    def unsharded(self) -> int:
        """Peak bytes of gathered parameters."""
        blocks = [sum(unit.whole for unit in block.units.all) for block, _ in self.blocks]
        alive = max(blocks) if self._reshards else sum(blocks)
        return (self.root.whole if self.root is not None else 0) + alive

    @property
    def resident(self) -> int:
        """Bytes of gathered parameters that stay from the forward of a microbatch to its backward."""
        root = self.root.whole if self.root is not None else 0
        return root if self._reshards is not False else self.unsharded

    @property
    def _reshards(self) -> bool | None:
        """True if blocks free gathered parameters; None if nothing is gathered."""
        dense = self.blocks[0][0].units.dense
        return None if dense is None else dense.reshards

    @property
    def unreduced(self) -> int:
        """Bytes of the whole gradients of all units, in the format they are summed in."""
        blocks = sum(unit.summed for block, _ in self.blocks for unit in block.units.all)
        return (self.root.summed if self.root is not None else 0) + blocks

    @property
    def below(self) -> bool:
        """True if something before the stage's blocks is trained, including the embedding."""
        return self.blocks[0][0].below

    @property
    def splits(self) -> bool:
        """True if a split backward has a first part. torch leaves all of the first stage to the second part, and so
        does a stage with nothing trained before it."""
        return not self.embeds and self.below

    @property
    def captured(self) -> int:
        """Bytes of gradients that the first part of a split backward leaves for the second: gradients of the outputs of
        matrices and norms."""
        return sum(op.outputs[0].gradient for block, _ in self.blocks for op in block.owners)

    @property
    def passed_loss(self) -> int:
        """Bytes of the loss that the first part of a split backward frees; the second part needs them only for the
        head."""
        return self.loss if self.splits and not self.ends.weight else 0

    @cached_property
    def passed_values(self) -> int:
        """Bytes of other values that the first part frees: those above everything trained."""
        if not self.splits or (self.predicts and self.ends.trains):
            return 0
        passed = self.ends.saved + (self.local.stream if self.ends.keeps else 0) if self.predicts else 0
        for block, again in reversed(self.blocks):
            passed += block.passed_bytes(again)
            if block.owners:
                return passed
        # The input is in a buffer that stays.
        return passed + self._kept_rotation - (self.local.stream if self._keeps_input else 0)

    def inputs_only(self, handling: Handling) -> MemoryChange:
        """Simulate the first part of a split backward: everything that it meets below a trained parameter stays, and so
        does the input's gradient."""
        given = 0 if self.behind or self.embeds else self.local.stream
        if not self.splits:
            return MemoryChange(given, given)
        weights = sum(op.weights for block, _ in self.blocks for op in block.owners)
        peak = self.captured + max(0, self.backward(handling).peak - weights)
        return MemoryChange(peak, self.captured + given - self.passed_loss - self.passed_values)

    def weights_only(self, handling: Handling) -> MemoryChange:
        """Simulate the second part: a block is recomputed for each operation with trained parameters, and values that
        other operations need stay to the end. In the highest such block, whose last recomputation the backward does
        itself, only values below these operations stay."""
        whole = self.backward(handling)
        if not self.splits:
            return whole
        more, highest = 0, True
        for block, again in reversed(self.blocks):
            if block.owners and again:
                ops = below_trained(block.trace) if highest else block.trace.ops
                more += (len(block.owners) - highest) * block.lasting_bytes(ops)
            highest = highest and not block.owners
        net = whole.net - self.captured + self.passed_loss + self.passed_values
        return MemoryChange(max(0, whole.peak) + more, net)

    def forward(self, *, later: bool = False) -> MemoryChange:
        """Simulate the forward. net: bytes that one microbatch leaves for its backward, including the loss. later:
        another microbatch gathered the parameters, which are still there unless they were freed."""
        gathered = later and self._reshards is False
        held = 0 if later or self.root is None else self.root.flat
        return self._once(("forward", gathered, held, *self._kind), lambda: self._forward(gathered, held))

    def backward(self, handling: Handling) -> MemoryChange:
        """Simulate the backward; the bytes left by the forward are alive before it."""
        return self._once(("backward", handling, *self._kind), lambda: self._backward(handling))

    @property
    def _kind(self) -> tuple[Hashable, ...]:
        """Key that stages with equal costs share."""
        return (self.blocks, self.embeds, self.predicts, self.beside, self.further)

    @property
    def _trains(self) -> bool:
        """True if a block of the stage receives a gradient."""
        return any(block.runs_back for block, _ in self.blocks)

    @property
    def _keeps_input(self) -> bool:
        """True if the backward needs the input of the first block."""
        block, again = self.blocks[0]
        return again or keeps_input(block.trace)

    def _forward(self, gathered: bool, held: int) -> MemoryChange:
        stream, live, peak = self.local.stream, self.rotation, 0
        if self.embeds:
            live += stream + self.ends.embedded
        elif not self._keeps_input:
            live += stream  # it is in a buffer
        count = len(self.blocks) - self.further
        for place, (block, again) in enumerate(self.blocks, start=1):
            behind = self.blocks[place][0] if place < count else None
            simulate = partial(block.forward, again, behind, gathered=gathered, held=held)
            change = self._once((block, again, behind, gathered, held), simulate)
            peak = max(peak, live + change.peak)
            live += change.net
            held = sum(unit.flat for unit in block.units.all[-1:])  # of the unit that was gathered last
            if not self.predicts or place < count:
                continue
            buffer = 0 if gathered else held
            if place == count:
                peak = max(peak, live + self.ends.forward + buffer)
                live += self.ends.saved + self.ends.loss - (0 if self.ends.keeps else stream)
                live += stream if self.further else 0  # the head's input
            else:
                peak = max(peak, live + self.ends.further[0] + buffer)
                live += self.ends.loss - (stream if place == len(self.blocks) else 0)
        if not self.predicts:
            # The incoming gradient of a backward is copied, for the previous stage or for this one.
            begins = not self.alone and not self.below and not (self.embeds and self._trains)
            peak = max(peak, live + (stream if begins else 0))
            live -= stream if self.beside else 0
        return MemoryChange(max(peak, live), live - self.rotation + self._kept_rotation)

    def _backward(self, handling: Handling) -> MemoryChange:
        stream, live, peak = self.local.stream, 0, 0
        in_place = handling.again and not handling.casts and handling.sums != "each"
        lowest = next((place for place, (block, _) in enumerate(self.blocks) if block.runs_back), len(self.blocks))
        units = [block.units.dense for block, _ in self.blocks[lowest:]]
        if self.predicts and not self.further:
            peak, live = self._head_back(in_place)
        # Buffer in which the first unit of the backward was gathered early. After the last unit nothing is gathered.
        early = units[-1].flat if units and units[-1] is not None and units[-1].reshards else 0
        nothing = None if not units or units[0] is None else evolve(units[0], shards=1)
        count = len(self.blocks) - self.further
        for place in reversed(range(len(units))):
            block, again = self.blocks[lowest + place]
            if self.further and self.predicts and lowest + place >= count:
                last = lowest + place == len(self.blocks) - 1
                peak = max(peak, live + self.ends.further[1])
                live += (stream if last else 0) - (self.ends.loss - self.ends.weight)
                live -= 0 if last else self.ends.weight
            behind = next((unit for unit in units[place + 1 :] if unit is not None and unit.gradients), None)
            ahead = units[place - 1] if place else nothing
            buffered = place == len(units) - 1 and not self.predicts  # the gradient is in a buffer that stays
            key = (block, again, handling, behind, ahead, buffered)
            change = self._once(key, partial(block.backward, again, handling, behind, ahead, buffered))
            peak = max(peak, live + early + change.peak)
            live += change.net
            if self.further and self.predicts and lowest + place == len(self.blocks) - 1:
                # Gradients of a parameter that is used several times are joined before they are added to gradients of
                # earlier microbatches: the table's gradient stays until the embedding's is ready.
                live += 0 if self.tied else self.ends.embedding
            if self.further and self.predicts and lowest + place == count:
                most, net = self._head_back(True)
                peak = max(peak, live + early + self.ends.further[1], live + early - stream + most)
                live += net - stream  # the gradient of the head's input, joined with its own
                live -= self.ends.weight if in_place and not self.tied else 0
        live += early
        if self.embeds:
            peak = max(peak, live + self.ends.start)
            live -= self.ends.embedded
        if self.predicts and (self.further or self._shares_table):  # added to the first gradient of the table
            live -= self.ends.embedding if in_place else 0
        elif self.embeds and not in_place:
            live += self.ends.embedding
        if not self.embeds and self._keeps_input:
            live += stream  # its input is in a buffer too
        live -= (stream if self.below else 0) + self._kept_rotation
        if not self.predicts and not self.beside:
            live -= stream
        behind = next((unit for unit in units if unit is not None and unit.gradients), None)
        last = exchange(self.root, behind.buffer if behind is not None else 0, handling)
        return MemoryChange(max(peak, live + last.peak), live + last.net)

    def _head_back(self, in_place: bool) -> tuple[int, int]:
        """Return the peak of the backward of the head and of the norm before it, and the net change. in_place: the
        gradient of the head is added to an existing one."""
        stream, ends = self.local.stream, self.ends
        live = (stream if ends.below else 0) - (ends.loss - ends.weight) - ends.saved
        # Autograd adds the embedding's gradient to the head's before either is added to the gradient of earlier
        # microbatches.
        waits = ends.embedding if self._shares_table and not self.further else 0
        return ends.backward, live - (stream if ends.keeps else 0) - (ends.weight - waits if in_place else 0)

    @property
    def _shares_table(self) -> bool:
        """True if the embedding and the head of this stage are one parameter."""
        return self.tied and self.embeds and self.predicts

    def reduce(self) -> MemoryChange:
        """Simulate the exchange of all gradients of a pipeline stage at the end, unit by unit."""
        live = peak = buffer = 0
        for unit in (self.root, *(unit for block, _ in self.blocks for unit in block.units.all)):
            if unit is not None:
                live -= unit.whole + buffer
                peak = max(peak, live + unit.buffer)
                live += unit.buffer - unit.summed + unit.output
                peak = max(peak, live + (unit.shard if unit.casts_back else 0))
                live += unit.shard - unit.output
                buffer = unit.buffer
        return MemoryChange(peak, live - buffer)
