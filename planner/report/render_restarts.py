"""RESTARTS: how often a run that has failed is started again, and on which numbers of ranks."""

from ..plan import ElasticWorld, Plan
from ..units import bytes_text, plural, seconds_text
from .text import Detail, Page


def show_restarts(page: Page, plan: Plan, detail: Detail) -> None:
    """Left out of a page that is not full where nothing is started again and no other world is allowed."""
    times = plan.launch["restarts"]
    if not times and not plan.elastic and not detail.full:
        return
    head = f"up to {times}, each from the last checkpoint" if times else "not by xtrain itself"
    page.heading("RESTARTS", head)
    if not plan.elastic:
        page.wrapped("on the same number of ranks" if times else "a rank that fails ends the run")
        return
    page.wrapped("on fewer ranks if devices are missing or the same rank fails twice without a new checkpoint:")
    most = detail.most(8)
    shown = sorted(plan.elastic, key=lambda each: -each.world)
    page.table([_row(each, plan) for each in shown[:most]], styles=("", "", "", "", "", "dim"))
    page.more(len(shown) - most, "restarts")
    for each in plan.refused[: detail.most(4)]:
        page.wrapped(f"not {each.worlds}: {each.reason}")
    page.more(len(plan.refused) - detail.most(4), "restarts")


def _row(world: ElasticWorld, plan: Plan) -> tuple[str, ...]:
    axes = " · ".join(f"{name} {size}" for name, size in world.axes.items() if size > 1) or "all axes 1"
    step = "step unknown" if world.seconds is None else f"{seconds_text(world.seconds)} a step"
    here = "this plan" if world.world == plan.mesh.world_size else f"plan {world.id}"
    count = plural(world.accumulate, "microbatch")
    return (
        plural(world.world, "rank"),
        axes,
        f"{count} a step",
        f"{bytes_text(world.memory_bytes)} at most",
        step,
        here,
    )
