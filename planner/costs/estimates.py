"""Estimates of a step for every pipeline coordinate: memory, traffic, FLOPs, pipeline bubble and seconds.

Times are for comparing layouts and are not a promise: latencies are assumed, link speeds come from data sheets, and the
efficiency of kernels is assumed too unless the spec states it (`Cluster.efficiency`), or names measured runs
(`Cluster.calibration`).
"""

from typing import Final

from attrs import evolve

from xtrain.blocks.memory_simulator import second_run
from xtrain.blocks.stage_costs import StageCosts
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import name_in_block, pairs_within
from xtrain.plan.estimates import Estimates, Hardware, RankClass, Traffic, Work
from xtrain.plan.mesh import device_kind
from xtrain.plan.parameters import (
    BackwardLess,
    block_matmul_parameters,
    flops_per_token,
    head_factors,
    matmul_sizes,
    training_work,
)
from xtrain.plan.pipeline import Pipeline, PipelineAction, order
from xtrain.plan.resolved import Resolved
from xtrain.planner.costs.memory import memory_of, stage_costs
from xtrain.planner.costs.times import PASSED, predict, timed
from xtrain.planner.costs.traffic import CollectiveCounts, collective_counts
from xtrain.planner.derive.model import refers_in_each_step
from xtrain.planner.derive.update_work import optimizer_work

LONGEST: Final = 6_000  # number of simulated computations of all ranks, above which the formula is used


@frozen
class StageBackward:
    """Work of a stage's backward: gradients of its inputs, and of its weights. splits: for a schedule that splits
    backwards, whether the stage has the first part; torch does all of the first stage in the second part."""

    inputs: float
    weights: float
    splits: bool


def bubble(
    schedule: str,
    pipeline: Pipeline,
    microbatches: int,
    work: list[float],
    again: list[float],
    backward: list[StageBackward] | None = None,
) -> float:
    """Return the share of a step in which the rank with the most work waits.

    work: of every stage's forward. again: recomputation in its backward. backward: the backward's other work; None:
    each part costs as much as the forward. Messages take no time. Formula: (p - 1) / (v · m + p - 1) for p ranks, v
    stages on each and m microbatches (arXiv 2104.04473); schedules that split the backward leave a third of that (arXiv
    2401.10241, ZB-H1), and zbv none.
    """
    ranks = len(pipeline.owners)
    if ranks == 1:
        return 0.0
    backward = backward or [StageBackward(each, each, stage > 0) for stage, each in enumerate(work)]
    if 2 * microbatches * len(pipeline.spans) > LONGEST:
        left = {"zero_bubble": 1 / 3, "zbv": 0.0}.get(schedule, 1.0)
        return waiting(ranks, len(pipeline.owners[0]) * microbatches, left)
    orders = [order(schedule, rank, ranks, own, microbatches) for rank, own in enumerate(pipeline.owners)]

    def lasts(action: PipelineAction) -> float:
        back = backward[action.stage]
        if action.kind == "F":
            return work[action.stage]
        if action.kind == "B" or not back.splits:
            return 0.0 if action.kind == "I" else back.inputs + back.weights + again[action.stage]
        return back.inputs + again[action.stage] if action.kind == "I" else back.weights

    end = _simulated(orders, len(pipeline.spans), lasts)
    busy = max(sum(map(lasts, actions)) for actions in orders)
    return 1 - busy / end


def waiting(ranks: int, turns: int, left: float = 1.0) -> float:
    """Return the bubble by formula. turns: microbatches times stages on a rank. left: share of the waiting that is not
    filled."""
    waits = (ranks - 1) * left
    return waits / (turns + waits)


def _simulated(orders: list[list[PipelineAction]], stages: int, lasts) -> float:
    """Return the time at which the last rank is done if each action starts as soon as it can."""
    done: dict[tuple[str, int, int], float] = {}
    clocks, places, left = [0.0] * len(orders), [0] * len(orders), sum(map(len, orders))
    while left:
        before = left
        for rank, actions in enumerate(orders):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                start = _ready(action, stages, done)
                if start is None:
                    break
                clocks[rank] = max(clocks[rank], start) + lasts(action)
                kind = "F" if action.kind == "F" else "W" if action.kind == "W" else "B"
                done[kind, action.stage, action.microbatch] = clocks[rank]
                places[rank] += 1
                left -= 1
        assert left < before, "the schedule waits for itself"
    return max(clocks)


def _ready(action: PipelineAction, stages: int, done: dict[tuple[str, int, int], float]) -> float | None:
    """Return the time at which the inputs of an action are computed; None: not yet."""
    if action.kind == "F":
        return 0.0 if action.stage == 0 else done.get(("F", action.stage - 1, action.microbatch))
    if action.kind == "W" or action.stage == stages - 1:
        return done.get(("F", action.stage, action.microbatch))
    return done.get(("B", action.stage + 1, action.microbatch))


SOURCES: Final = {
    "flops_per_token": (
        "6 · parameters in matrix products + 12 · layers · heads · head_dim · sequence; without the embedding table, "
        "with the head and the experts that a token uses; no discount for causality, no recomputation (PaLM, arXiv "
        "2204.02311, appendix B)"
    ),
    "work": "flops_per_token split by the quantities that it scales with, plus recomputation in backwards",
    "memory": (
        "counted from the tensors that modules of the runtime keep, in the order in which a step allocates and frees "
        "them; each row one document, balanced routing; for each pipeline coordinate the rank with the largest shards"
    ),
    "reserve": "on cuda: context, libraries and memory that the allocator cannot use",
    "communication": "the collectives of the runtime, counted; seconds by ring algorithms at the speed of the slowest "
    "link of the axis",
    "times": (
        "operations at the efficiency of `cluster`, exposed communication, and the bubble of the pipeline schedule; "
        "mfu from flops_per_token, each row one document"
    ),
    "checkpoint_bytes": "parameters and two moments in the format of the parameters, and averages if there are any",
}
WINDOWED: Final = {
    "flops_per_token": f"{SOURCES['flops_per_token']}; for attention with a window, the positions at a distance below "
    "the window, in both directions",
}

TAUGHT: Final = {"work": f"{SOURCES['work']}; and the forward of the teacher"}
REFERRED: Final = {"work": f"{SOURCES['work']}; and a forward of the reference"}
FROZEN: Final = {
    "work": f"{SOURCES['work']}; without gradients of frozen parameters, and of modules below all trained ones",
}


def estimate(resolved: Resolved, cluster: Hardware) -> Estimates:
    """Return all estimates of a run."""
    tokens = resolved.batch.tokens_per_step
    stages = stage_costs(resolved)
    less = _less(resolved, stages)
    work = _work(resolved, stages, less)
    per_token = flops_per_token(resolved.architecture, resolved.batch.sequence, less)
    classes, flops = _classes(resolved, cluster, stages, less, work), per_token * tokens
    share = bubble(
        resolved.spec.parallel.pp.schedule, resolved.pipeline, resolved.batch.accumulate, *_works(resolved, stages)
    )
    return Estimates(
        tokens_per_step=tokens,
        flops_per_token=per_token,
        flops_per_step=flops,
        work=work,
        checkpoint_bytes=resolved.checkpoint_bytes,
        classes=classes,
        bubble=share,
        times=predict(
            cluster,
            classes,
            share,
            mesh=resolved.layout.mesh,
            tokens=tokens,
            flops=flops,
            work=work,
            sequence=resolved.batch.sequence,
            experts=resolved.architecture.is_moe,
        ),
        sources=SOURCES
        | (WINDOWED if work.windows else {})
        | (FROZEN if less.blocks else {})
        | (TAUGHT if resolved.teacher is not None else {})
        | (REFERRED if refers_in_each_step(resolved.spec) else {}),
    )


def _classes(
    resolved: Resolved, cluster: Hardware, stages: list[list[StageCosts]], less: BackwardLess, work: Work
) -> tuple[RankClass, ...]:
    memory, calls = memory_of(resolved, stages), collective_counts(resolved, stages)
    ranks = resolved.layout.mesh.world_size // resolved.size("pp")
    found = []
    for pp, own_stages in enumerate(stages):
        flops, update = _flops(resolved, pp, less), optimizer_work(resolved)[pp]
        own = update.flops if update is not None else 0
        found.append(
            RankClass(
                pp=pp,
                ranks=ranks,
                memory=evolve(memory[pp], reserve=reserve_of(resolved, memory[pp].total_bytes)),
                traffic=timed(_traffic(calls[pp], resolved.stack.beside), resolved.layout.mesh, cluster),
                flops=flops,
                hardware_flops=flops
                + resolved.batch.accumulate * sum(sum(_beside(resolved, each)) for each in own_stages)
                + own,
                optimizer_flops=own,
                unsaved=0 if resolved.saves_base else memory[pp].parameters - memory[pp].gradients,
                fp8_flops=_of_rank(resolved, _fp8_position(resolved, stages, pp))
                + resolved.batch.accumulate * sum(_again_in_fp8(resolved, each) for each in own_stages),
            )
        )
    return tuple(found)


def _traffic(calls: CollectiveCounts, beside: tuple[str, ...]) -> tuple[Traffic, ...]:
    return tuple(
        Traffic(
            axis=axis,
            op=op,
            node=node,
            count=count,
            bytes=calls.bytes[axis, op, node, hidden],
            # Keys of a ring, messages between stages, and calls of nodes that run while blocks before and after are
            # computed overlap with computation; all others are waited for.
            exposed=not hidden and node not in beside and op not in PASSED,
            meanwhile=calls.meanwhile[axis, op, node, hidden],
        )
        for (axis, op, node, hidden), count in sorted(calls.counts.items())
    )


def _less(resolved: Resolved, stages: list[list[StageCosts]]) -> BackwardLess:
    """Return the FLOPs that backwards save: gradients of frozen matrices, and of everything below all trained
    parameters."""
    if resolved.inventory.trained == resolved.inventory.total:
        return BackwardLess()
    by_layer = {block.layer: block for own in stages for stage in own for block, _ in stage.blocks}
    ends = stages[0][0].ends
    head = (2 * (not ends.learns) + 2 * (not ends.passes)) * resolved.architecture.head_products
    head += 2 * (not ends.passes) * head_factors(resolved.architecture)[0]
    blocks: dict[int, int] = {}
    mixing: set[int] = set()
    for kind in resolved.kinds:
        block = by_layer[kind.first]
        sizes = {name_in_block(name): size for name, size in matmul_sizes(resolved.architecture, kind.first).items()}
        saved = sum(2 * ((name in kind.frozen) + (name not in block.passing)) * size for name, size in sizes.items())
        blocks |= dict.fromkeys(kind.layers, saved)
        mixing |= set() if block.mixes_back else set(kind.layers)
    return BackwardLess(blocks=blocks, head=head, mixing=frozenset(mixing))


def _flops(resolved: Resolved, pp: int, less: BackwardLess) -> int:
    """Return the FLOPs of a step on one rank of a coordinate, without recomputation; its ranks share the work
    evenly."""
    arch = resolved.architecture
    token, sequence = 0, resolved.batch.sequence
    for kind in resolved.kinds:
        count = resolved.matches(kind.layers)[pp]
        for layer in kind.block.layers():
            pairs = pairs_within(sequence, layer.window)
            times = 1 if kind.first in less.mixing else 3
            token += times * (layer.pair_flops(arch) * pairs // sequence + layer.position_flops(arch)) * count
        token += (6 * block_matmul_parameters(arch, kind.first) - less.blocks.get(kind.first, 0)) * count
    if resolved.pipeline.holds_last(pp):
        token += 6 * (arch.head_products + sum(head_factors(arch))) - less.head
    return _of_rank(resolved, token)


def _of_rank(resolved: Resolved, token: int) -> int:
    """Return the FLOPs of a step on one rank of a coordinate from the FLOPs per token there."""
    return token * resolved.batch.tokens_per_step * resolved.size("pp") // resolved.layout.mesh.world_size


def _fp8_position(resolved: Resolved, stages: list[list[StageCosts]], pp: int) -> int:
    """Return the fp8 FLOPs for each position in the blocks of a coordinate: 2 per weight for the output, 2 for the
    input's gradient and, if the recipe says so, 2 for the weight's gradient."""
    fp8, found = resolved.formats.fp8, 0
    if fp8 is None:
        return 0
    by_layer = {block.layer: block for own in stages for stage in own for block, _ in stage.blocks}
    for kind in resolved.kinds:
        sizes = {name_in_block(name): size for name, size in matmul_sizes(resolved.architecture, kind.first).items()}
        passing, count = by_layer[kind.first].passing, resolved.matches(kind.layers)[pp]
        for name in (f"{module}.weight" for module in kind.scaled):
            own = name not in kind.frozen and fp8.chosen.weight_gradient
            found += 2 * (1 + (name in passing) + own) * sizes[name] * count
    return found


def _again_in_fp8(resolved: Resolved, stage: StageCosts) -> int:
    """Return the fp8 FLOPs of a stage for one microbatch outside its forward and backward."""
    found = 0
    for (block, again), count in stage.counts.items():
        second = second_run(block.trace, block.recompute) if again and block.recompute is not None else []
        found += count * sum(op.flops for op in second if op.fp8)
        found += count * refers_in_each_step(resolved.spec) * sum(op.flops for op in block.trace.ops if op.fp8)
    return found


def _works(resolved: Resolved, stages: list[list[StageCosts]]) -> tuple[list[float], list[float], list[StageBackward]]:
    """Return the FLOPs of every stage's forward, of recomputation in its backward, and of the rest of its backward."""
    by_stage = {each.stage: each for own in stages for each in own}
    works, again, backward = [], [], []
    for number in range(len(resolved.pipeline.spans)):
        stage = by_stage[number]
        ops = [op for block, _ in stage.blocks for op in block.trace.ops]
        head = (1 + stage.further) * stage.ends.product if stage.predicts else 0
        works.append(float(sum(op.flops for op in ops) + head + sum(_taught(stage))))
        again.append(float(sum(_again(stage))))
        inputs = sum(op.flops for op in ops if op.receivers) + head * stage.ends.passes
        weights = sum(op.flops for op in ops if op.weights or (op.attends and op.runs_back))
        weights += head * stage.ends.learns
        backward.append(StageBackward(float(inputs), float(weights), stage.splits))
    return works, again, backward


def _work(resolved: Resolved, stages: list[list[StageCosts]], less: BackwardLess) -> Work:
    """Return the FLOPs of the whole model. Recomputation, teacher and reference are counted on all ranks of all
    coordinates."""
    tokens, sequence, work = (
        resolved.batch.tokens_per_step,
        resolved.batch.sequence,
        training_work(resolved.architecture, less),
    )
    turns = resolved.layout.mesh.world_size // resolved.size("pp") * resolved.batch.accumulate
    found = [_beside(resolved, stage) for own in stages for stage in own]
    products, attention = (turns * sum(each) for each in zip(*found, strict=True))
    rows = tokens // sequence
    again = turns * sum(_again_in_fp8(resolved, stage) for own in stages for stage in own)
    return evolve(
        work,
        position_again=products // tokens,
        pair_again=attention // (rows * work.pairs(sequence)),
        position_fp8=sum(_fp8_position(resolved, stages, pp) for pp in range(resolved.size("pp"))),
        position_fp8_again=again // tokens,
    )


def _again(stage: StageCosts) -> tuple[int, int]:
    """Return the FLOPs of forwards that the backward of one microbatch recomputes: of products, of attention."""
    products, attention = stage.ends.again if stage.predicts else 0, 0
    for (block, again), count in stage.counts.items():
        in_pieces = (op for op in block.trace.ops if op.piece is not None and op.runs_back)
        products += count * sum(op.flops for op in in_pieces)
        if again and block.recompute is not None:
            found = second_run(block.trace, block.recompute)
            attention += count * sum(op.flops for op in found if op.attends)
            products += count * sum(op.flops for op in found if not op.attends)
    return products, attention


def _taught(stage: StageCosts) -> tuple[int, int]:
    """Return the FLOPs of the teacher's forward of one microbatch, head included: of products, of attention."""
    teacher = stage.teacher if stage.predicts else None
    return (0, 0) if teacher is None else _forward(teacher, predicts=True)


def _forward(stage: StageCosts, *, predicts: bool) -> tuple[int, int]:
    ops = [op for block, _ in stage.blocks for op in block.trace.ops]
    attention = sum(op.flops for op in ops if op.attends)
    return sum(op.flops for op in ops) - attention + predicts * stage.ends.product, attention


def _beside(resolved: Resolved, stage: StageCosts) -> tuple[int, int]:
    """Return the FLOPs of a stage for one microbatch outside its forward and backward: of products, of attention."""
    # The forward of the loss's reference, if each step has one.
    referred = _forward(stage, predicts=stage.predicts) if refers_in_each_step(resolved.spec) else (0, 0)
    products, attention = zip(_again(stage), _taught(stage), referred, strict=True)
    return sum(products), sum(attention)


# memory that no tensor has -------------------------------------------------------------------------------------------

# Memory of libraries, and memory that the allocator cannot use.


CONTEXT: Final = 2**29 + 2**28  # CUDA's context and the workspaces of cuBLAS
COMMUNICATOR: Final = 2**28  # NCCL's buffers for one group of ranks
FRAGMENTED: Final = 0.04  # share of the peak lost in blocks that are too small or in the wrong place


def reserve_of(resolved: Resolved, peak: int) -> int:
    """Return the bytes on a CUDA device in addition to the `peak` of tensors; 0 if the device is unknown or not
    CUDA."""
    if device_kind(resolved.spec) != "cuda":
        return 0
    axes = resolved.wide("pp", "replicate", "fsdp", "ring", "ulysses", "tp")
    groups = len(axes) + (len(axes) > 1)  # and one of all ranks
    if resolved.architecture.is_moe:
        groups += len(resolved.wide("ep_replicate", "ep_fsdp", "ep"))
    return CONTEXT + groups * COMMUNICATOR + int(FRAGMENTED * peak)
