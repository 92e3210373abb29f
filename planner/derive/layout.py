"""`Layout`: mesh and machines from `parallel` and `launch` of a spec, `Hardware` from `cluster`, with the reasons.

Context parallelism spreads a row's sequence over ring and ulysses ranks.
"""

from math import gcd, lcm, prod
from typing import Final

from xtrain.contracts.stacks import stack_of
from xtrain.dsl.schema.cluster import CLUSTERS, Unmeasured
from xtrain.dsl.schema.parallel import Cp
from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import Quantity
from xtrain.plan.estimates import Hardware
from xtrain.plan.findings import Findings, checks
from xtrain.plan.hardware import FP8, FP8_SPEED, product_format
from xtrain.plan.mesh import AXES, Layout, build_mesh, largest_divisor
from xtrain.text.units import plural

RANGE: Final = (0.40, 0.60)  # an assumption: docs/accuracy.md counts how many published runs lie within it
REACHED: Final = (0.8, 1.2)  # the same range around the share that was measured


def resolve_cluster(spec: Spec, compute: str, nodes: int, ranks_per_node: int) -> Hardware:
    """Return the machines' hardware, with `compute` as the format of products; fields are None if unknown."""
    given, sheet, machine = spec.cluster, spec.cluster.data_sheet(), spec.cluster.measured()
    sharing = ranks_per_node if sheet and sheet.shared else 1
    product = product_format(compute, spec.precision.matmul)
    flops = given.flops
    if isinstance(flops, Auto):
        flops = sheet.flops[product] / sharing if sheet and product in sheet.flops else None
    fp8 = None
    if spec.precision.scaled is not None:
        fp8 = sheet.flops.get(FP8) if sheet and isinstance(given.flops, Auto) else flops and FP8_SPEED * flops
    low, high = (given.efficiency.fraction,) * 2 if isinstance(given.efficiency, Quantity) else RANGE
    if isinstance(given.efficiency, Auto) and machine and machine.reached:
        low, high = (min(share * machine.reached, 1.0) for share in REACHED)
    return Hardware(
        preset=given.preset,
        nodes=nodes if isinstance(given.nodes, Auto) else given.nodes,
        devices=ranks_per_node if isinstance(given.devices, Auto) else given.devices,
        memory_bytes=int(given.memory.value)
        if isinstance(given.memory, Quantity)
        else sheet and sheet.memory // sharing,
        flops=flops,
        efficiency=(low, high),
        link=float(given.link.value) if isinstance(given.link, Quantity) else sheet and sheet.link,
        network=float(given.network.value) if isinstance(given.network, Quantity) else sheet and sheet.network,
        price=given.price,
        mtbf_seconds=given.mtbf and given.mtbf.value,
        restart_seconds=_seconds(given.restart),
        storage=given.storage and given.storage.value,
        fp8_flops=fp8,
        programs_seconds=_seconds(given.programs),
        store_rate=None if isinstance(given.store_rate, Auto) else given.store_rate,
        connect_seconds=_seconds(given.connect),
        compile_seconds=_seconds(given.compile),
        capability=machine and machine.sheet.capability,
        measured=machine and f"{machine.name}, {machine.at}",
        calibration=given.calibration,
    )


def _seconds(given: Quantity | Auto | None) -> float | None:
    return given.value if isinstance(given, Quantity) else None


def _devices(spec: Spec) -> tuple[int | Auto, int | Auto]:
    """Return nodes and devices of a node of `cluster`; a measured machine is one node, and a CPU has any number of
    ranks."""
    given, machine = spec.cluster, spec.cluster.measured()
    nodes, devices = given.nodes, given.devices
    if machine is not None and isinstance(nodes, Auto):
        nodes = 1
    if machine is not None and isinstance(devices, Auto) and machine.device != "cpu":
        devices = machine.devices
    return nodes, devices


@checks("cluster.nodes cluster.devices", reads="{world} cluster.preset")
@checks("cluster.device", reads="cluster.preset launch.device")
@checks("cluster.measured", reads="cluster.preset")
@checks("cluster.calibration", reads="cluster.calibration")
def check_cluster(spec: Spec, nodes: int, ranks_per_node: int, found: Findings) -> None:
    """Check that the run fits on the available machines and uses a kind of device that they have."""
    cluster = spec.cluster
    try:
        if (machine := cluster.machine()) is not None:
            found.passed("cluster.measured", f"{machine.name} was measured at {machine.at}")
    except Unmeasured as problem:
        found.unknown("cluster.measured", f"memory and speed of this machine: {problem}")
    if cluster.calibration is not None:
        _check_calibration(cluster.calibration, found)
    have = _devices(spec)
    for name, asked, there in (("nodes", nodes, have[0]), ("devices", ranks_per_node, have[1])):
        if isinstance(there, Auto):
            continue
        what = {"nodes": "machines", "devices": "devices of a machine"}[name]
        if asked > there:
            message = f"the run needs {asked} {what}, and the cluster has {there}"
            found.fail(f"cluster.{name}", "X421", f"cluster.{name}", message, f"use {name} {asked}, or fewer ranks")
        else:
            found.passed(f"cluster.{name}", f"{asked} of {there} {what} are used")
    kind = cluster.device_kind()
    if kind and spec.launch.device not in ("auto", kind):
        message = f"launch.device is {spec.launch.device}, but cluster {cluster.preset} has {kind} devices"
        hint = f"leave launch.device auto, or write `cluster {_of_device(spec.launch.device)}`"
        found.fail("cluster.device", "X422", "launch.device", message, hint)


def _check_calibration(path: str, found: Findings) -> None:
    from xtrain.plan.calibration import CalibrationError, calibration_of

    try:
        runs = calibration_of(path).runs
        found.passed("cluster.calibration", plural(len(runs), "measured run"))
    except CalibrationError as problem:
        hint = "write it with `xtrain calibrate RUNS --out FILE`, or remove the setting"
        found.fail("cluster.calibration", "X452", "cluster.calibration", str(problem), hint)


def _of_device(device: str) -> str:
    """Return the preset of a kind of device without a data sheet, or the preset of any device."""
    plain = [name for name, cluster in CLUSTERS.items() if cluster.sheet is None and cluster.known]
    return next((name for name in plain if CLUSTERS[name].device == device), plain[-1])


@checks("mesh.cp", reads="parallel.cp.size parallel.cp.ring parallel.cp.ulysses")
def split_context(
    cp: Cp, heads: int, kv_heads: tuple[int, ...], reasons: dict[str, str], found: Findings
) -> tuple[int, int] | None:
    """Return (ring, ulysses) of `cp`. heads, kv_heads: of one tensor-parallel rank; of key/value heads all numbers that
    layers have."""
    size, ring, ulysses = cp.size, cp.ring, cp.ulysses
    if isinstance(ring, Auto) and isinstance(ulysses, Auto):
        ulysses, why = choose_ulysses(size, heads, gcd(*kv_heads))
        if not all(heads_allow(ulysses, heads, count) for count in kv_heads):
            ulysses, why = 1, f"layers have {' and '.join(map(str, kv_heads))} key/value heads a tp rank"
        ring = size // ulysses
        if size > 1:
            reasons["parallel.cp.ulysses"] = why
            reasons["parallel.cp.ring"] = f"cp {size} / ulysses {ulysses}"
    elif isinstance(ring, Auto) and isinstance(ulysses, int):
        ring = max(size // ulysses, 1)
        reasons["parallel.cp.ring"] = f"cp {size} / ulysses {ulysses}"
    elif isinstance(ulysses, Auto) and isinstance(ring, int):
        ulysses = max(size // ring, 1)
        reasons["parallel.cp.ulysses"] = f"cp {size} / ring {ring}"
    assert isinstance(ring, int) and isinstance(ulysses, int)
    if ring * ulysses != size:
        message = f"ring {ring} · ulysses {ulysses} = {ring * ulysses}, but cp is {size}"
        found.fail(
            "mesh.cp", "X413", "parallel.cp", message, f"write `cp {ring * ulysses}`, or leave ring and ulysses auto"
        )
        return None
    if size > 1:
        found.passed("mesh.cp", f"cp {size} = ring {ring} · ulysses {ulysses}")
    return ring, ulysses


def choose_ulysses(cp: int, heads: int, kv_heads: int) -> tuple[int, str]:
    """Return how many ranks of `cp` exchange sequence for heads, and why; the rest passes keys and values around a
    ring.

    Ulysses moves each activation once, a ring moves all keys and values size - 1 times, so ulysses gets as many ranks
    as the heads allow.
    """
    if (by_kv := gcd(cp, kv_heads)) > 1:
        return by_kv, f"the largest divisor of cp {cp} that divides the {kv_heads} key/value heads of a tp rank"
    if kv_heads == 1 and (by_heads := gcd(cp, heads)) > 1:
        why = f"1 key/value head a tp rank cannot be divided; {by_heads} divides its {heads} query heads"
        return by_heads, why
    return 1, f"{kv_heads} key/value heads a tp rank share no divisor with cp {cp}"


def heads_allow(ulysses: int, heads: int, kv_heads: int) -> bool:
    """Return True if `ulysses` ranks can share the heads of a tp rank.

    Each rank takes whole query heads. It also takes whole key/value heads; if there are fewer of them than ranks, equal
    numbers of ranks take copies of each.
    """
    divides = kv_heads % ulysses if ulysses <= kv_heads else ulysses % kv_heads
    return heads % ulysses == 0 and divides == 0


def build_layout(spec: Spec, world: int | None, *, heads: int, kv_heads: tuple[int, ...], found: Findings) -> Layout:
    """Resolve `parallel` and `launch` for `world` ranks. If no mesh fits, report why in `found` and leave the layout
    unsettled.

    kv_heads: all numbers of key/value heads that layers have. `world` None: the ranks named by `launch`, otherwise as
    many as the axes need.
    """
    reasons: dict[str, str] = {}
    unsettled: set[str] = set()
    sizes = _fixed_sizes(spec, found, unsettled)
    tp = sizes["tp"]
    own = tuple(max(count // tp, 1) for count in kv_heads)
    split = split_context(spec.parallel.cp, max(heads // tp, 1), own, reasons, found)
    if split is None:
        unsettled.add("cp")
    sizes["ring"], sizes["ulysses"] = split or (spec.parallel.cp.size, 1)
    total, placed = None, None
    if not unsettled & {"world"}:
        total = _solve_fsdp(spec, sizes, world, reasons, found)
    if total is not None:
        fills = world is not None or isinstance(spec.launch.ranks_per_node, Auto)
        # All requested machines are used; machines of the cluster only as needed.
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


@checks("mesh.auto", reads="parallel.pp.size parallel.fsdp.size parallel.fsdp.replicate parallel.tp.size")
def _fixed_sizes(spec: Spec, found: Findings, unsettled: set[str]) -> dict[str, int]:
    """Return the sizes of all axes except context and a free fsdp."""
    parallel = spec.parallel
    stated = {
        "pp": parallel.pp.size,
        "replicate": stack_of(spec).replicas(spec) or parallel.fsdp.replicate,
        "fsdp": parallel.fsdp.size,
        "tp": parallel.tp.size,
    }
    free = [axis for axis, size in stated.items() if isinstance(size, Auto)]
    if free not in ([], ["fsdp"]):
        other = next(axis for axis in free if axis != "fsdp")
        message = f"`auto` on {' and '.join(free)}: only fsdp can take the remaining ranks"
        found.fail(
            "mesh.auto", "X410", f"parallel.{other}.size", message, f"give {other} a number, such as `{other} 2`"
        )
        unsettled.add("world")
    sizes = {axis: size for axis, size in stated.items() if isinstance(size, int)}
    return {**{axis: 1 for axis in free if axis != "fsdp"}, **sizes}


@checks("mesh.ep", reads="parallel.ep.size {world}")
def _check_ep(spec: Spec, sizes: dict[str, int], found: Findings) -> int:
    """Return the number of ranks that share experts; 1 if the requested number does not fit."""
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


@checks("mesh.world", reads="{world}")
def _solve_fsdp(
    spec: Spec, sizes: dict[str, int], world: int | None, reasons: dict[str, str], found: Findings
) -> int | None:
    """Complete `sizes` with fsdp if it is free; return the number of ranks, or None if the axes cannot give it."""
    nodes, per_node = _wanted_machines(spec)
    # the whole cluster and not only a part
    whole = "fsdp" not in sizes or not isinstance(spec.launch.ranks_per_node, Auto)
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
            message = f"{asked} {world} is not divisible by the other axes, {product} = {plural(fixed, 'rank')}"
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
    """Return (nodes, ranks per node) from `launch`, otherwise from `cluster`; None: whatever the axes need."""
    launch, (nodes, per_node) = spec.launch, _devices(spec)
    nodes = nodes if isinstance(launch.nodes, Auto) else launch.nodes
    per_node = per_node if isinstance(launch.ranks_per_node, Auto) else launch.ranks_per_node
    return (1 if isinstance(nodes, Auto) else nodes), (None if isinstance(per_node, Auto) else per_node)


@checks("mesh.nodes", reads="{world}")
def _machines(
    spec: Spec, world: int, fills: bool, spread: bool, reasons: dict[str, str], found: Findings
) -> tuple[int, int] | None:
    """Return (nodes, ranks per node). If the run `fills` machines one by one, ranks per node are kept and machines
    derived; if it is `spread` over them, the other way round."""
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
        hint = f"use {largest_divisor(world, nodes)} nodes, or ranks divisible by {nodes}"
        found.fail("mesh.nodes", "X401", "launch.nodes", message, hint)
        return None
    else:
        per_node = world // nodes
        reasons["launch.ranks_per_node"] = f"{plural(world, 'rank')} / {plural(nodes, 'node')}"
    found.passed("mesh.nodes", f"{world} = {plural(nodes, 'node')} · {plural(per_node, 'rank')}")
    return nodes, per_node
