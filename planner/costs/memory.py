"""Bytes on a rank at the peak of a step, by purpose.

The estimates follow the program of `runtime/`: the tensors that each module keeps for the backward, the times at which
FSDP gathers and exchanges, and the order in which a pipeline schedule runs forwards and backwards.
"""

from collections.abc import Hashable, Sequence

from attrs import evolve, field

from xtrain.blocks.head_memory import ends_of
from xtrain.blocks.memory_simulator import Handling, MemoryChange, Recompute, Sums
from xtrain.blocks.stage_costs import BlockCosts, StageCosts, roots_of, units_of_block
from xtrain.contracts.actions import PlannedAction
from xtrain.contracts.stacks import OwnedBytes, stack_of
from xtrain.dsl.schema.component import planned
from xtrain.lazy_attrs import define
from xtrain.plan.architecture import ParameterSpec
from xtrain.plan.estimates import Memory
from xtrain.plan.kernels import resolve_save
from xtrain.plan.parameters import block_tensors
from xtrain.plan.pipeline import Kind, PipelineAction, end_names, order
from xtrain.plan.resolved import Resolved
from xtrain.planner.costs.block_trace import block_trace, local_of
from xtrain.planner.derive.further_models import recorded_bytes, sampling_bytes, scorer_bytes
from xtrain.planner.derive.model import kept_tensors
from xtrain.planner.derive.update_work import optimizer_work
from xtrain.text.units import BYTES

# Number of stages of a rank whose parameters torch keeps gathered: those that compute next.
MOST_GATHERED = 3


def memory_of(resolved: Resolved, stages: list[list[StageCosts]]) -> list[Memory]:
    """Return the memory of the ranks of every pipeline coordinate, of the rank with the most each; without
    `reserve`."""
    blocks: dict[int, OwnedBytes] = {}
    for kind in resolved.kinds:
        for layers in resolved.updated_alike(kind):
            blocks |= dict.fromkeys(layers, owned_bytes(resolved, block_tensors(resolved.inventory, layers[0])))
    tensors = {t.name: t for t in resolved.inventory.tensors if not t.name.startswith("layers.")}
    found = []
    for pp, own in enumerate(stages):
        names = end_names(resolved.architecture, resolved.pipeline, pp)
        ends = owned_bytes(resolved, [tensors[name] for name in names])
        states = sum((blocks[layer] for layer in resolved.pipeline.layers(pp)), ends)
        teacher = resolved.teacher
        if teacher is not None and resolved.pipeline.holds_last(pp):  # a live one, on the ranks that hold the head
            states = evolve(states, parameters=states.parameters + teacher.state_bytes(teacher.inventory.tensors))
        memory = _piped(resolved, own, pp, states) if resolved.size("pp") > 1 else _alone(resolved, own[0], states)
        found.append(memory)
    return found


def stage_costs(resolved: Resolved) -> list[list[StageCosts]]:
    """Return the stages of every pipeline coordinate."""
    local, roots, recompute = local_of(resolved), roots_of(resolved), recompute_of(resolved)
    blocks: dict[int, BlockCosts] = {}
    for kind in resolved.kinds:
        units = units_of_block(resolved, kind.first)
        trace = block_trace(resolved, local, kind, units.experts)
        angles = kind.block.angles(resolved.architecture)
        block = BlockCosts(kind.first, angles, trace, units, recompute, kind.below, kind.runs_back, resolved.prefetch)
        blocks |= dict.fromkeys(kind.layers, block)
    teacher = None if resolved.teacher is None else stage_costs(resolved.teacher)[0][0]
    taught = None if teacher is None else teacher.taught
    ends, every, last = (
        ends_of(resolved, local, taught),
        resolved.spec.activation.every,
        len(resolved.pipeline.spans) - 1,
    )
    found: dict[Hashable, MemoryChange] = {}

    def of_stage(pp: int, stage: int) -> StageCosts:
        first, final = resolved.pipeline.spans[stage]
        return StageCosts(
            stage=stage,
            found=found,
            root=roots[stage],
            local=local,
            ends=ends,
            blocks=tuple(
                (blocks[layer], recompute is not None and (layer + 1) % every == 0 and blocks[layer].runs_back)
                for layer in range(first, final + 1)
            ),
            embeds=stage == 0,
            predicts=stage == last,
            tied=resolved.architecture.tie_embeddings,
            beside=stage + 1 in resolved.pipeline.owners[pp],
            behind=stage - 1 in resolved.pipeline.owners[pp],
            alone=last == 0,
            further=resolved.architecture.mtp if stage == last else 0,
            teacher=teacher,
        )

    return [[of_stage(pp, stage) for stage in stages] for pp, stages in enumerate(resolved.pipeline.owners)]


def recompute_of(resolved: Resolved) -> Recompute | None:
    """Return how the backward recomputes blocks; None without recomputation."""
    mode = resolved.spec.activation.mode
    if mode == "none":
        return None
    saved = resolve_save(resolved) if mode == "selective" else ()
    return Recompute(frozenset(saved), choices=resolved.layout.ep > 1)


def owned_bytes(resolved: Resolved, tensors: Sequence[ParameterSpec]) -> OwnedBytes:
    """Return the bytes of parameters on a rank."""
    trained = [each for each in tensors if each.trained]
    moments = sum(resolved.moment_bytes(each, resolved.cuts.shape(each)) for each in trained)
    still = resolved.state_bytes(each for each in tensors if not each.trained and (resolved.saves_base or each.begun))
    kept = 0 if resolved.spec.parallel.fsdp.offload else resolved.state_bytes(kept_tensors(resolved, tensors))
    elements = resolved.cuts.largest(trained)
    return OwnedBytes(resolved.state_bytes(tensors), resolved.state_bytes(trained), elements, moments, still, kept)


def _alone(resolved: Resolved, stage: StageCosts, states: OwnedBytes) -> Memory:
    """Return memory without a pipeline: one microbatch after the other, forward and backward."""
    count, sharded = resolved.batch.accumulate, resolved.dense_fsdp
    casts = sharded and resolved.formats.reduce != resolved.formats.compute
    forward, base = stage.forward(), states.parameters + states.moments + stage.resident + _buckets(resolved, states)
    gradients, peak = 0, 0
    spared = stack_of(resolved.spec).gradients_spared(resolved, states)
    states, computed = stack_of(resolved.spec).held(resolved, states), states
    gathered = stack_of(resolved.spec).gathered(resolved)
    base += states.parameters + states.moments - computed.parameters - computed.moments + gathered
    turns = min(count, 3)  # the ones in between are equal
    for number in range(turns):
        sums: Sums = "exchange" if number == turns - 1 else "keep"
        if not sharded:
            sums = "own"
        elif resolved.sync == "microbatch":
            sums = "each"
        change = stage.backward(Handling(sums=sums, again=number > 0, casts=casts))
        backward = max(forward.net, forward.net + change.peak - (spared if number == 0 else 0))
        peak = max(peak, base + gradients + max(stage.forward(later=number > 0).peak, backward))
        gradients -= spared if number == 0 else 0
        gradients += forward.net + change.net + (stage.resident if sharded else 0)
    whole = sharded and count > 1 and resolved.sync != "microbatch"
    return _memory(
        resolved,
        0,
        states,
        peak,
        unsharded=stage.unsharded + gathered,
        unreduced=(stage.unreduced if whole else 0) + _buckets(resolved, states),
        activations=forward.net - stage.loss,
        loss=stage.loss,
    )


def _memory(resolved: Resolved, pp: int, states: OwnedBytes, peak: int, **parts: int) -> Memory:
    persistent, work = states.parameters + states.moments + states.trained, optimizer_work(resolved)[pp]
    updating = _buckets(resolved, states) + _of_actions(resolved, states) + (0 if work is None else work.scratch)
    updating += stack_of(resolved.spec).beside_update(resolved, states)
    scorer, scoring = scorer_bytes(resolved, pp)
    sampling = _buckets(resolved, states) + max(sampling_bytes(resolved), scoring)
    peak = max(peak, persistent + updating, persistent + sampling)
    peak += states.reference + scorer + recorded_bytes(resolved)
    return Memory(
        parameters=states.parameters,
        gradients=states.trained,
        optimizer=states.moments,
        averages=0 if resolved.averages is None else states.elements * BYTES[resolved.averages] + states.still,
        working=max(0, peak - persistent - sum(parts.values())),
        host=states.host,
        offloaded=resolved.spec.parallel.fsdp.offload,
        **parts,
    )


def _buckets(resolved: Resolved, states: OwnedBytes) -> int:
    """Return the bytes of buffers in which the stack sums gradients; they stay allocated."""
    return states.trained if resolved.stack.buckets else 0


def _of_actions(resolved: Resolved, states: OwnedBytes) -> int:
    """Return the bytes that actions allocate after the optimizer."""
    triggers = (*resolved.spec.ticks, *resolved.spec.events)
    actions = (planned(action, PlannedAction) for trigger in triggers for action in trigger.actions)
    return max((action.allocates(resolved, states.trained) for action in actions), default=0)


def _piped(resolved: Resolved, stages: list[StageCosts], pp: int, states: OwnedBytes) -> Memory:
    """Return memory with a pipeline: microbatches in the order of its schedule."""
    rank, gathered = simulate_pipeline(resolved, stages, pp, states)
    buckets = _buckets(resolved, states)
    return _memory(
        resolved,
        pp,
        states,
        rank.peak + buckets,
        unsharded=gathered,
        unreduced=(sum(each.unreduced for each in stages) if resolved.dense_fsdp else 0) + buckets,
        activations=rank.activations,
        loss=rank.loss,
    )


@define
class Piped:
    """Memory of one rank while its schedule runs, in bytes.

    live: everything except reserve. for_backward: left by forwards, including message buffers. losses: left by heads.
    The other fields are maxima: of all, of `for_backward` after a forward, of `losses`.
    """

    live: int
    for_backward: int
    losses: int = 0
    peak: int = 0
    activations: int = 0
    loss: int = 0
    _changes: dict[tuple[Kind, int, bool], MemoryChange] = field(factory=dict)

    def simulate(self, resolved: Resolved, pp: int, stages: list[StageCosts]) -> None:
        """Run all actions of coordinate `pp`; a stage exchanges its gradients when its last backward is done."""
        schedule, count, sharded = resolved.spec.parallel.pp.schedule, resolved.batch.accumulate, resolved.dense_fsdp
        by_stage, left = {each.stage: each for each in stages}, {each.stage: count for each in stages}
        # A rank of 1f1b holds the last gradient that it sent, at most until the next backward is done.
        sent = stages[0].local.stream if schedule == "1f1b" and not stages[0].embeds else 0
        for action in order(schedule, pp, resolved.size("pp"), resolved.pipeline.owners[pp], count):
            stage, again = by_stage[action.stage], left[action.stage] < count
            self._do(action, self._change(resolved, action, stage, again), stage, sent if again else 0)
            if action.kind in ("B", "W"):
                left[action.stage] -= 1
                if sharded and not left[action.stage]:
                    self._add(stage.reduce())

    def _change(self, resolved: Resolved, action: PipelineAction, stage: StageCosts, again: bool) -> MemoryChange:
        key = (action.kind, action.stage, again)
        if key not in self._changes:
            sharded = resolved.dense_fsdp
            casts = sharded and resolved.formats.reduce != resolved.formats.compute
            handling = Handling(sums="keep" if sharded else "own", again=again, casts=casts, frees=False)
            self._changes[key] = {
                "F": lambda: stage.forward(later=again),
                "B": lambda: stage.backward(handling),
                "I": lambda: stage.inputs_only(handling),
                "W": lambda: stage.weights_only(handling),
            }[action.kind]()
        return self._changes[key]

    def _do(self, action: PipelineAction, change: MemoryChange, stage: StageCosts, sent: int) -> None:
        self.peak = max(self.peak, self.live + change.peak + sent)
        self._add(change)
        left = stage.forward().net - stage.loss
        if action.kind == "F":
            self.for_backward += left
            self.losses += stage.loss
            self.activations = max(self.activations, self.for_backward + sent)
            self.loss = max(self.loss, self.losses)
        elif action.kind == "I":
            self.for_backward += change.net + stage.passed_loss
            self.losses -= stage.passed_loss
        else:
            split = action.kind == "W"
            captured = stage.captured if split and stage.splits else 0
            self.for_backward -= left + captured - (stage.passed_values if split else 0)
            self.losses -= stage.loss - (stage.passed_loss if split else 0)

    def _add(self, change: MemoryChange) -> None:
        self.peak = max(self.peak, self.live + change.peak)
        self.live += change.net


def simulate_pipeline(resolved: Resolved, stages: list[StageCosts], pp: int, states: OwnedBytes) -> tuple[Piped, int]:
    """Return a rank of coordinate `pp`, which owns `states`, at the end of its step, and the peak of gathered bytes."""
    gathered = sum(sorted(each.unsharded for each in stages)[-MOST_GATHERED:])
    messages = sum((not each.embeds) + (not each.predicts) for each in stages)
    buffers = resolved.batch.accumulate * stages[0].local.stream * messages
    rank = Piped(live=states.parameters + states.moments + gathered + buffers, for_backward=buffers)
    rank.simulate(resolved, pp, stages)
    return rank, gathered
