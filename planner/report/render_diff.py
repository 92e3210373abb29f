"""A difference of two plans as a page: first whether a run can go on, then what changed and what that costs."""

from collections.abc import Callable
from typing import Any, Final

from xtrain.planner.compare.diff import CATEGORIES, Amount, ClassMemory, NodeChange, PlanDifference
from xtrain.planner.compare.diff_values import GROUPS, ValueChange
from xtrain.planner.compare.resumable import Verdict
from xtrain.planner.plan import Plan, Provenance
from xtrain.planner.report.text import Page, clip
from xtrain.planner.units import WIDTH, bytes_text, count_text, flops_text, plural, seconds_text

STYLES: Final = {"same": "green", "safe": "green", "resharded": "yellow", "incompatible": "red"}
SAYS: Final = {
    "same": "a checkpoint of A resumed under B trains as under A, bit for bit",
    "safe": "a checkpoint of A can be resumed under B",
    "resharded": "a checkpoint of A can be resumed under B, on ranks with other shards of it",
    "incompatible": "a checkpoint of A is refused under B",
}
EFFECTS: Final = {
    "none": "The result equals a run under B from the start, bit for bit.",
    "rounding": "The result equals a run under B from the start, up to rounding.",
    "learning": "The result differs from a run under B from the start.",
}
MOST_NODES: Final = 16
MOST_CLASSES: Final = 8
MOST_OF_A_VALUE: Final = 23  # columns, so that two of them, a path and a place stand in a line


def render_diff(
    found: PlanDifference,
    names: tuple[str, str],
    going_on: tuple[str, ...] = (),
    *,
    steps: tuple[int | None, int | None] = (None, None),
    color: bool = False,
) -> str:
    """The whole page. names: what A and B are. going_on: what to type, line by line. steps: of latest checkpoints."""
    page = Page(color=color)
    for letter, name, plan, step in zip("AB", names, (found.a, found.b), steps, strict=True):
        _side(page, letter, name, plan, step)
    _verdict(page, found.verdict, going_on)
    if not found.differ:
        page.heading("SAME PLAN", f"{found.a.id}: both do the same")
        _values(page, found.values)
        return str(page)
    _values(page, found.values)
    _nodes(page, found.nodes)
    _memory(page, found.memory)
    _traffic(page, found)
    _amounts(page, found.amounts)
    return str(page)


def _side(page: Page, letter: str, name: str, plan: Plan, step: int | None) -> None:
    page.line(clip(f"{letter}  {name}", WIDTH), "bold")
    done = "" if step is None else f" · checkpoint of step {step:,}"
    page.line(clip(f"   {plan.name} · plan {plan.id} · experiment {plan.config_id}{done}", WIDTH), "dim")


def _verdict(page: Page, verdict: Verdict, going_on: tuple[str, ...]) -> None:
    page.heading("RESUME")
    condition = "" if verdict.certain else ", unless the data is in fact the same"
    style = STYLES[verdict.kind]
    page.wrapped(f"{verdict.kind}: {SAYS[verdict.kind]}{condition}", style=style)
    shown = [reason for reason in verdict.reasons if verdict.kind != "incompatible" or reason.kind == verdict.kind]
    width = min(max((len(reason.path) for reason in shown), default=0), 32)
    for reason in shown:
        first = f"  {reason.path.ljust(width)}  "
        page.wrapped(reason.text, first=first, rest=" " * (width + 4))
    if left := len(verdict.reasons) - len(shown):
        page.line(f"  ({left} more allowed differences: --json)", "dim")
    if verdict.kind in ("safe", "resharded"):
        page.wrapped(EFFECTS[verdict.effect])
    for line in going_on:
        page.line(f"  {line}")


def _values(page: Page, changes: tuple[ValueChange, ...]) -> None:
    page.heading("VALUES", "" if changes else "none differ")
    for group in GROUPS:
        own = [change for change in changes if change.group == group]
        if not own:
            continue
        page.line(f"  {group}", "dim")
        rows = [(f"  {clip(c.path, 34)}", f"{_value(c.before)} → {_value(c.after)}", _origin(c)) for c in own]
        page.table(rows, styles=("", "cyan", "dim"))


def _value(entry: Provenance | None) -> str:
    return "–" if entry is None else clip(entry.value, MOST_OF_A_VALUE)


def _origin(change: ValueChange) -> str:
    """Where the value of B comes from, or if B has none that of A."""
    entry = change.after or change.before
    if entry is None or not entry.origin:
        return ""
    return f"= {entry.how}" if entry.how else f"{entry.origin} {entry.place}".strip()


def _nodes(page: Page, changes: tuple[NodeChange, ...]) -> None:
    kinds = {"+": [c for c in changes if c.before is None], "-": [c for c in changes if c.after is None]}
    kinds["~"] = [c for c in changes if c.before is not None and c.after is not None]
    counts = [(len(kinds["+"]), "added"), (len(kinds["-"]), "removed"), (len(kinds["~"]), "changed")]
    page.heading("GRAPH", ", ".join(f"{count} {word}" for count, word in counts if count) or "the same nodes")
    rows = [
        (f"{sign} {change.id}", change.does if sign != "~" else _arguments(change))
        for sign in "+-~"
        for change in kinds[sign]
        if not change.moved
    ]
    page.table(rows[:MOST_NODES], styles=("", "dim"))
    if len(rows) > MOST_NODES:
        page.line(f"  and {len(rows) - MOST_NODES} more nodes: --json", "dim")
    if moved := sum(change.moved for change in changes):
        page.line(f"  and {plural(moved, 'node')} over other axes", "dim")


def _arguments(change: NodeChange) -> str:
    return ", ".join(f"{name} {_short(old)} → {_short(new)}" for name, (old, new) in change.arguments.items())


def _short(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = " · ".join(value) or "none"
    text = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    return "none" if value is None else clip(text.replace("'", ""), 24)


def _memory(page: Page, classes: tuple[ClassMemory, ...]) -> None:
    """The fullest rank by category; of pipelines the sums of every coordinate as well."""
    page.heading("MEMORY", "the fullest rank, at the peak of a step")
    fullest = classes[0]
    assert fullest.before is not None and fullest.after is not None
    rows = [("", "A", "B", "")]
    for name, before, after in zip(CATEGORIES, fullest.before, fullest.after, strict=True):
        if before or after:
            label = "in all" if name == "total_bytes" else name
            rows.append((label, bytes_text(before), bytes_text(after), _change(before, after, bytes_text)))
    for each in classes[1 : MOST_CLASSES + 1]:
        before, after = (side[-1] if side else None for side in (each.before, each.after))
        shown = ["–" if total is None else bytes_text(total) for total in (before, after)]
        rows.append((each.name, shown[0], shown[1], _change(before, after, bytes_text)))
    page.table(rows, align="<>><", styles=("", "", "", "cyan"))
    if len(classes) > MOST_CLASSES + 1:
        page.line(f"  and {len(classes) - MOST_CLASSES - 1} more pipeline coordinates: --json", "dim")


def _traffic(page: Page, found: PlanDifference) -> None:
    if not found.traffic:
        return
    page.heading("TRAFFIC", "a rank, a step: calls and bytes")
    rows = [("", "", "A", "", "B", "", "")]
    for each in found.traffic:
        (count_a, bytes_a), (count_b, bytes_b) = each.before, each.after
        numbers = (f"{count_a:,}", bytes_text(bytes_a), f"{count_b:,}", bytes_text(bytes_b))
        rows.append((each.axis, each.op, *numbers, _change(bytes_a, bytes_b, bytes_text)))
    page.table(rows, align="<<>>>><", styles=("", "", "", "", "", "", "cyan"))


def _amounts(page: Page, amounts: tuple[Amount, ...]) -> None:
    page.heading("RUN")
    spell: dict[str, Callable[[float], str]] = {
        "count": lambda value: f"{value:,.0f}" if value < 1e7 else count_text(value),
        "flops": flops_text,
        "seconds": seconds_text,
        "bytes": bytes_text,
    }
    rows = [("", "A", "B", "")]
    for each in amounts:
        if each.before is None and each.after is None:
            continue
        words = spell[each.unit]
        change = _change(each.before, each.after, words)
        rows.append((each.name, _known(each.before, words), _known(each.after, words), change))
    page.table(rows, align="<>><", styles=("", "", "", "cyan"))


def _known(value: float | None, words: Callable[[float], str]) -> str:
    return "unknown" if value is None else words(value)


def _change(before: float | None, after: float | None, words: Callable[[float], str]) -> str:
    """`+1.50 GiB (×1.25)`; empty where nothing changes or a side is not known."""
    if before is None or after is None or before == after:
        return ""
    sign = "+" if after > before else "−"
    factor = f"{after / before:.3g}" if before and after else "1"
    return f"{sign}{words(abs(after - before))}" + (f" (×{factor})" if factor != "1" else "")
