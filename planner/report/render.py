"""A plan as a page that a person decides by before a single accelerator is touched: at most 100 columns, 119 lines.

What decides stands first: whether it fits, how long it takes, what there is to warn of. Then part by part, in an order
in which one explains the next.
"""

from collections.abc import Callable, Sequence
from typing import Final

from ..plan import Plan
from ..schedule.horizon import as_known
from ..units import bytes_text, count_text
from .render_checks import show_checks, show_footer, show_warnings
from .render_data import show_data
from .render_head import show_glance, show_header, show_model, show_values
from .render_memory import show_memory
from .render_mesh import show_mesh
from .render_order import show_order, show_step
from .render_phases import show_phases
from .render_restarts import show_restarts
from .render_stages import show_stages
from .render_times import show_compute
from .render_traffic import show_communication
from .render_training import show_training
from .text import DETAILS, FULL, LONGEST, Detail, Page

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
    "checks": show_checks,
}


def render(plan: Plan, *, color: bool = False, full: bool = False, parts: Sequence[str] = ()) -> str:
    """The whole page, ending with a newline. What a program wants to know stands in the JSON, not here.

    full: everything there is to say, however long. parts: keys of PARTS to show, in full, instead of the page.
    """
    plan = as_known(plan)
    if parts:
        page = Page(color=color)
        show_header(page, plan)
        for name, part in PARTS.items():
            if name in parts:
                part(page, plan, FULL)
        return str(page)
    page = Page()
    for detail in (FULL,) if full else DETAILS:
        page = _page(plan, detail, color)
        if page.height <= LONGEST:
            break
    return str(page)


def _page(plan: Plan, detail: Detail, color: bool) -> Page:
    page = Page(color=color)
    show_header(page, plan)
    show_glance(page, plan)
    for part in PARTS.values():
        part(page, plan, detail)
    show_footer(page, plan, detail)
    return page


def render_summary(plan: Plan, *, color: bool = False) -> str:
    """A few lines for the start of a run: what is trained, on what, how long, and whatever there is to warn of."""
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
    show_warnings(page, plan)
    return str(page)
