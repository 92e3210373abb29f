"""Parts of the page about axes and ranks, pipeline stages, and the order of set-up and step."""

from bisect import bisect_left, bisect_right
from itertools import groupby

from xtrain.dsl.schema.run import OP as TRACKER
from xtrain.plan.architecture import block_parameters
from xtrain.plan.estimates import Hardware
from xtrain.plan.pipeline import Pipeline
from xtrain.plan.plan import Axis, Mesh, Node, Plan
from xtrain.text.page import Detail, Page
from xtrain.text.units import WIDTH, consecutive, count_text, plural, rate_text

MEANING = {
    "pp": "pipeline of stages",
    "replicate": "replicas of the model, different rows",
    "fsdp": "parameters sharded, different rows",
    "ring": "sequence sharded, keys and values passed around",
    "ulysses": "sequence exchanged for heads",
    "tp": "matrices split",
    "ep_fsdp": "experts sharded",
    "ep": "experts spread",
}
LARGEST_GRID = 64  # ranks of the largest world shown whole
GRID_COLUMNS = 8
GRID_LINES = 8


def show_mesh(page: Page, plan: Plan, detail: Detail) -> None:
    """Show every axis with several ranks, and the ranks: all of a small world, otherwise the ranks of the first two
    nodes."""
    mesh = plan.mesh
    nodes = -(-mesh.world_size // mesh.ranks_per_node)
    spread = f", {mesh.ranks_per_node} on each of {nodes:,} nodes" if nodes > 1 else " on one node"
    page.heading("MESH", f"{plural(mesh.world_size, 'rank')}{spread}")
    wide = [axis for axis in mesh.axes if axis.size > 1]
    if not wide:
        page.line("  one rank: nothing is sharded, nothing is sent")
        return
    experts = [axis for axis in mesh.expert_axes if axis.size > 1 and axis.name in ("ep", "ep_fsdp")]
    rows = [("axis", "size", "apart", "groups", "over", "what")]
    shown = [*wide, *(experts if plan.architecture.is_moe else [])]
    rows += [_axis(axis, mesh.world_size, plan.cluster) for axis in shown]
    page.table(rows, align="<>>>", styles=("cyan", "", "", "", "", "dim"))
    _grid(page, plan, wide, detail)


def _axis(axis: Axis, world: int, cluster: Hardware) -> tuple[str, ...]:
    """Return the cells of an axis: name, size, distance between neighboring ranks, number of groups, link and
    meaning."""
    over = link_text(axis.crosses_nodes, cluster)
    return (
        axis.name,
        f"{axis.size:,}",
        f"{axis.stride:,}",
        f"{world // axis.size:,}",
        over,
        MEANING.get(axis.name, ""),
    )


def link_text(crosses: bool, cluster: Hardware) -> str:
    """Return the link that an axis uses as text: `network 50 GB/s`, or `link` inside a machine."""
    speed = cluster.network if crosses else cluster.link
    return ("network" if crosses else "link") + (f" {rate_text(speed, 'B/s')}" if speed else "")


def crosses_nodes(mesh: Mesh, axis: str) -> bool:
    """Return True if messages over an axis, or over several joined by ` · `, leave a machine."""
    names = axis.split(" · ")
    return any(each.crosses_nodes for each in (*mesh.axes, *mesh.expert_axes) if each.name in names)


def _grid(page: Page, plan: Plan, wide: list[Axis], detail: Detail) -> None:
    """Show ranks in rows by their coordinates on the wide axes; a bar marks the start of a node."""
    mesh = plan.mesh
    if len(wide) == 1:
        page.line(f"  rank r is {wide[0].name} r", "dim")
        return
    shown = mesh.world_size
    if shown > LARGEST_GRID:
        shown = min(2 * mesh.ranks_per_node, LARGEST_GRID)
    places = [".".join(str(rank // axis.stride % axis.size) for axis in wide) for rank in range(shown)]
    width = max(map(len, places))
    columns = GRID_COLUMNS
    while columns > 1 and columns * (width + 3) > WIDTH - 7:
        columns //= 2
    lines = detail.most(GRID_LINES)
    shown = min(shown, columns * lines)
    which = "each rank" if shown == mesh.world_size else f"ranks 0 to {shown - 1}"
    page.line(f"  {which} as {'.'.join(axis.name for axis in wide)}; | a node starts", "dim")
    for first in range(0, shown, columns):
        text = ""
        for rank in range(first, min(first + columns, shown)):
            node_starts = rank > 0 and rank % mesh.ranks_per_node == 0
            text += ("| " if node_starts else "  ") + places[rank].ljust(width) + " "
        page.line(f"  {first:>4} {text}".rstrip())


MOST_STAGES = 8


def show_stages(page: Page, plan: Plan, detail: Detail) -> None:
    """Show the pipeline: layers and ranks of each stage, and how evenly the work is spread."""
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
    """Return the pipeline that the model of a plan is built in."""
    args = plan.node("setup.build_model").args
    return Pipeline(
        spans=tuple((first, last) for first, last in args["stages"]), owners=tuple(map(tuple, args["owners"]))
    )


def _shape(plan: Plan, pipeline: Pipeline, stage: int) -> tuple[int, int, bool, bool]:
    """Return the properties that neighboring stages must share to be shown in one line."""
    first, last = span = pipeline.spans[stage]
    return (last - first, _blocks_size(plan, span), stage == 0, stage == len(pipeline.spans) - 1)


def _stages(plan: Plan, pipeline: Pipeline, stages: list[int], ranks: int, detail: Detail) -> tuple[str, ...]:
    spans = [pipeline.spans[stage] for stage in stages]
    count = spans[0][1] - spans[0][0] + 1
    owners = [pipeline.owner(stage) for stage in stages]
    layers = _span((spans[0][0], spans[-1][1]))
    ends = _ends(plan, pipeline, stages[0])
    holds = [plural(count, "layer") + (" each" if len(stages) > 1 else ""), *(names for names, _ in ends)]
    size = _blocks_size(plan, spans[0]) + sum(size for _, size in ends)
    return (_span((stages[0], stages[-1])), _owners(owners, ranks), layers, count_text(size), ", ".join(holds))


def _span(ends: tuple[int, int]) -> str:
    first, last = ends
    return f"{first}" if first == last else f"{first} to {last}"


def _owners(owners: list[int], ranks: int) -> str:
    owners = owners if len(set(owners)) > 1 else owners[:1]
    if len(owners) > 1:
        shown = [_span(run) for run in consecutive(owners)]
        return ", ".join(shown[:3]) + (", …" if len(shown) > 3 else "")
    first = owners[0] * ranks
    return f"{owners[0]} (rank{f's {first:,} to {first + ranks - 1:,}' if ranks > 1 else f' {first:,}'})"


def _ends(plan: Plan, pipeline: Pipeline, stage: int) -> list[tuple[str, int]]:
    """Return the parts of the model outside blocks in a stage, with their sizes."""
    arch = plan.architecture
    sizes = {tensor.name: tensor.size for tensor in plan.parameters.tensors}
    found = []
    if stage == 0:
        found.append(("embedding", sizes["embed_tokens.weight"]))
    before = arch.ends.before
    if stage == 0 and before:
        found.append(("modules before the blocks", sum(sizes[name] for name in before)))
    if stage == len(pipeline.spans) - 1:
        behind = [sizes[name] for name, _ in arch.other_ends if name not in before]
        found += [("last norm", sum(behind))] if behind else []
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
    """Return the number of parameters in the blocks of a stage, unsharded."""
    found = 0
    for kind in plan.architecture.kinds:
        count = bisect_right(kind.layers, span[1]) - bisect_left(kind.layers, span[0])
        found += count * sum(tensor.size for tensor in block_parameters(plan.architecture, kind.first))
    return found


def _imbalance(plan: Plan) -> str:
    """Return text on how much more than the mean the busiest coordinate computes; the others wait for it."""
    work = [one.flops for one in plan.estimates.classes]
    most = max(work)
    more = most * len(work) / sum(work) - 1
    if more < 0.005:
        return "every stage computes the same"
    return f"pp {work.index(most)} computes {more:.0%} more than the mean"


# Nodes that change nothing in the model; other parts of the page cover them.
ELSEWHERE = ("setup.bootstrap", "setup.mesh", "setup.tokenizer", "setup.data", "setup.loader", "setup.scheduler")
ELSEWHERE += (
    "setup.watch",
    "setup.observe",
    "setup.alerts",
    "setup.schedule_cache",
    "setup.resume",
    "setup.checkpoint",
)
MOST, SHORT = 14, 5  # rows kept until other tables have shrunk to the same size: every part of an order matters


def show_order(page: Page, plan: Plan, detail: Detail) -> None:
    """Show the nodes that prepare the model, in order, with the number of modules that match each rule.

    In full, every node of the set-up.
    """
    setup = plan.of_kind("setup")
    nodes = [node for node in setup if detail.full or not (node.op in ELSEWHERE or node.op.startswith(TRACKER))]
    page.heading("ORDER", "how the model is built, first to last; modules that each rule applies to")
    rows = []
    for node in nodes:
        found = matches(node)
        count = "" if found is None else plural(found, "module")
        rows.append((node.id.removeprefix("setup."), count, node.does))
    most = detail.most(24) if detail.full or detail.rows < SHORT else max(detail.most(24), MOST)
    left_out = len(rows) - most
    rows = rows[:most]
    names, counts = (max(len(row[column]) for row in rows) for column in (0, 1))
    page.described(
        [(f"{name.ljust(names)}  {count.rjust(counts)}", does) for name, count, does in rows],
        wraps=detail.wraps,
    )
    page.more(left_out, "order")


def matches(node: Node) -> int | None:
    """Return the number of modules on all pipeline coordinates that match the rules of a node; None without rules."""
    counts = [sum(rule["matches"]) for rule in (node.args, *node.args.get("rules", ())) if "matches" in rule]
    return sum(counts) if counts else None


def show_step(page: Page, plan: Plan, detail: Detail) -> None:
    """Show the step in the order in which every rank runs it: one line, or in full the description of each node."""
    nodes = plan.of_kind("step")
    if detail.full:
        page.heading("STEP", f"{plural(len(nodes), 'node')} in this order, on every rank")
        page.described([(f"{number:>2} {node.id}", node.does) for number, node in enumerate(nodes, 1)])
    else:
        page.described([("a step", " → ".join(node.id.removeprefix("step.") for node in nodes))])
