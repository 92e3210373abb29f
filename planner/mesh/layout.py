"""`parallel` and `launch` of a spec → `Layout`: the mesh, the machines under it, and why."""

from math import gcd, lcm, prod

from attrs import field, frozen

from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.planner.findings import Findings
from xtrain.planner.mesh.cluster import check_cluster
from xtrain.planner.mesh.context import split_context
from xtrain.planner.mesh.mesh import AXES, build_mesh, largest_divisor
from xtrain.planner.plan import Mesh
from xtrain.planner.units import plural


@frozen(kw_only=True)
class Layout:
    """A mesh, the machines under it, and for every size that was derived the reason (by path in the spec).

    unsettled: what had to be guessed so that the other rules can be checked: `world`, `cp`. Empty in every plan.
    """

    mesh: Mesh
    nodes: int
    ep: int
    reasons: dict[str, str] = field(factory=dict)
    unsettled: frozenset[str] = frozenset()

    @property
    def expert_group(self) -> int:
        """Ranks over which experts can be spread: those of one copy of a pipeline stage."""
        return prod(self.size(axis) for axis in ("fsdp", "ring", "ulysses", "tp"))

    def size(self, axis: str) -> int:
        return self.mesh.size(axis)


def build_layout(spec: Spec, world: int | None, *, heads: int, kv_heads: int, found: Findings) -> Layout:
    """Resolve `parallel` and `launch` for `world` ranks; if no mesh fits, `found` says why and the layout is unsettled.

    `world` None: the ranks `launch` names, else as many as the axes need.
    """
    reasons: dict[str, str] = {}
    unsettled: set[str] = set()
    sizes = _fixed_sizes(spec, found, unsettled)
    tp = sizes["tp"]
    split = split_context(spec.parallel.cp, max(heads // tp, 1), max(kv_heads // tp, 1), reasons, found)
    if split is None:
        unsettled.add("cp")
    sizes["ring"], sizes["ulysses"] = split or (spec.parallel.cp.size, 1)
    total, placed = None, None
    if not unsettled & {"world"}:
        total = _solve_fsdp(spec, sizes, world, reasons, found)
    if total is not None:
        fills = world is not None or isinstance(spec.launch.ranks_per_node, Auto)
        # Machines that are asked for are all used; those of the cluster as far as they are needed.
        spread = world is None and fills and not isinstance(spec.launch.nodes, Auto)
        placed = _machines(spec, total, fills, spread, reasons, found)
    if total is None or placed is None:
        unsettled.add("world")
        sizes.setdefault("fsdp", 1)
        placed = (1, prod(sizes.values()))
    else:
        check_cluster(spec, *placed, found)
    nodes, ranks_per_node = placed
    ep = _check_ep(spec, sizes, found) if not unsettled else 1
    mesh = build_mesh(sizes, ep=ep, ranks_per_node=ranks_per_node)
    return Layout(mesh=mesh, nodes=nodes, ep=ep, reasons=reasons, unsettled=frozenset(unsettled))


def _fixed_sizes(spec: Spec, found: Findings, unsettled: set[str]) -> dict[str, int]:
    """Every axis but context and a free fsdp, which are left out."""
    parallel = spec.parallel
    stated = {
        "pp": parallel.pp.size,
        "replicate": parallel.execution.replicas(spec) or parallel.fsdp.replicate,
        "fsdp": parallel.fsdp.size,
        "tp": parallel.tp.size,
    }
    free = [axis for axis, size in stated.items() if isinstance(size, Auto)]
    if free not in ([], ["fsdp"]):
        other = next(axis for axis in free if axis != "fsdp")
        message = f"`auto` on {' and '.join(free)}: one axis can take what the world leaves over, and that is fsdp"
        found.fail(
            "mesh.auto", "X410", f"parallel.{other}.size", message, f"give {other} a number, such as `{other} 2`"
        )
        unsettled.add("world")
    sizes = {axis: size for axis, size in stated.items() if isinstance(size, int)}
    return {**{axis: 1 for axis in free if axis != "fsdp"}, **sizes}


def _check_ep(spec: Spec, sizes: dict[str, int], found: Findings) -> int:
    """Ranks over which experts are spread; 1 if what was asked for does not fit."""
    group = prod(sizes[axis] for axis in ("fsdp", "ring", "ulysses", "tp"))
    ep = spec.parallel.ep.size
    if "ep" in spec.parallel.execution.unsupported:
        return 1
    if group % ep:
        message = f"ep {ep} does not divide fsdp · ring · ulysses · tp = {group}"
        fitting = gcd(group, spec.model.experts) or group
        hint = f"use a divisor of {group}, such as ep {largest_divisor(fitting, ep)}"
        found.fail("mesh.ep", "X407", "parallel.ep.size", message, hint)
        return 1
    if ep > 1:
        found.passed("mesh.ep", f"ep {ep} divides fsdp · ring · ulysses · tp = {group}")
    return ep


def _solve_fsdp(
    spec: Spec, sizes: dict[str, int], world: int | None, reasons: dict[str, str], found: Findings
) -> int | None:
    """Complete `sizes` with fsdp if it is free; the number of ranks, or None if the axes cannot give it."""
    nodes, per_node = _wanted_machines(spec)
    whole = "fsdp" not in sizes or not isinstance(spec.launch.ranks_per_node, Auto)  # not only a part of the cluster
    if world is None and per_node is not None and whole:
        world, asked = nodes * per_node, "launch.nodes · ranks_per_node"
        reasons["world_size"] = f"launch.nodes {nodes} · ranks_per_node {per_node}"
    elif world is not None:
        asked = "--world"
        reasons["world_size"] = f"--world {world}"
    else:
        asked = ""
    fixed = prod(sizes.values())
    product = " · ".join(f"{axis} {sizes[axis]}" for axis in AXES if sizes.get(axis, 1) > 1) or "1"
    if "fsdp" not in sizes:
        if world is None:
            world = lcm(fixed, nodes)
            reasons["world_size"] = f"what the axes need: {product}"
            if world > fixed:
                reasons["world_size"] = f"what the axes need, {product}, spread evenly over {nodes} nodes"
        if world % fixed or world < fixed:
            near = sorted({max(world // fixed, 1) * fixed, (world // fixed + 1) * fixed})
            options = " or ".join(f"{count}" for count in near)
            message = f"the other axes need a multiple of {product} = {plural(fixed, 'rank')}, but {asked} is {world}"
            found.fail("mesh.world", "X401", "parallel", message, f"use {options} ranks, or change an axis")
            return None
        sizes["fsdp"] = world // fixed
        reasons["parallel.fsdp.size"] = (
            f"{world:,} ranks / ({product})" if fixed > 1 else f"all {world:,} ranks" if world > 1 else "the only rank"
        )
        stack = spec.parallel.execution
        if "fsdp" in stack.unsupported:
            sizes["replicate"], sizes["fsdp"] = sizes["replicate"] * sizes["fsdp"], 1
            reasons["parallel.fsdp.replicate"] = f"all {plural(world, 'rank')}: {stack.kind} keeps a whole copy on each"
            reasons["parallel.fsdp.size"] = f"{stack.kind} {stack.unsupported['fsdp']}"
    elif world is None:
        world = fixed
        reasons["world_size"] = f"the product of the axes: {product}"
    elif fixed != world:
        rest = fixed // sizes["fsdp"]
        hint = f"use {plural(fixed, 'rank')}, or write `fsdp auto`"
        if world % rest == 0:
            hint = f"use {plural(fixed, 'rank')}, or write `fsdp {world // rest}`"
        found.fail(
            "mesh.world",
            "X401",
            "parallel.fsdp.size",
            f"the axes give {product} = {plural(fixed, 'rank')}, but {asked} is {world}",
            hint,
        )
        return None
    shown = " · ".join(f"{axis} {sizes[axis]}" for axis in AXES if sizes[axis] > 1) or "all axes 1"
    found.passed("mesh.world", f"{shown} = {plural(world, 'rank')}")
    return world


def _wanted_machines(spec: Spec) -> tuple[int, int | None]:
    """(nodes, ranks per node) as `launch` says, else as `cluster` does; None: whatever the axes need."""
    launch, cluster = spec.launch, spec.cluster
    nodes = cluster.nodes if isinstance(launch.nodes, Auto) else launch.nodes
    per_node = cluster.devices if isinstance(launch.ranks_per_node, Auto) else launch.ranks_per_node
    return (1 if isinstance(nodes, Auto) else nodes), (None if isinstance(per_node, Auto) else per_node)


def _machines(
    spec: Spec, world: int, fills: bool, spread: bool, reasons: dict[str, str], found: Findings
) -> tuple[int, int] | None:
    """(nodes, ranks per node). If the run `fills` machines one by one, ranks per node stay and machines follow; if it
    is `spread` over them, it is the other way round."""
    nodes, per_node = _wanted_machines(spec)
    if spread and per_node is not None and nodes * per_node != world:
        per_node = None
    if isinstance(spec.launch.nodes, Auto) and not isinstance(spec.cluster.nodes, Auto):
        reasons["launch.nodes"] = f"cluster.nodes {nodes}"
    if isinstance(spec.launch.ranks_per_node, Auto) and per_node is not None:
        reasons["launch.ranks_per_node"] = f"cluster.devices {per_node}"
    if per_node is not None:
        if fills and world != nodes * per_node:
            per_node = min(per_node, world)
            nodes = world // per_node
            reasons["launch.nodes"] = f"{plural(world, 'rank')} / {per_node} a node"
        if nodes * per_node != world:
            near = max(world // per_node, 1) * per_node
            message = f"{plural(world, 'rank')} do not fill machines of {plural(per_node, 'rank')}"
            found.fail("mesh.nodes", "X401", "launch.ranks_per_node", message, f"use {near} or {near + per_node} ranks")
            return None
    elif world % nodes:
        message = f"{plural(world, 'rank')} cannot be spread evenly over {nodes} nodes"
        hint = f"use {largest_divisor(world, nodes)} nodes, or a multiple of {nodes} ranks"
        found.fail("mesh.nodes", "X401", "launch.nodes", message, hint)
        return None
    else:
        per_node = world // nodes
        reasons["launch.ranks_per_node"] = f"{plural(world, 'rank')} / {plural(nodes, 'node')}"
    found.passed("mesh.nodes", f"{world} = {plural(nodes, 'node')} · {plural(per_node, 'rank')}")
    return nodes, per_node
