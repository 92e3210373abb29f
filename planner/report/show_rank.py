"""`xtrain plan --rank N`: everything a plan says of one rank."""

from math import prod

from xtrain.planner.mesh.placement import local_shapes
from xtrain.planner.plan import Axis, Plan, RankClass
from xtrain.planner.report.render_memory import CATEGORIES
from xtrain.planner.report.render_mesh import MEANING, crosses_nodes, link_text
from xtrain.planner.report.render_stages import pipeline_in
from xtrain.planner.report.render_traffic import axis_text, gather
from xtrain.planner.report.text import Page
from xtrain.planner.units import BYTES, bytes_text, count_text, plural, seconds_text

EXAMPLES = 4


class NoSuchRank(Exception):
    """The world of the plan has no such rank."""


def show_rank(plan: Plan, rank: int, *, color: bool = False) -> str:
    """A page about a rank: where it stands and with whom, what it holds, sends and reads. Raises NoSuchRank."""
    world = plan.mesh.world_size
    if not 0 <= rank < world:
        message = f"there is no rank {rank:,}: the plan has {plural(world, 'rank')}, 0 to {world - 1:,}"
        raise NoSuchRank(message)
    page = Page(color=color)
    per_node = plan.mesh.ranks_per_node
    title = f"rank {rank:,} of {world:,}: node {rank // per_node:,}, its device {rank % per_node}"
    page.line(title, "bold")
    page.line(f"{plan.name} · plan {plan.id}", "dim")
    _place(page, plan, rank)
    _stages(page, plan, rank)
    _parameters(page, plan, rank)
    one = plan.estimates.classes[plan.mesh.coordinates(rank)["pp"]]
    _memory(page, plan, one)
    _traffic(page, plan, one)
    _rows(page, plan, rank)
    return str(page)


def members(axis: Axis, rank: int) -> list[int]:
    """The ranks of the group along an axis that `rank` is in, in the order of their coordinates."""
    first = rank - rank // axis.stride % axis.size * axis.stride
    return [first + index * axis.stride for index in range(axis.size)]


def _place(page: Page, plan: Plan, rank: int) -> None:
    """Coordinates and the group along every axis that has more than one rank."""
    mesh = plan.mesh
    page.heading("PLACE", "coordinate on every axis, and the ranks of its group")
    axes = list(mesh.axes)
    if plan.architecture.is_moe:
        axes += [axis for axis in mesh.expert_axes if axis.name != "pp"]
    wide = [axis for axis in axes if axis.size > 1]
    rows = [("axis", "at", "of", "group", "over", "what")] if wide else []
    for axis in wide:
        over = link_text(axis.crosses_nodes, plan.cluster)
        group, at = _group_text(members(axis, rank)), rank // axis.stride % axis.size
        rows.append((axis.name, f"{at:,}", f"{axis.size:,}", group, over, MEANING.get(axis.name, "")))
    page.table(rows, align="<>>", styles=("cyan", "", "", "", "", "dim"))
    if alone := [axis.name for axis in axes if axis.size == 1]:
        page.line(f"  at 0, alone, on {', '.join(alone)}", "dim")


def _group_text(ranks: list[int]) -> str:
    """`136, 137 … 143`: all of a few, else the first and the last."""
    if len(ranks) <= 4:
        return ", ".join(f"{rank:,}" for rank in ranks)
    return f"{ranks[0]:,}, {ranks[1]:,} … {ranks[-1]:,}"


def _stages(page: Page, plan: Plan, rank: int) -> None:
    pp, pipeline = plan.mesh.coordinates(rank)["pp"], pipeline_in(plan)
    ends = ["embedding"] if pipeline.holds_first(pp) else []
    ends += ["last norm", "head"] if pipeline.holds_last(pp) else []
    page.heading("LAYERS", f"with {', '.join(ends)}" if ends else "blocks alone")
    for stage in pipeline.owners[pp]:
        first, last = pipeline.spans[stage]
        layers = f"layers {first} to {last}" if last > first else f"layer {first}"
        page.line(f"  stage {stage} of {len(pipeline.spans)}: {layers}, {plural(last - first + 1, 'block')}")


def _parameters(page: Page, plan: Plan, rank: int) -> None:
    """What the rank owns, and some tensors whole and as it has them."""
    width = BYTES[plan.node("setup.build_model").args["params"]]
    local = local_shapes(plan, rank)
    whole = {tensor.name: tensor.shape for tensor in plan.parameters.tensors}
    elements = sum(map(prod, local.values()))
    amount = f"{elements:,} in {plural(len(local), 'tensor')}, {bytes_text(elements * width)} of {_total(plan, width)}"
    page.heading("PARAMETERS", amount)
    names = sorted(local, key=lambda name: -prod(whole[name]))
    kinds: dict[str, str] = {}  # one of each kind, the largest first: layers are alike
    for name in names:
        kinds.setdefault(".".join(part for part in name.split(".") if not part.isdecimal()), name)
    rows = [("tensor", "whole", "here")]
    for name in sorted(list(kinds.values())[: EXAMPLES + 2], key=names.index):
        here = _shape(local[name]) if prod(local[name]) else f"{_shape(local[name])}: nothing"
        rows.append((name, _shape(whole[name]), here))
    page.table(rows, styles=("", "dim"))
    if len(local) > len(rows) - 1:
        page.line(f"  and {len(local) - len(rows) + 1:,} more", "dim")


def _total(plan: Plan, width: int) -> str:
    return f"{bytes_text(plan.parameters.total * width)} ({count_text(plan.parameters.total)})"


def _shape(shape: tuple[int, ...]) -> str:
    return " · ".join(map(str, shape))


def _memory(page: Page, plan: Plan, one: RankClass) -> None:
    device = plan.cluster.memory_bytes
    of = "" if device is None else f" of {bytes_text(device)} ({one.memory.total_bytes / device:.0%})"
    host = "; parameters, gradients and optimizer in host memory" if one.memory.offloaded else ""
    ranks = f"the {plural(one.ranks, 'rank')} of pp {one.pp}"
    total = f"{bytes_text(one.memory.total_bytes)}{of} at the peak of a step, the most of {ranks}{host}"
    page.heading("MEMORY", total)
    parts = [(name, bytes_text(getattr(one.memory, name))) for name in CATEGORIES if getattr(one.memory, name)]
    page.wrapped(" · ".join(f"{name} {size}" for name, size in parts))


def _traffic(page: Page, plan: Plan, one: RankClass) -> None:
    if plan.mesh.world_size == 1:
        return
    sent = gather(one.traffic)
    known = "" if sent else "not estimated"
    page.heading("COMMUNICATION", known or f"{bytes_text(sum(each.bytes for each in sent))} a step")
    rows = [
        (
            axis_text(plan.mesh, each.axis),
            each.op,
            f"{each.count:,} calls",
            bytes_text(each.bytes),
            "time unknown" if each.seconds is None else seconds_text(each.seconds),
            "exposed" if each.exposed else "overlapped",
            "network" if crosses_nodes(plan.mesh, each.axis) else "link",
        )
        for each in sent
    ]
    page.table(rows, align="<<>>>", styles=("cyan",))


def _rows(page: Page, plan: Plan, rank: int) -> None:
    """Which rows of a step it reads, by their place in the order that the seed gives them; of a server, which of the
    texts of a request."""
    if plan.serves:
        data_rank, ranks = plan.mesh.data_rank(rank), plan.mesh.data_ranks
        page.heading("DATA", f"data rank {data_rank:,} of {ranks:,}")
        page.wrapped(
            f"of the texts of a request, one of {ranks:,} even parts" if ranks > 1 else "all texts of a request"
        )
        return
    loader, mesh = plan.node("setup.loader").args, plan.mesh
    micro, accumulate, data_rank = loader["micro"], loader["accumulate"], mesh.data_rank(rank)
    place = mesh.coordinates(rank)
    page.heading("DATA", f"data rank {data_rank:,} of {mesh.data_ranks:,}")
    if place["pp"] not in plan.node("step.fetch").args["readers"]:
        page.line("  reads no rows: its stages have neither inputs nor labels")
        return
    each = micro * mesh.data_ranks
    first = data_rank * micro
    rows = f"{first:,} to {first + micro - 1:,}" if micro > 1 else f"{first:,}"
    text = f"of the {loader['rows']:,} rows of a step, {rows} in the first microbatch"
    if accumulate > 1:
        others = "the other" if accumulate == 2 else f"each of the {accumulate - 1} others"
        text += f", then {each:,} further on in {others}"
    page.wrapped(text)
    parts = mesh.size("ring") * mesh.size("ulysses")
    if parts > 1:
        page.line(f"  of each row {loader['sequence'] // parts:,} of {loader['sequence']:,} positions")
    sharers = [axis.name for axis in mesh.axes if axis.name in ("ring", "ulysses", "tp") and axis.size > 1]
    if sharers:
        page.line(f"  the same rows as its neighbours along {', '.join(sharers)}")
