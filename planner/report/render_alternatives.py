"""Alternatives side by side: a line each with what it holds, how long a step takes and where the time goes."""

from collections.abc import Sequence
from shlex import quote
from typing import Any

from xtrain.planner.compare.alternatives import Alternative
from xtrain.planner.compare.fit import Candidate, Fit, reason_text
from xtrain.planner.plan import Estimates, Hardware, Plan
from xtrain.planner.report.text import Page, clip
from xtrain.planner.units import bytes_text, count_text, plural, seconds_text

HEAD = ("", "memory", "of it", "step", "tokens/s", "MFU", "exposed", "bubble", "sent", "")
ALIGN = "<>>>>>>>><"
UNKNOWN = "unknown"
LONGEST_NAME = 40
LEGEND = "memory: of the fullest rank · exposed: communication that is not overlapped · sent: by one rank in a step"


def render_alternatives(alternatives: Sequence[Alternative], *, color: bool = False) -> str:
    """A table of those that have a plan, then the others with what is wrong with them."""
    page = Page(color=color)
    planned = [(each.name, each.plan) for each in alternatives if each.plan is not None]
    base = alternatives[0].plan
    if planned:
        some = planned[0][1]
        rows, ranks = some.node("setup.loader").args["rows"], some.mesh.world_size
        page.heading(
            "ALTERNATIVES", f"{plural(rows, 'row')} a step on {plural(ranks, 'rank')}, unless a line says other"
        )
        _table(page, [_planned(name, plan, base) for name, plan in planned])
    for each in alternatives:
        if each.plan is None:
            page.line()
            for found in each.diagnostics.errors:
                hint = f"; {found.hint}" if found.hint else ""
                page.wrapped(f"{found.message}{hint}", first=f"  {each.name}  {found.code}: ", rest="    ", style="red")
    return str(page)


def _table(page: Page, rows: list[tuple[str, ...]]) -> None:
    """The rows under their heads, without the columns of which nothing is known or to be said."""
    shown = [column for column in range(len(HEAD)) if any(row[column] not in (UNKNOWN, "") for row in rows)]
    lines = [tuple(row[column] for column in shown) for row in (HEAD, *rows)]
    page.table(lines, align="".join(ALIGN[column] for column in shown), styles=("bold",))
    page.line()
    if HEAD.index("step") not in shown:
        page.line("  step times are unknown: the cluster has no speed", "dim")
    page.wrapped(LEGEND, style="dim")


def _planned(name: str, plan: Plan, base: Plan | None) -> tuple[str, ...]:
    remarks = []
    if base is not None and plan.mesh.world_size != base.mesh.world_size:
        remarks.append(plural(plan.mesh.world_size, "rank"))
    if base is not None and plan.config_id != base.config_id:
        remarks.append("other experiment")
    return _row(name, figures(plan.estimates, plan.cluster), remarks)


def render_fit(fit: Fit, spec: str, *, color: bool = False) -> str:
    """The best layouts, why the others are not among them, and how to run the first."""
    page = Page(color=color)
    memory = bytes_text(fit.cluster.memory_bytes or 0)
    judged = len(fit.best) + len(fit.rejected)
    ranks = plural(fit.world, "rank")
    page.heading("FIT", f"{judged:,} layouts of {ranks} with {memory} each, {plural(fit.rows, 'row')} a step")
    if fit.best:
        _table(page, [_row(each.name, figures(_known(each), fit.cluster), []) for each in fit.best])
    else:
        page.line("  none of them fits", "red")
    page.heading("THE OTHERS", "how many, and the best of them")
    page.table([_reason_row(code, members) for code, members in fit.reasons], align=">")
    if fit.best:
        sets = "".join(f" --set {text}" for text in fit.best[0].sets)
        page.line()
        page.wrapped(f"xtrain run {quote(spec)}{sets}", first="  run the first:  ", rest="    ")
    return str(page)


def _reason_row(code: str, members: list[Candidate]) -> tuple[str, str, str]:
    judged = [each for each in members if each.estimates is not None]
    nearest = members[0]
    if judged:
        nearest = min(judged, key=lambda each: each.memory if code == "memory" else each.seconds)
    return (f"{len(members):,}", reason_text(code), f"{nearest.name}: {nearest.rejected}")


def _known(candidate: Candidate) -> Estimates:
    assert candidate.estimates is not None
    return candidate.estimates


def figures(estimates: Estimates, cluster: Hardware) -> dict[str, Any]:
    """What an alternative is judged by; None where it is not known."""
    times, memory = estimates.times, cluster.memory_bytes
    total = max(each.memory.total_bytes for each in estimates.classes)
    return {
        "memory_bytes": total,
        "memory_share": None if memory is None else total / memory,
        "step_seconds": None if times is None else times.step,
        "tokens_per_second": None if times is None else times.tokens_per_second,
        "mfu": None if times is None else times.mfu,
        "exposed_seconds": None if times is None else times.exposed,
        "bubble": estimates.bubble,
        "sent_bytes": max(sum(each.bytes for each in one.traffic) for one in estimates.classes),
    }


def _row(name: str, found: dict[str, Any], remarks: list[str]) -> tuple[str, ...]:
    def shown(key: str, text: Any) -> str:
        return UNKNOWN if found[key] is None else text(found[key])

    def share(value: float) -> str:
        return f"{value:.0%}"

    if found["memory_share"] is not None and found["memory_share"] > 1:
        remarks = ["does not fit", *remarks]
    return (
        clip(name, LONGEST_NAME),
        bytes_text(found["memory_bytes"]),
        shown("memory_share", share),
        shown("step_seconds", seconds_text),
        shown("tokens_per_second", count_text),
        shown("mfu", share),
        shown("exposed_seconds", seconds_text),
        shown("bubble", share),
        bytes_text(found["sent_bytes"]),
        ", ".join(remarks),
    )
