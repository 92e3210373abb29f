"""Seconds of a step and of its calls: by data sheets and an assumed efficiency, or by measured runs (`calibration`)."""

from math import prod
from typing import TYPE_CHECKING, Final

from attrs import evolve

from xtrain.plan.canonical import plain_sum
from xtrain.plan.estimates import Hardware, RankClass, Times, Traffic, TrafficOp, Work
from xtrain.plan.plan import Mesh, Plan

if TYPE_CHECKING:
    from xtrain.plan.calibration import PlannedTiming

# Latency of a call in seconds, inside a machine and between machines.
LATENCY: Final = (10e-6, 25e-6)
PASSED: Final = ("send", "recv")


def call_seconds(mesh: Mesh, cluster: Hardware, axis: str, op: TrafficOp, count: int, size: int) -> float | None:
    """Return the seconds of `count` calls of `size` bytes in total, by ring algorithms; None if the link's speed is
    unknown.

    Each of n ranks sends (n - 1) / n of the bytes in a gather or an exchange, and twice that in an all-reduce (Thakur
    et al., 2005). A message to one rank is sent once.
    """
    names = axis.split(" · ")
    axes = [each for each in (*mesh.axes, *mesh.expert_axes) if each.name in names]
    crosses = any(each.crosses_nodes for each in axes)
    if cluster.link is None or (crosses and cluster.network is None):
        return None
    # Ranks of a group on one machine send to other machines together, each through its own network card.
    network_cards = prod(min(each.size, max(1, mesh.ranks_per_node // each.stride)) for each in axes)
    speed = min(cluster.link, network_cards * cluster.network) if crosses and cluster.network else cluster.link
    ranks = prod(each.size for each in axes)
    share = 1.0 if op in (*PASSED, "broadcast") else (ranks - 1) / ranks * (2 if op == "all_reduce" else 1)
    return size * share / speed + count * LATENCY[crosses]


def predict(
    cluster: Hardware,
    classes: tuple[RankClass, ...],
    bubble: float,
    *,
    mesh: Mesh,
    tokens: int,
    flops: int,
    work: Work,
    sequence: int,
    experts: bool,
) -> Times | None:
    """Return the times of a step on the slowest ranks; None if the speed of devices or links is unknown.

    tokens, flops: of a step on all ranks, in rows of `sequence`. bubble: share of the step in which a pipeline rank
    waits. experts: whether the model has any.
    """
    if cluster.flops is None or any(each.seconds is None for one in classes for each in one.traffic):
        return None
    low, high = cluster.efficiency

    def step(efficiency: float) -> tuple[float, float, float]:
        return max(_busy(one, cluster, efficiency) for one in classes)

    label, beyond = None, ()
    busy, computing, exposed = step((low + high) / 2)
    seconds, fast, slow = (each / (1 - bubble) for each in (busy, step(high)[0], step(low)[0]))
    if cluster.calibration is not None:
        from xtrain.plan.calibration import calibration_of

        timing = timing_of(
            cluster, classes, bubble, mesh=mesh, tokens=tokens, work=work, sequence=sequence, experts=experts
        )
        found = calibration_of(cluster.calibration).predicted(timing)
        label, beyond = found.label, found.beyond
        scale = timing.seconds * found.factor / seconds
        computing, exposed = computing * scale, exposed * scale
        seconds, fast, slow = (timing.seconds * each for each in (found.factor, found.low, found.high))
    usual = cluster.at_usual_speed(flops, work.position_fp8 * tokens)
    return Times(
        computing=computing,
        exposed=exposed,
        step=seconds,
        fast=fast,
        slow=slow,
        tokens_per_second=tokens / seconds,
        mfu=usual / seconds / mesh.world_size / cluster.flops,
        label=label,
        beyond=beyond,
    )


def timing_of(
    cluster: Hardware,
    classes: tuple[RankClass, ...],
    bubble: float,
    *,
    mesh: Mesh,
    tokens: int,
    work: Work,
    sequence: int,
    experts: bool,
) -> "PlannedTiming":
    """Return what a calibration compares, of the slowest ranks; for the arguments see `predict`. The speed of devices
    and links must be known."""
    from xtrain.plan.calibration import ASSUMED, PlannedTiming

    assert cluster.flops is not None
    one = max(classes, key=lambda each: _busy(each, cluster, ASSUMED))
    seconds = _busy(one, cluster, ASSUMED)[0] / (1 - bubble)
    pairs = (work.pair + work.pair_again) * work.pairs(sequence) // sequence
    attention = pairs / (pairs + work.position + work.position_again)
    attending = attention * (one.hardware_flops - one.optimizer_flops)
    in_fp8 = one.fp8_flops * cluster.flops / (cluster.fp8_flops or cluster.flops)
    parts = {
        "products": (one.hardware_flops - attending - one.fp8_flops) / cluster.flops / ASSUMED,
        "scaled products": in_fp8 / cluster.flops / ASSUMED,
        "attention": attending / cluster.flops / ASSUMED,
        "link": plain_sum(each.seconds or 0.0 for each in one.traffic if each.exposed and not _crosses(mesh, each)),
        "network": plain_sum(each.seconds or 0.0 for each in one.traffic if each.exposed and _crosses(mesh, each)),
    }
    overlapped = plain_sum(each.seconds or 0.0 for each in one.traffic if not each.exposed)
    sizes = {axis.name: axis.size for axis in (*mesh.axes, *mesh.expert_axes)}
    return PlannedTiming(
        machine=machine_of(cluster),
        seconds=seconds,
        shares={kind: part / (1 - bubble) / seconds for kind, part in parts.items()},
        shape={
            "ranks": mesh.world_size,
            "tp": sizes.get("tp", 1),
            "cp": sizes.get("ring", 1) * sizes.get("ulysses", 1),
            "pp": sizes.get("pp", 1),
            "ep": sizes.get("ep", 1),
            "tokens a rank": tokens / mesh.world_size,
            "exposed communication": (parts["link"] + parts["network"]) / seconds,
            "overlapped communication": overlapped / seconds,
            "bubble": bubble,
            "attention": parts["attention"] / (1 - bubble) / seconds,
            "scaled products": parts["scaled products"] / (1 - bubble) / seconds,
            "experts": float(experts),
        },
    )


def timing_of_plan(plan: Plan) -> "PlannedTiming | None":
    """Return the same of a plan; None if the speed of its devices or links is unknown."""
    estimates = plan.estimates
    if estimates.times is None:
        return None
    return timing_of(
        plan.cluster,
        estimates.classes,
        estimates.bubble,
        mesh=plan.mesh,
        tokens=estimates.tokens_per_step,
        work=estimates.work,
        sequence=plan.node("setup.loader").args["sequence"],
        experts=plan.architecture.is_moe,
    )


def machine_of(cluster: Hardware) -> str:
    """Return the name of the machines: of the preset, or of the measured machine without the time of measuring."""
    return cluster.preset if cluster.measured is None else cluster.measured.partition(" UTC")[0].rpartition(", ")[0]


def _crosses(mesh: Mesh, traffic: Traffic) -> bool:
    names = traffic.axis.split(" · ")
    return any(axis.crosses_nodes for axis in (*mesh.axes, *mesh.expert_axes) if axis.name in names)


def _busy(one: RankClass, cluster: Hardware, efficiency: float) -> tuple[float, float, float]:
    """Return (all, computing, exposed) seconds of a rank; overlapped calls are exposed as far as they outlast
    computing."""
    computing = cluster.at_usual_speed(one.hardware_flops, one.fp8_flops) / ((cluster.flops or 1.0) * efficiency)
    exposed = plain_sum(each.seconds or 0.0 for each in one.traffic if each.exposed)
    hidden = plain_sum(each.seconds or 0.0 for each in one.traffic if not each.exposed and not each.meanwhile)
    beside = [each for each in one.traffic if each.meanwhile]  # overlap only with certain operations
    lasts = [each.seconds or 0.0 for each in beside]
    meanwhile = [each.meanwhile / ((cluster.flops or 1.0) * efficiency) for each in beside]
    # All ranks compute equal shares; ranks of tensor parallelism may each compute part of the overlapped operations.
    # Computation that hides one call hides no other.
    covered = min(plain_sum(map(min, lasts, meanwhile)), computing)
    exposed += plain_sum(lasts) - covered + max(0.0, hidden - (computing - covered))
    return computing + exposed, computing, exposed


def timed(traffic: tuple[Traffic, ...], mesh: Mesh, cluster: Hardware) -> tuple[Traffic, ...]:
    """Return the calls with their seconds."""
    return tuple(
        evolve(each, seconds=call_seconds(mesh, cluster, each.axis, each.op, each.count, each.bytes))
        for each in traffic
    )
