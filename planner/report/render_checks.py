"""The end of the page: what was checked and what came of it, how many nodes there are, where there is more to see."""

from collections import Counter

from ..plan import Plan
from ..units import bytes_text, plural
from .text import Detail, Page

LACKS_MEMORY = "W423"
STYLES = {"warn": "yellow", "fail": "red", "unknown": "dim", "pass": "green"}


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
