"""The part of the page about ranks: axes and the links they use, the grid of ranks."""

from xtrain.planner.plan import Axis, Hardware, Mesh, Plan
from xtrain.planner.report.text import Detail, Page
from xtrain.planner.units import WIDTH, plural, rate_text

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
LARGEST_GRID = 64  # ranks of a world that is shown whole
GRID_COLUMNS = 8
GRID_LINES = 8


def show_mesh(page: Page, plan: Plan, detail: Detail) -> None:
    """Every axis with more than one rank, and the ranks: all of a small world, else those of the first two nodes."""
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
    """`apart`: between the rank numbers of neighbours. `groups`: how many there are, of `size` ranks each."""
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
    """What the messages of an axis travel over: `network 50 GB/s`, or `link` inside a machine."""
    speed = cluster.network if crosses else cluster.link
    return ("network" if crosses else "link") + (f" {rate_text(speed, 'B/s')}" if speed else "")


def crosses_nodes(mesh: Mesh, axis: str) -> bool:
    """Whether messages over an axis, or over several joined by ` · `, leave a machine."""
    names = axis.split(" · ")
    return any(each.crosses_nodes for each in (*mesh.axes, *mesh.expert_axes) if each.name in names)


def _grid(page: Page, plan: Plan, wide: list[Axis], detail: Detail) -> None:
    """Ranks in rows, each as its coordinates on the wide axes; a bar where a node starts."""
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
