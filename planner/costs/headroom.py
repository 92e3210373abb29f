"""Whether a plan fits into the memory of its devices, and on which rank that is decided."""

from typing import Final, Literal

from attrs import frozen

from xtrain.dsl.schema.cluster import CLUSTERS
from xtrain.planner.plan import Plan, RankClass
from xtrain.planner.units import bytes_text

Verdict = Literal["fits", "tight", "does not fit", "unknown"]
TIGHT: Final = 0.08  # of the device, left free, below which a run that lasts days should not be started


@frozen(kw_only=True)
class Headroom:
    """The fullest ranks, what they leave of a device (bytes, negative if they do not fit), and the verdict."""

    worst: RankClass
    free: int | None
    verdict: Verdict
    text: str


def headroom(plan: Plan) -> Headroom:
    """Judge the fullest rank; unknown where the device or what a step needs beside the states is."""
    worst = max(plan.estimates.classes, key=lambda each: each.memory.total_bytes)
    device, need = plan.cluster.memory_bytes, worst.memory.total_bytes
    where = f"on {ranks_text(plan, worst.pp)}"
    if device is None:
        return Headroom(worst=worst, free=None, verdict="unknown", text=f"{bytes_text(need)} {where}, device not known")
    free = device - need
    share = f"{bytes_text(need)} of {bytes_text(device)} ({need / device:.0%}) {where}"
    if free < 0:
        return Headroom(worst=worst, free=free, verdict="does not fit", text=f"{share}, {bytes_text(-free)} too much")
    verdict: Verdict = "tight" if free < TIGHT * device else "fits"
    return Headroom(worst=worst, free=free, verdict=verdict, text=f"{share}, {bytes_text(free)} free")


def no_times(plan: Plan) -> str:
    """Why a plan does not say how long a step takes."""
    cluster = plan.cluster
    if not CLUSTERS[cluster.preset].known:
        return "no `cluster` is given"
    missing = [name for name in ("flops", "link", "network") if getattr(cluster, name) is None]
    return f"cluster says no {', '.join(missing)}" if missing else "not estimated"


def ranks_text(plan: Plan, pp: int) -> str:
    """`every rank`, or `pp 3 (ranks 3,072 to 4,095)`: the ranks of a pipeline coordinate."""
    size = plan.mesh.size("pp")
    if size == 1:
        return "every rank" if plan.mesh.world_size > 1 else "the only rank"
    each = plan.mesh.world_size // size
    first, last = pp * each, (pp + 1) * each - 1
    return f"pp {pp} ({f'ranks {first:,} to {last:,}' if each > 1 else f'rank {first:,}'})"
