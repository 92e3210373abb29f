"""The part of the page about ranks: axes of the mesh, the grid of ranks, memory by pipeline coordinate."""

from itertools import groupby

from .plan import Axis, Mesh, Plan, RankClass
from .text import Page
from .units import bytes_text, plural

MEANING = {
    "pp": "pipeline of stages",
    "replicate": "copies of the model, other rows",
    "fsdp": "parameters sharded, other rows",
    "ring": "sequence sharded, keys and values go round",
    "ulysses": "sequence exchanged for heads",
    "tp": "matrices split",
    "ep_fsdp": "experts sharded",
    "ep": "experts spread",
}
LARGEST_GRID = 64
GRID_COLUMNS = 8


def show_mesh(page: Page, plan: Plan) -> None:
    """Every axis with more than one rank; where a small world fits on the page, every rank too."""
    mesh = plan.mesh
    nodes = -(-mesh.world_size // mesh.ranks_per_node)
    spread = f", {mesh.ranks_per_node} on each of {nodes:,} nodes" if nodes > 1 else " on one node"
    page.heading("MESH", f"{plural(mesh.world_size, 'rank')}{spread}")
    wide = [axis for axis in mesh.axes if axis.size > 1]
    if not wide:
        page.line("  one rank: nothing is sharded, nothing is sent")
        return
    experts = [axis for axis in mesh.expert_axes if axis.size > 1 and axis.name in ("ep", "ep_fsdp")]
    rows = [("axis", "size", "apart", "where", "what")]
    rows += [_axis(axis) for axis in [*wide, *(experts if plan.architecture.is_moe else [])]]
    page.table(rows, align="<>>", styles=("cyan", "", "", "", "dim"))
    if mesh.world_size <= LARGEST_GRID:
        _grid(page, mesh, wide)


def _axis(axis: Axis) -> tuple[str, str, str, str, str]:
    where = "crosses nodes" if axis.crosses_nodes else "within a node"
    return (axis.name, f"{axis.size:,}", f"{axis.stride:,}", where, MEANING.get(axis.name, ""))


def _grid(page: Page, mesh: Mesh, wide: list[Axis]) -> None:
    """Ranks in rows of eight, each as its coordinates on the wide axes; a bar where a node starts."""
    if len(wide) == 1:
        page.line(f"  rank r is {wide[0].name} r", "dim")
        return
    page.line(f"  each rank as {'.'.join(axis.name for axis in wide)}", "dim")
    places = [".".join(str(rank // a.stride % a.size) for a in wide) for rank in range(mesh.world_size)]
    width = max(map(len, places))
    for first in range(0, mesh.world_size, GRID_COLUMNS):
        text = ""
        for rank in range(first, min(first + GRID_COLUMNS, mesh.world_size)):
            node_starts = rank > 0 and rank % mesh.ranks_per_node == 0
            text += ("| " if node_starts else "  ") + places[rank].ljust(width) + " "
        page.line(f"  {first:>4} {text}".rstrip())


def show_memory(page: Page, plan: Plan) -> None:
    """Model states of the largest rank of every pipeline coordinate; neighbours with equal sizes share a line."""
    classes = plan.estimates.classes
    offloaded = any(node.args.get("offload") for node in plan.nodes)
    host = ", in host memory" if offloaded else ""
    page.heading("MEMORY", f"model states of a rank{host}; activations not estimated")
    rows: list[tuple[str, ...]] = [("ranks", "parameters", "gradients", "optimizer", "total")]

    def sizes(one: RankClass) -> tuple[int, int, int]:
        return (one.memory.parameters, one.memory.gradients, one.memory.optimizer)

    for _, group in groupby(classes, key=sizes):
        members = list(group)
        first, last = members[0], members[-1]
        name = "every rank" if len(members) == len(classes) else f"pp {first.pp}"
        if 1 < len(members) < len(classes):
            name = f"pp {first.pp} to {last.pp}"
        shown = [bytes_text(part) for part in (*sizes(first), first.memory.states)]
        rows.append((name, *shown))
    page.table(rows, align="<>>>>")
