"""What FSDP sends: every unit is gathered before it computes, and its gradients are exchanged once they are summed."""

from collections.abc import Iterator
from functools import lru_cache

from xtrain.planner.architecture import SCORE, ParameterSpec, name_in_block
from xtrain.planner.costs.op_trace import CollectiveCall, FsdpUnit
from xtrain.planner.costs.pipeline_order import PipelineAction, gathered_stages, order
from xtrain.planner.costs.stage_costs import StageCosts
from xtrain.planner.mesh.stages import stage_end_names
from xtrain.planner.model.inventory import block_tensors
from xtrain.planner.resolved import Resolved
from xtrain.planner.units import BYTES

FSDP, ROOT, EXPERTS = "setup.parallel.fsdp", "setup.parallel.root_fsdp", "setup.parallel.expert_fsdp"
SINGLE = ("gpipe", "1f1b")

Times = tuple[CollectiveCall, int]


def gathers_of(run: Resolved, stages: list[StageCosts], pp: int) -> Iterator[Times]:
    """All-gathers of one step, each with how often."""
    for stage in stages:
        root, blocks, forward = _gathers(run, stage, pp)
        units = [(stage.root, _dense_axis(run), ROOT, root)]
        for (block, _), count in stage.counts.items():
            units.append((block.units.dense, _dense_axis(run), FSDP, count * (blocks if block.runs_back else forward)))
            times = blocks if block.experts_run_back else forward
            units.append((block.units.experts, "ep_fsdp", EXPERTS, times * count))
        for unit, axis, node, times in units:
            if unit is not None and unit.shards > 1:
                yield CollectiveCall(axis, "all_gather", node, unit.whole), times


def sums_of(run: Resolved, stages: list[StageCosts]) -> Iterator[Times]:
    """Exchanges of gradients of one step: summed over shards, then over copies of them."""
    times = exchanges(run)
    for stage in stages:
        units = [(stage.root, _dense_axis(run), "replicate", ROOT, 1)]
        for (block, _), count in stage.counts.items():
            units.append((block.units.dense, _dense_axis(run), "replicate", FSDP, count))
            units.append((block.units.experts, "ep_fsdp", "ep_replicate", EXPERTS, count))
        for unit, axis, copies, node, count in units:
            if unit is not None:
                yield from _exchange(unit, axis, copies, node, times * count)
        if run.size("tp") > 1 and run.dense_fsdp:
            width = BYTES[run.formats.compute if times > 1 or _at_once(run) else run.formats.reduce]
            ends = set(stage_end_names(run.architecture, run.pipeline, stage.stage))
            own = [t for t in run.inventory.tensors if t.name in ends]
            blocks = [(block_tensors(run.inventory, block.layer), n) for (block, _), n in stage.counts.items()]
            for tensors, count in ((own, 1), *blocks):
                for tensor in partial(run, tensors):
                    yield CollectiveCall("tp", "all_reduce", "setup.parallel.tp", tensor.size * width), times * count


def exchanges(run: Resolved) -> int:
    """How often a step exchanges gradients."""
    return run.batch.accumulate if run.size("pp") == 1 and run.sync == "microbatch" else 1


def partial(run: Resolved, tensors: list[ParameterSpec]) -> list[ParameterSpec]:
    """Those that are trained and that tensor parallel leaves whole, of whose gradient every rank has a summand only: it
    has used them on its own positions, or on its own heads."""
    whens = ("by_position", "always") if run.spec.parallel.tp.sequence else ("always",)
    arch = run.architecture
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


def _at_once(run: Resolved) -> bool:
    """Gradients are exchanged as they are computed, before they are put into the format of sums."""
    return run.size("pp") == 1 and run.batch.accumulate == 1


def _dense_axis(run: Resolved) -> str:
    return " · ".join(run.wide(*run.shard_axes))


def _gathers(run: Resolved, stage: StageCosts, pp: int) -> tuple[int, int, int]:
    """How often a step gathers the root of a stage, each of its blocks, and each of those that have no backward."""
    count = run.batch.accumulate
    if run.size("pp") == 1:
        return count, count * (2 if run.reshard else 1), count
    key = (run.spec.parallel.pp.schedule, pp, run.size("pp"), run.pipeline.owners[pp], count)
    root, blocks = (_gather_counts(*key, reshards=each)[stage.stage] for each in (False, run.reshard))
    return root, blocks, count if run.reshard else blocks


@lru_cache(maxsize=512)
def _gather_counts(
    schedule: str, pp: int, ranks: int, stages: tuple[int, ...], count: int, *, reshards: bool
) -> dict[int, int]:
    """How often a step gathers a unit of each stage of a rank."""
    actions = order(schedule, pp, ranks, stages, count)
    units = {stage: _Unit(reshards=reshards) for stage in stages}
    for event in actions if schedule in SINGLE else gathered_stages(actions):
        if isinstance(event, PipelineAction):
            units[event.stage].computes(event)
        else:
            units[event[0]].set_gathered(event[1])
    return {stage: unit.gathers for stage, unit in units.items()}


class _Unit:
    """Whether a unit is gathered, and how often it has been."""

    def __init__(self, *, reshards: bool) -> None:
        self.gathers, self._there, self._reshards = 0, False, reshards

    def set_gathered(self, gather: bool) -> None:
        self.gathers += gather and not self._there
        self._there = gather

    def computes(self, action: PipelineAction) -> None:
        self.set_gathered(True)
        if action.kind == "F" and self._reshards:
            self._there = False
