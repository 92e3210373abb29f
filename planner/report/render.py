"""A plan as a page that a person decides by before a single accelerator is touched: at most 100 columns, 119 lines.

What decides stands first: whether it fits, how long it takes, what there is to warn of. Then part by part, in an order
in which one explains the next.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Final

from attrs import evolve

from xtrain.dsl.diagnostics.diagnostic import Diagnostic
from xtrain.planner.graph.launcher_args import restarts_of
from xtrain.planner.plan import Check, ElasticWorld, Plan
from xtrain.planner.report.render_data import show_data
from xtrain.planner.report.render_head import show_glance, show_header, show_model, show_values
from xtrain.planner.report.render_memory import show_memory
from xtrain.planner.report.render_mesh import show_mesh
from xtrain.planner.report.render_order import show_order, show_step
from xtrain.planner.report.render_phases import show_phases
from xtrain.planner.report.render_server import show_requests, show_server_glance
from xtrain.planner.report.render_stages import show_stages
from xtrain.planner.report.render_times import show_compute
from xtrain.planner.report.render_traffic import show_communication
from xtrain.planner.report.render_training import show_training
from xtrain.planner.report.text import DETAILS, FULL, LONGEST, Detail, Page
from xtrain.planner.schedule.horizon import as_known
from xtrain.planner.units import bytes_text, count_text, plural, seconds_text

LACKS_MEMORY = "W423"
STYLES = {"warn": "yellow", "fail": "red", "unknown": "dim", "pass": "green"}


def show_restarts(page: Page, plan: Plan, detail: Detail) -> None:
    """Left out of a page that is not full where nothing is started again and no other world is allowed."""
    _, times = restarts_of(plan)
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
    page.table([_world_row(each, plan) for each in shown[:most]], styles=("", "", "", "", "", "dim"))
    page.more(len(shown) - most, "restarts")
    for each in plan.refused[: detail.most(4)]:
        page.wrapped(f"not {each.worlds}: {each.reason}")
    page.more(len(plan.refused) - detail.most(4), "restarts")


def _world_row(world: ElasticWorld, plan: Plan) -> tuple[str, ...]:
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


def show_checks(page: Page, plan: Plan, detail: Detail) -> None:
    """Every check that did not pass; of those that did, their number, or all of them in full."""
    passed = [check for check in plan.checks if check.status == "pass"]
    page.heading("CHECKS", f"{len(passed)} of {len(plan.checks)} pass")
    show_warnings(page, plan, but=_shown_above(plan))
    if detail.full:
        page.table([("pass", check.id, check.evidence) for check in passed], styles=("green", "", "dim"))


def _shown_above(plan: Plan) -> str:
    """What helps against a lack of memory stands with the memory, as a table: the text that need not be said again."""
    return "; use " if plan.estimates.remedies else ""


def show_warnings(page: Page, plan: Plan, *, but: str = "") -> None:
    """Every check that did not pass, in its own words; of that about memory what comes before `but`."""
    order = ("fail", "warn", "unknown")
    for check in sorted((each for each in plan.checks if each.status != "pass"), key=lambda c: order.index(c.status)):
        label = f"{check.status} {check.code or check.id}"
        place = f" ({check.place})" if check.place else ""
        first, rest = f"  {label}: ", " " * min(len(label) + 4, 24)
        text = check.evidence
        if but and check.code == LACKS_MEMORY:
            text = f"{text.partition(but)[0]}; for settings that would help see MEMORY"
        page.wrapped(text + place, first=first, rest=rest, style=STYLES[check.status])


def show_footer(page: Page, plan: Plan, detail: Detail) -> None:
    counts = Counter(check.status for check in plan.checks)
    verdicts = ", ".join(f"{counts[each]} {each}" for each in ("pass", "warn", "unknown", "fail") if counts[each])
    page.line()
    summary = f"{plural(len(plan.nodes), 'node')}, {plural(len(plan.checks), 'check')} ({verdicts})"
    page.line(f"Plan {plan.id}: {summary}, checkpoint {bytes_text(plan.estimates.checkpoint_bytes)}", "bold")
    if not detail.full:
        page.line("more: --full, --part memory, --rank N, --show NODE, --why SETTING; keep it: --out plan.json", "dim")


Part = Callable[[Page, Plan, Detail], None]

PARTS: Final[dict[str, Part]] = {
    "model": show_model,
    "values": show_values,
    "mesh": show_mesh,
    "stages": show_stages,
    "order": show_order,
    "step": show_step,
    "memory": show_memory,
    "communication": show_communication,
    "compute": show_compute,
    "training": show_training,
    "phases": show_phases,
    "data": show_data,
    "restarts": show_restarts,
    "requests": show_requests,
    "checks": show_checks,
}
OF_SERVERS: Final = ("model", "values", "mesh", "order", "memory", "requests", "checks")


def parts_of(plan: Plan) -> dict[str, Part]:
    """Those of PARTS that a page has: of a server there are no steps and no data."""
    return {name: PARTS[name] for name in OF_SERVERS} if plan.serves else PARTS


def render(plan: Plan, *, color: bool = False, full: bool = False, parts: Sequence[str] = ()) -> str:
    """The whole page, ending with a newline. What a program wants to know stands in the JSON, not here.

    full: everything there is to say, however long. parts: keys of PARTS to show, in full, instead of the page.
    """
    plan = as_known(plan)
    if parts:
        chosen = Page(color=color)
        show_header(chosen, plan)
        for name, part in parts_of(plan).items():
            if name in parts:
                part(chosen, plan, FULL)
        return str(chosen)
    if full:
        return str(_page(plan, FULL, color))

    @cache
    def page(detail: Detail) -> Page:
        return _page(plan, detail, color)

    def fits(detail: Detail) -> bool:
        return page(detail).height <= LONGEST

    first = 0 if fits(DETAILS[0]) else bisect_left(DETAILS, True, lo=1, key=fits)
    return str(page(DETAILS[min(first, len(DETAILS) - 1)]))


def _page(plan: Plan, detail: Detail, color: bool) -> Page:
    page = Page(color=color)
    show_header(page, plan)
    show_server_glance(page, plan) if plan.serves else show_glance(page, plan)
    for part in parts_of(plan).values():
        part(page, plan, detail)
    show_footer(page, plan, detail)
    return page


def render_summary(plan: Plan, *, said: Collection[Diagnostic] = (), color: bool = False) -> str:
    """A few lines for the start of a run: what is trained, on what, how long, and whatever there is to warn of.

    said: diagnostics that have been printed, which are not repeated.
    """
    plan = as_known(plan)
    page = Page(color=color)
    show_header(page, plan, short=True)
    estimates = plan.estimates
    axes = " · ".join(f"{axis.name} {axis.size}" for axis in plan.mesh.axes if axis.size > 1)
    parts = [
        f"{plan.architecture.family}, {count_text(plan.parameters.total)} parameters",
        f"{estimates.tokens_per_step:,} tokens a step",
        axes,
        f"{bytes_text(max(each.memory.states for each in estimates.classes))} of model states a rank",
    ]
    page.wrapped(" · ".join(part for part in parts if part), first="", rest="")
    show_warnings(page, evolve(plan, checks=tuple(check for check in plan.checks if not _is_among(check, said))))
    return str(page)


def _is_among(check: Check, said: Collection[Diagnostic]) -> bool:
    return any(each.code == check.code and check.evidence.startswith(each.message) for each in said)
