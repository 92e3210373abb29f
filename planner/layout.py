"""`parallel` and `launch` of a spec → `Layout`: the mesh, the machines under it, and why."""

from math import lcm, prod

from attrs import field, frozen

from ..dsl.schema.setting import Auto
from ..dsl.spec import Spec
from .context import split_context
from .findings import Findings
from .mesh import AXES, build_mesh, largest_divisor
from .plan import Mesh
from .units import plural


@frozen(kw_only=True)
class Layout:
    """A mesh, the machines under it, and for every size that was derived the reason (by path in the spec)."""

    mesh: Mesh
    nodes: int
    ep: int
    reasons: dict[str, str] = field(factory=dict)

    def size(self, axis: str) -> int:
        return self.mesh.size(axis)

    @property
    def cp(self) -> int:
        return self.size("ring") * self.size("ulysses")


def lay_out(spec: Spec, world: int | None, *, heads: int, kv_heads: int, found: Findings) -> Layout | None:
    """Resolve `parallel` and `launch` for `world` ranks; None if no mesh fits, with the reason in `found`.

    `world` None: the ranks `launch` names, else as many as the axes need.
    """
    reasons: dict[str, str] = {}
    sizes = _fixed_sizes(spec, heads, kv_heads, reasons, found)
    if sizes is None:
        return None
    total = _solve_fsdp(spec, sizes, world, reasons, found)
    if total is None:
        return None
    placed = _machines(spec, total, world is not None, reasons, found)
    if placed is None:
        return None
    nodes, ranks_per_node = placed
    group = prod(sizes[axis] for axis in ("fsdp", "ring", "ulysses", "tp"))
    ep = spec.parallel.ep.size
    if group % ep:
        found.fail(
            "mesh.ep",
            "X407",
            "parallel.ep",
            f"ep {ep} does not divide fsdp · ring · ulysses · tp = {group}",
            f"use a divisor of {group}, such as ep {largest_divisor(group, ep)}",
        )
        ep = 1
    elif ep > 1:
        found.passed("mesh.ep", f"ep {ep} divides fsdp · ring · ulysses · tp = {group}")
    mesh = build_mesh(sizes, ep=ep, ranks_per_node=ranks_per_node)
    return Layout(mesh=mesh, nodes=nodes, ep=ep, reasons=reasons)


def _fixed_sizes(
    spec: Spec, heads: int, kv_heads: int, reasons: dict[str, str], found: Findings
) -> dict[str, int] | None:
    """Every axis but a free fsdp (left out)."""
    parallel = spec.parallel
    stated = {
        "pp": parallel.pp.size,
        "replicate": parallel.fsdp.replicate,
        "fsdp": parallel.fsdp.size,
        "cp": parallel.cp.size,
        "tp": parallel.tp.size,
    }
    free = [axis for axis, size in stated.items() if isinstance(size, Auto)]
    if free not in ([], ["fsdp"]):
        other = next(axis for axis in free if axis != "fsdp")
        message = f"`auto` on {' and '.join(free)}: one axis can take what the world leaves over, and that is fsdp"
        found.fail("mesh.auto", "X410", f"parallel.{other}", message, f"give {other} a number, such as `{other} 2`")
        return None
    sizes = {axis: size for axis, size in stated.items() if isinstance(size, int) and axis != "cp"}
    split = split_context(parallel.cp, max(heads // sizes["tp"], 1), max(kv_heads // sizes["tp"], 1), reasons, found)
    if split is None:
        return None
    sizes["ring"], sizes["ulysses"] = split
    return sizes


def _solve_fsdp(
    spec: Spec, sizes: dict[str, int], world: int | None, reasons: dict[str, str], found: Findings
) -> int | None:
    """Complete `sizes` with fsdp if it is free; the number of ranks, or None if the axes cannot give it."""
    launch = spec.launch
    if world is None and isinstance(launch.ranks_per_node, int):
        world, asked = launch.nodes * launch.ranks_per_node, "launch.nodes · ranks_per_node"
        reasons["world_size"] = f"launch.nodes {launch.nodes} · ranks_per_node {launch.ranks_per_node}"
    elif world is not None:
        asked = "--world"
        reasons["world_size"] = f"--world {world}"
    else:
        asked = ""
    fixed = prod(sizes.values())
    product = " · ".join(f"{axis} {sizes[axis]}" for axis in AXES if sizes.get(axis, 1) > 1) or "1"
    if "fsdp" not in sizes:
        if world is None:
            world = lcm(fixed, launch.nodes)
            reasons["world_size"] = f"what the axes need: {product}"
            if world > fixed:
                reasons["world_size"] = f"what the axes need, {product}, spread evenly over {launch.nodes} nodes"
        if world % fixed or world < fixed:
            near = sorted({max(world // fixed, 1) * fixed, (world // fixed + 1) * fixed})
            options = " or ".join(f"{count}" for count in near)
            message = f"the other axes need a multiple of {product} = {fixed} ranks, but {asked} is {world}"
            found.fail("mesh.world", "X401", "parallel", message, f"use {options} ranks, or change an axis")
            return None
        sizes["fsdp"] = world // fixed
        reasons["parallel.fsdp"] = f"{world} ranks / ({product})"
    elif world is None:
        world = fixed
        reasons["world_size"] = f"the product of the axes: {product}"
    elif fixed != world:
        rest = fixed // sizes["fsdp"]
        hint = f"use {fixed} ranks, or write `fsdp auto`"
        if world % rest == 0:
            hint = f"use {fixed} ranks, or write `fsdp {world // rest}`"
        found.fail(
            "mesh.world", "X401", "parallel", f"the axes give {product} = {fixed} ranks, but {asked} is {world}", hint
        )
        return None
    shown = " · ".join(f"{axis} {sizes[axis]}" for axis in AXES if sizes[axis] > 1) or "all axes 1"
    found.passed("mesh.world", f"{shown} = {plural(world, 'rank')}")
    return world


def _machines(
    spec: Spec, world: int, overridden: bool, reasons: dict[str, str], found: Findings
) -> tuple[int, int] | None:
    """(nodes, ranks per node). With `--world`, ranks per node stay and the number of machines follows."""
    nodes, per_node = spec.launch.nodes, spec.launch.ranks_per_node
    if isinstance(per_node, int):
        if overridden and world != nodes * per_node:
            per_node = min(per_node, world)
            nodes = world // per_node
            reasons["launch.nodes"] = f"{world} ranks / {per_node} a node"
        if nodes * per_node != world:
            near = max(world // per_node, 1) * per_node
            message = f"{world} ranks do not fill machines of {per_node} ranks"
            found.fail("mesh.nodes", "X401", "launch.ranks_per_node", message, f"use {near} or {near + per_node} ranks")
            return None
    elif world % nodes:
        message = f"{world} ranks cannot be spread evenly over {nodes} nodes"
        hint = f"use {largest_divisor(world, nodes)} nodes, or a multiple of {nodes} ranks"
        found.fail("mesh.nodes", "X401", "launch.nodes", message, hint)
        return None
    else:
        per_node = world // nodes
        reasons["launch.ranks_per_node"] = f"{world} ranks / {plural(nodes, 'node')}"
    found.passed("mesh.nodes", f"{world} = {plural(nodes, 'node')} · {plural(per_node, 'rank')}")
    return nodes, per_node
