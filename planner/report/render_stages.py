"""The part of the page about a pipeline: which layers each stage has, on which ranks, how evenly work is spread."""

from bisect import bisect_left, bisect_right
from itertools import groupby

from xtrain.planner.architecture import block_parameters
from xtrain.planner.mesh.stages import Pipeline
from xtrain.planner.plan import Plan
from xtrain.planner.report.text import Detail, Page
from xtrain.planner.units import count_text, plural

MOST_STAGES = 8


def show_stages(page: Page, plan: Plan, detail: Detail) -> None:
    """Of a pipeline: which layers each stage has, on which ranks, and how evenly the work is spread."""
    if plan.mesh.size("pp") == 1:
        return
    args, pipeline = plan.node("setup.parallel.pp").args, pipeline_in(plan)
    page.heading("STAGES", f"{plural(len(pipeline.spans), 'stage')}, {args['schedule']}; {_imbalance(plan)}")
    each = plan.mesh.world_size // plan.mesh.size("pp")
    rows: list[tuple[str, ...]] = []
    for _, group in groupby(range(len(pipeline.spans)), key=lambda stage: _shape(plan, pipeline, stage)):
        rows.append(_stages(plan, pipeline, list(group), each, detail))
    most = detail.most(MOST_STAGES)
    page.table([("stage", "pp", "layers", "parameters", "holds"), *rows[:most]], align="<<<>")
    page.more(len(rows) - most, "stages")
    last = pipeline.owner(len(pipeline.spans) - 1)
    page.line(f"  the loss is computed on pp {last}, summed over all ranks, and recorded by rank 0", "dim")


def pipeline_in(plan: Plan) -> Pipeline:
    """The stages that the model of a plan is built in."""
    args = plan.node("setup.build_model").args
    return Pipeline(
        spans=tuple((first, last) for first, last in args["stages"]), owners=tuple(map(tuple, args["owners"]))
    )


def _shape(plan: Plan, pipeline: Pipeline, stage: int) -> tuple[int, int, bool, bool]:
    """What a stage shares with its neighbours if they can stand in one line."""
    first, last = span = pipeline.spans[stage]
    return (last - first, _blocks_size(plan, span), stage == 0, stage == len(pipeline.spans) - 1)


def _stages(plan: Plan, pipeline: Pipeline, stages: list[int], ranks: int, detail: Detail) -> tuple[str, ...]:
    spans = [pipeline.spans[stage] for stage in stages]
    count = spans[0][1] - spans[0][0] + 1
    owners = [pipeline.owner(stage) for stage in stages]
    layers = f"{spans[0][0]} to {spans[-1][1]}" if spans[0][0] != spans[-1][1] else f"{spans[0][0]}"
    ends = _ends(plan, pipeline, stages[0])
    holds = [plural(count, "layer") + (" each" if len(stages) > 1 else ""), *(names for names, _ in ends)]
    size = _blocks_size(plan, spans[0]) + sum(size for _, size in ends)
    return (_span(stages), _owners(owners, ranks), layers, count_text(size), ", ".join(holds))


def _span(numbers: list[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _owners(owners: list[int], ranks: int) -> str:
    owners = owners if len(set(owners)) > 1 else owners[:1]
    if len(owners) > 1:
        shown = [_span(run) for run in _runs(owners)]
        return ", ".join(shown[:3]) + (", …" if len(shown) > 3 else "")
    first = owners[0] * ranks
    return f"{owners[0]} (rank{f's {first:,} to {first + ranks - 1:,}' if ranks > 1 else f' {first:,}'})"


def _runs(numbers: list[int]) -> list[list[int]]:
    """Neighbours that follow each other by one."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def _ends(plan: Plan, pipeline: Pipeline, stage: int) -> list[tuple[str, int]]:
    """The parts of the model besides blocks that a stage has, with their sizes."""
    arch = plan.architecture
    sizes = {tensor.name: tensor.size for tensor in plan.parameters.tensors}
    found = []
    if stage == 0:
        found.append(("embedding", sizes["embed_tokens.weight"]))
    if stage == len(pipeline.spans) - 1:
        found.append(("last norm", sizes["norm.weight"]))
        if not arch.tie_embeddings:
            found.append(("head", sizes[f"{arch.head_module}.weight"]))
            if arch.embeds_behind and stage > 0:
                found.append(("a copy of the embedding", sizes["embed_tokens.weight"]))
        elif stage > 0 and not pipeline.holds_first(pipeline.owner(stage)):
            found.append(("head, a copy of the embedding", sizes["embed_tokens.weight"]))
        else:
            found.append(("head, tied", 0))
    return found


def _blocks_size(plan: Plan, span: tuple[int, int]) -> int:
    """Parameters of the blocks of a stage, whole."""
    found = 0
    for kind in plan.architecture.kinds:
        count = bisect_right(kind.layers, span[1]) - bisect_left(kind.layers, span[0])
        found += count * sum(tensor.size for tensor in block_parameters(plan.architecture, kind.first))
    return found


def _imbalance(plan: Plan) -> str:
    """How much more than the mean the fullest coordinate computes: what the others wait for."""
    work = [one.flops for one in plan.estimates.classes]
    most = max(work)
    more = most * len(work) / sum(work) - 1
    if more < 0.005:
        return "every stage computes the same"
    return f"pp {work.index(most)} computes {more:.0%} more than the mean"
