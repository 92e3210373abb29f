"""How long a step takes: products at the speed of the devices, calls at that of the links, and the pipeline's waiting.

Meant to compare layouts, not to promise a speed: latencies are assumed, links are those of data sheets, and how well
kernels use a device is assumed as well unless the spec says so (see `Cluster.efficiency`).
"""

from math import prod
from typing import Final

from attrs import evolve

from xtrain.planner.canonical import plain_sum
from xtrain.planner.plan import Hardware, Mesh, RankClass, Times, Traffic, TrafficOp

# Seconds that a call takes beside its bytes, inside a machine and between machines.
LATENCY: Final = (10e-6, 25e-6)
PASSED: Final = ("send", "recv")


def is_exposed(op: TrafficOp, node: str, beside: tuple[str, ...]) -> bool:
    """Whether nothing is computed during a call. Keys of a ring and what stages pass on travel meanwhile.

    beside: the nodes whose calls run while blocks before and behind are computed; all others are waited for.
    """
    return node not in beside and op not in PASSED


def call_seconds(mesh: Mesh, cluster: Hardware, axis: str, op: TrafficOp, count: int, size: int) -> float | None:
    """Seconds of `count` calls of `size` bytes in all, by ring algorithms; None where the link's speed is not known.

    Of n ranks, a gather or an exchange sends (n - 1) / n of the bytes from each, an all-reduce twice that (Thakur et
    al., 2005); what is sent to one rank is sent once.
    """
    names = axis.split(" · ")
    axes = [each for each in (*mesh.axes, *mesh.expert_axes) if each.name in names]
    crosses = any(each.crosses_nodes for each in axes)
    if cluster.link is None or cluster.network is None:
        return None
    # Ranks of a group on one machine leave it together, each through a network card of its own.
    network_cards = prod(min(each.size, max(1, mesh.ranks_per_node // each.stride)) for each in axes)
    speed = min(cluster.link, network_cards * cluster.network) if crosses else cluster.link
    ranks = prod(each.size for each in axes)
    share = 1.0 if op in (*PASSED, "broadcast") else (ranks - 1) / ranks * (2 if op == "all_reduce" else 1)
    return size * share / speed + count * LATENCY[crosses]


def predict(
    cluster: Hardware,
    classes: tuple[RankClass, ...],
    bubble: float,
    *,
    world: int,
    tokens: int,
    flops: int,
    fp8: int = 0,
) -> Times | None:
    """The step of the slowest ranks; None where the speed of devices or links is not known.

    tokens, flops: of a step on all `world` ranks. fp8: those of `flops` that are in fp8. bubble: share of the step in
    which a pipeline rank waits.
    """
    if cluster.flops is None or any(each.seconds is None for one in classes for each in one.traffic):
        return None
    low, high = cluster.efficiency
    likely = (low + high) / 2

    def step(efficiency: float) -> tuple[float, float, float]:
        return max(_busy(one, cluster, efficiency) for one in classes)

    busy, computing, exposed = step(likely)
    seconds = busy / (1 - bubble)
    return Times(
        computing=computing,
        exposed=exposed,
        step=seconds,
        fast=step(high)[0] / (1 - bubble),
        slow=step(low)[0] / (1 - bubble),
        tokens_per_second=tokens / seconds,
        mfu=cluster.at_usual_speed(flops, fp8) / seconds / world / cluster.flops,
    )


def _busy(one: RankClass, cluster: Hardware, efficiency: float) -> tuple[float, float, float]:
    """(all, computing, exposed) seconds of a rank; what could be hidden is exposed as far as it outlasts computing."""
    computing = cluster.at_usual_speed(one.hardware_flops, one.fp8_flops) / ((cluster.flops or 1.0) * efficiency)
    exposed = plain_sum(each.seconds or 0.0 for each in one.traffic if each.exposed)
    hidden = plain_sum(each.seconds or 0.0 for each in one.traffic if not each.exposed and not each.meanwhile)
    beside = [each for each in one.traffic if each.meanwhile]  # some operations alone
    lasts = [each.seconds or 0.0 for each in beside]
    meanwhile = [each.meanwhile / ((cluster.flops or 1.0) * efficiency) for each in beside]
    # All ranks have an even share of what is computed; those of tensor parallel may each compute some of it. What one
    # call is hidden behind hides no other.
    covered = min(plain_sum(map(min, lasts, meanwhile)), computing)
    exposed += plain_sum(lasts) - covered + max(0.0, hidden - (computing - covered))
    return computing + exposed, computing, exposed


def timed(traffic: tuple[Traffic, ...], mesh: Mesh, cluster: Hardware) -> tuple[Traffic, ...]:
    """The same calls with the seconds that they take."""
    return tuple(
        evolve(each, seconds=call_seconds(mesh, cluster, each.axis, each.op, each.count, each.bytes))
        for each in traffic
    )
