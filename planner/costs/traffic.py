"""Collectives of one rank in a step, counted with their bytes: FSDP, tensor, context, expert, pipeline.

Groups of one rank send nothing. The first rank of each pipeline coordinate is counted; it has the largest pieces. Most
calls come from the traces of blocks; the others come from the stack, both ends of the model, the pipeline, and the step
around them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod

from attrs import field

from xtrain.blocks.head_memory import FP64, reads_of, tokens_at_once
from xtrain.blocks.memory_simulator import second_run
from xtrain.blocks.op_trace import CP, INDEX, TP, CollectiveCall, FsdpUnit
from xtrain.blocks.stage_costs import StageCosts
from xtrain.contracts.stacks import stack_of
from xtrain.dsl.schema.actions import SIGNALS
from xtrain.dsl.schema.policy import SHARES
from xtrain.lazy_attrs import define
from xtrain.plan.amounts import agree_args
from xtrain.plan.architecture import EMBEDDING, SCORE, ParameterSpec, name_in_block
from xtrain.plan.estimates import TrafficOp
from xtrain.plan.mesh import AXES, folded_axes
from xtrain.plan.parameters import block_tensors
from xtrain.plan.pipeline import PipelineAction, gathered_stages, order, stage_end_names
from xtrain.plan.resolved import Resolved
from xtrain.planner.derive.further_models import sampler_widths
from xtrain.planner.derive.update_work import optimizer_work
from xtrain.planner.graph.saving import puts_off
from xtrain.planner.graph.timeline import acts_together, fill_schedule
from xtrain.text.units import BYTES

FSDP, ROOT, EXPERTS = "setup.parallel.fsdp", "setup.parallel.root_fsdp", "setup.parallel.expert_fsdp"
SINGLE = ("gpipe", "1f1b")

Times = tuple[CollectiveCall, int]


def gathers_of(resolved: Resolved, stages: list[StageCosts], pp: int) -> Iterator[Times]:
    """Yield the all-gathers of one step, each with its count."""
    for stage in stages:
        root, blocks, forward = _gathers(resolved, stage, pp)
        units = [(stage.root, _dense_axis(resolved), ROOT, root)]
        for (block, _), count in stage.counts.items():
            units.append(
                (block.units.dense, _dense_axis(resolved), FSDP, count * (blocks if block.runs_back else forward))
            )
            times = blocks if block.experts_run_back else forward
            units.append((block.units.experts, "ep_fsdp", EXPERTS, times * count))
        for unit, axis, node, times in units:
            if unit is not None and unit.shards > 1:
                yield CollectiveCall(axis, "all_gather", node, unit.whole), times


def sums_of(resolved: Resolved, stages: list[StageCosts]) -> Iterator[Times]:
    """Yield the gradient exchanges of one step: summed over shards, then over copies of them."""
    times = exchanges(resolved)
    for stage in stages:
        units = [(stage.root, _dense_axis(resolved), "replicate", ROOT, 1)]
        for (block, _), count in stage.counts.items():
            units.append((block.units.dense, _dense_axis(resolved), "replicate", FSDP, count))
            units.append((block.units.experts, "ep_fsdp", "ep_replicate", EXPERTS, count))
        for unit, axis, copies, node, count in units:
            if unit is not None:
                yield from _exchange(unit, axis, copies, node, times * count)
        if resolved.size("tp") > 1 and resolved.dense_fsdp:
            # Exchanged as they are computed, before they are cast to the reduce format.
            at_once = times > 1 or (resolved.size("pp") == 1 and resolved.batch.accumulate == 1)
            width = BYTES[resolved.formats.compute if at_once else resolved.formats.reduce]
            ends = set(stage_end_names(resolved.architecture, resolved.pipeline, stage.stage))
            own = [t for t in resolved.inventory.tensors if t.name in ends]
            blocks = [(block_tensors(resolved.inventory, block.layer), n) for (block, _), n in stage.counts.items()]
            for tensors, count in ((own, 1), *blocks):
                for tensor in partial(resolved, tensors):
                    yield CollectiveCall("tp", "all_reduce", "setup.parallel.tp", tensor.size * width), times * count


def exchanges(resolved: Resolved) -> int:
    """Return how often a step exchanges gradients."""
    return resolved.batch.accumulate if resolved.size("pp") == 1 and resolved.sync == "microbatch" else 1


def partial(resolved: Resolved, tensors: list[ParameterSpec]) -> list[ParameterSpec]:
    """Return the trained parameters that tensor parallelism leaves whole and of whose gradient every rank has only a
    summand: it used them on its own positions, or on its own heads."""
    whens = ("by_position", "always") if resolved.spec.parallel.tp.sequence else ("always",)
    arch = resolved.architecture
    of_blocks = {each.name for kind in arch.kinds for each in kind.block.parameters(arch) if each.partial in whens}
    ends = {"norm.weight", f"{SCORE}.weight"} if "by_position" in whens else set()
    ends |= {each.name for each in arch.head_adapters() if each.partial in whens}
    return [t for t in tensors if t.trained and (t.name in ends or name_in_block(t.name) in of_blocks)]


def _exchange(unit: FsdpUnit, axis: str, copies: str, node: str, times: int) -> Iterator[Times]:
    if not unit.gradients:
        return
    if unit.shards > 1:
        yield CollectiveCall(axis, "reduce_scatter", node, unit.buffer), times
    if unit.copies > 1:
        yield CollectiveCall(copies, "all_reduce", node, unit.output), times


def _dense_axis(resolved: Resolved) -> str:
    return " · ".join(resolved.wide(*resolved.shard_axes))


def _gathers(resolved: Resolved, stage: StageCosts, pp: int) -> tuple[int, int, int]:
    """Return how often a step gathers the root of a stage, each of its blocks, and each block without a backward."""
    count = resolved.batch.accumulate
    if resolved.size("pp") == 1:
        return count, count * (2 if resolved.reshard else 1), count
    key = (resolved.spec.parallel.pp.schedule, pp, resolved.size("pp"), resolved.pipeline.owners[pp], count)
    root, blocks = (_gather_counts(*key, reshards=each)[stage.stage] for each in (False, resolved.reshard))
    return root, blocks, count if resolved.reshard else blocks


@lru_cache(maxsize=512)
def _gather_counts(
    schedule: str, pp: int, ranks: int, stages: tuple[int, ...], count: int, *, reshards: bool
) -> dict[int, int]:
    """Return stage → how often a step gathers one of its units, for the stages of a rank."""
    actions = order(schedule, pp, ranks, stages, count)
    units = {stage: _Unit(reshards=reshards) for stage in stages}
    for event in actions if schedule in SINGLE else gathered_stages(actions):
        if isinstance(event, PipelineAction):
            units[event.stage].computes(event)
        else:
            units[event[0]].set_gathered(event[1])
    return {stage: unit.gathers for stage, unit in units.items()}


class _Unit:
    """State of a unit, gathered or not, and the number of its gathers."""

    def __init__(self, *, reshards: bool) -> None:
        self.gathers, self._there, self._reshards = 0, False, reshards

    def set_gathered(self, gather: bool) -> None:
        self.gathers += gather and not self._there
        self._there = gather

    def computes(self, action: PipelineAction) -> None:
        self.set_gathered(True)
        if action.kind == "F" and self._reshards:
            self._there = False


PP = "setup.parallel.pp"


@define
class CollectiveCounts:
    """Counts and bytes of calls by axis, operation, node of the plan, and whether computation overlaps; meanwhile:
    FLOPs that overlap."""

    counts: Counter[tuple[str, TrafficOp, str, bool]] = field(factory=Counter)
    bytes: Counter[tuple[str, TrafficOp, str, bool]] = field(factory=Counter)
    meanwhile: Counter[tuple[str, TrafficOp, str, bool]] = field(factory=Counter)

    def add(self, call: CollectiveCall, times: int = 1) -> None:
        if call.axis and times:
            key = (call.axis, call.op, call.node, call.meanwhile > 0)
            self.counts[key] += times
            self.bytes[key] += times * call.bytes
            self.meanwhile[key] += times * call.meanwhile

    def add_all(self, calls: Iterable[CollectiveCall], times: int = 1) -> None:
        for call in calls:
            self.add(call, times)


def collective_counts(resolved: Resolved, stages: list[list[StageCosts]]) -> list[CollectiveCounts]:
    """Return the calls of the ranks of every pipeline coordinate."""
    return [_calls_of_coordinate(resolved, own, pp) for pp, own in enumerate(stages)]


def _calls_of_coordinate(resolved: Resolved, stages: list[StageCosts], pp: int) -> CollectiveCounts:
    calls = CollectiveCounts()
    _around(calls, resolved, pp)
    count = resolved.batch.accumulate
    for stage in stages:
        split = (
            resolved.size("pp") > 1 and resolved.spec.parallel.pp.schedule in ("zero_bubble", "zbv") and stage.splits
        )
        _blocks(calls, stage, count, split)
        _ends(calls, resolved, stage, count)
        _teacher(calls, resolved, stage, count)
        _sequences(calls, resolved, stage, count)
        _between(calls, resolved, stage, count)
    for call, times in stack_of(resolved.spec).calls(resolved, stages, pp):
        calls.add(call, times)
    return calls


def _blocks(calls: CollectiveCounts, stage: StageCosts, count: int, split: bool) -> None:
    """Add the calls of all blocks: forward, backward and recomputation."""
    for (block, again), blocks in stage.counts.items():
        for op in block.trace.ops:
            calls.add_all((*op.calls, *op.back_calls, *op.weight_calls), count * blocks)
        if again and block.recompute is not None:
            # A split backward passes through a block once for its input, and once for each operation with trained
            # parameters.
            runs = 1 + len(block.owners) if split else 1
            for op in second_run(block.trace, block.recompute):
                calls.add_all(op.calls, count * blocks * runs)


def _ends(calls: CollectiveCounts, resolved: Resolved, stage: StageCosts, count: int) -> None:
    """Add the calls of tensor parallelism at the embedding and at the head."""
    if resolved.size("tp") == 1:
        return
    tensor, local = resolved.spec.parallel.tp, stage.local
    whole = local.whole
    if stage.embeds:
        calls.add(CollectiveCall("tp", "reduce_scatter" if tensor.sequence else "all_reduce", TP, whole), count)
        if tensor.sequence and stage.ends.embedding:
            calls.add(CollectiveCall("tp", "all_gather", TP, whole), count)
    if stage.predicts and resolved.architecture.has_logits:
        count *= 1 + stage.further
        if tensor.sequence:
            calls.add(CollectiveCall("tp", "all_gather", TP, whole), count)
        if stage.ends.passes:
            calls.add(CollectiveCall("tp", "reduce_scatter" if tensor.sequence else "all_reduce", TP, whole), count)
        reads, teacher = reads_of(resolved), resolved.spec.loss.learns_from
        live = teacher is not None and teacher.live
        piece = tokens_at_once(resolved, local, models=2 if live else 1)
        shares = sampler_widths(resolved).get(SHARES, 0)
        for first in range(0, local.tokens, piece):
            if shares:  # the probabilities of the sampler's tokens
                bytes = min(piece, local.tokens - first) * shares * FP64
                calls.add(CollectiveCall("tp", "all_reduce", TP, bytes), count)
            exact = min(piece, local.tokens - first) * local.exact
            if live and tensor.loss:  # the largest logits of both models, sums over all logits, and the divergence
                form = resolved.spec.loss.args()["form"]
                for sums in (1, 2, 1, 2) if resolved.spec.loss.columns else (2, 5, 2 if form == "jsd" else 1):
                    calls.add(CollectiveCall("tp", "all_reduce", TP, sums * exact), count)
            elif tensor.loss:
                calls.add(CollectiveCall("tp", "all_reduce", TP, exact), count)
                sums = 2 + len({"mean_logprob_T", "entropy_T"}.intersection(reads))
                if teacher is not None:  # and the same for the divided logits
                    sums = 4 + teacher.top
                calls.add(CollectiveCall("tp", "all_reduce", TP, sums * exact), count)
            else:
                logits = resolved.size("tp") * local.vocab * exact
                calls.add(CollectiveCall("tp", "all_gather", TP, logits), count * (1 + live))


def _teacher(calls: CollectiveCounts, resolved: Resolved, stage: StageCosts, count: int) -> None:
    """Add the calls of a teacher's forward of each microbatch."""
    own, teacher = resolved.teacher, stage.teacher
    if own is None or teacher is None or not stage.predicts:
        return
    for (block, _), blocks in teacher.counts.items():
        for op in block.trace.ops:
            calls.add_all(op.calls, count * blocks)
    if own.size("tp") > 1:
        whole, sequence = teacher.local.whole, own.spec.parallel.tp.sequence
        calls.add(CollectiveCall("tp", "reduce_scatter" if sequence else "all_reduce", TP, whole), count)
        if sequence:
            calls.add(CollectiveCall("tp", "all_gather", TP, whole), count)
    if own.stack.uses_fsdp:
        for call, times in gathers_of(own, [teacher], 0):
            calls.add(call, times)


def _sequences(calls: CollectiveCounts, resolved: Resolved, stage: StageCosts, count: int) -> None:
    """Add the sums over the tokens of each sequence, if ranks hold parts of it, and rewards of its last token. Each row
    is counted as one document."""
    loss, rewards = resolved.spec.loss, not resolved.architecture.has_logits
    if not stage.predicts or not (loss.across or rewards):
        return
    size = (1 if rewards else loss.summed) * resolved.batch.micro * FP64
    for axis in resolved.wide("ring", "ulysses"):
        calls.add(CollectiveCall(axis, "all_reduce", CP, size), count)
    if rewards and resolved.size("tp") > 1 and resolved.spec.parallel.tp.sequence:
        calls.add(CollectiveCall("tp", "all_reduce", TP, size), count)


def _between(calls: CollectiveCounts, resolved: Resolved, stage: StageCosts, count: int) -> None:
    """Add the messages between stages of different ranks: the residual stream forwards and its gradient back."""
    if resolved.size("pp") == 1:
        return
    size = stage.local.stream
    for there in (not stage.predicts and not stage.beside, not stage.embeds and not stage.behind):
        if there:
            calls.add(CollectiveCall("pp", "send", PP, size), count)
            calls.add(CollectiveCall("pp", "recv", PP, size), count)


def _around(calls: CollectiveCounts, resolved: Resolved, pp: int) -> None:
    """Add the calls of the step outside forward and backward."""
    spec, batch, arch = resolved.spec, resolved.batch, resolved.architecture
    world = " · ".join(resolved.wide(*AXES))
    if len(resolved.pipeline.readers) < resolved.size("pp"):
        size = 4 * batch.accumulate * batch.micro * (batch.sequence + 2 * len(resolved.row_numbers))
        calls.add(CollectiveCall("pp", "broadcast", "step.share_outline", size))
    schedule = fill_schedule(spec, batch.declared_steps)
    clocks = sum(tick.every.unit == "seconds" for tick in schedule.ticks) + puts_off(spec, schedule)
    # Valid tokens and three sums over documents; signals, limits, commands, clocks and whether a save is done; square
    # of the norm, and the loss.
    asked = len(SIGNALS) + bool(agree_args(spec)) + 2  # a command from outside, and its number
    asked += acts_together(spec)
    counted = 4 + (spec.loss.unit != "token") + (spec.batch.pad_to is not None)
    calls.add(CollectiveCall(world, "all_reduce", "step.agree", (counted + asked + clocks) * 8))
    norm, sums = ("step.clip" if spec.optimizer.clip_args() else "step.gradient_norm"), 2
    if spec.tasks:  # and the valid tokens of each
        norm, sums = "step.task_gradients", 3 * len(spec.tasks)
    recorded = 1 + arch.mtp if arch.mtp else 1 + len(spec.loss.measured) if spec.loss.recorded else 0
    calls.add(CollectiveCall(world, "all_reduce", norm, (sums + recorded) * 8))
    if arch.router_bias_speed > 0:
        calls.add(CollectiveCall(world, "all_reduce", "step.router_bias", arch.layers * (arch.experts + 1) * INDEX))
    _gradient_sums(calls, resolved, pp)
    if (work := optimizer_work(resolved)[pp]) is not None:
        calls.add_all(work.calls)


def _gradient_sums(calls: CollectiveCounts, resolved: Resolved, pp: int) -> None:
    """Add the sums of gradients that the stack does not make."""
    width, arch = BYTES[resolved.formats.params], resolved.architecture
    if resolved.size("tp") > 1 and not resolved.dense_fsdp:
        for tensor in partial(resolved, resolved.parameters_by_pp[pp]):
            calls.add(CollectiveCall("tp", "all_reduce", "step.tensor_grad_sync", tensor.size * width))
    if (
        resolved.size("pp") > 1
        and arch.embeds_behind
        and (resolved.pipeline.holds_first(pp) or resolved.pipeline.holds_last(pp))
    ):
        for table in (t for t in resolved.inventory.tensors if t.name == f"{EMBEDDING}.weight" and t.trained):
            calls.add(CollectiveCall("pp", "all_reduce", "step.tied_grad_sync", resolved.cuts.largest([table]) * width))
    for axis in resolved.wide(
        *(axis for axis in ("ring", "ulysses") if axis not in folded_axes(resolved.spec.parallel))
    ):
        for tensor in resolved.parameters_by_pp[pp]:
            if tensor.trained and not tensor.expert:
                size = prod(resolved.cuts.shape(tensor))
                calls.add(CollectiveCall(axis, "all_reduce", "step.context_grad_sync", size * width))
