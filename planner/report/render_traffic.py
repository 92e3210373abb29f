"""The part of the page about communication: what one rank sends and receives in a step, by axis and collective."""

from collections.abc import Iterable

from attrs import frozen

from xtrain.planner.costs.headroom import no_times, ranks_text
from xtrain.planner.plan import Mesh, Plan, RankClass, Traffic
from xtrain.planner.report.agreement import Ranks, sums_of_groups
from xtrain.planner.report.render_mesh import crosses_nodes
from xtrain.planner.report.text import Detail, Page
from xtrain.planner.units import bytes_text, seconds_text

MOST = 10


@frozen(kw_only=True)
class Sent:
    """All calls of one collective over one axis, whichever node they are for."""

    axis: str
    op: str
    exposed: bool
    nodes: tuple[str, ...]
    count: int
    bytes: int
    seconds: float | None


def busiest(plan: Plan) -> RankClass:
    """The class that spends most time on communication; where times are not known, the one that sends most."""
    return max(
        plan.estimates.classes, key=lambda each: (sum(t.seconds or 0.0 for t in each.traffic), _bytes(each.traffic))
    )


def _bytes(traffic: Iterable[Traffic]) -> int:
    return sum(each.bytes for each in traffic)


def gather(traffic: Iterable[Traffic]) -> list[Sent]:
    """Calls of the same kind together: what is exposed first, and of that what takes longest."""
    kinds: dict[tuple[str, str, bool], list[Traffic]] = {}
    for each in traffic:
        kinds.setdefault((each.axis, each.op, each.exposed), []).append(each)
    found = []
    for (axis, op, exposed), calls in kinds.items():
        known = [each.seconds for each in calls if each.seconds is not None]
        found.append(
            Sent(
                axis=axis,
                op=op,
                exposed=exposed,
                nodes=tuple(dict.fromkeys(each.node for each in calls)),
                count=sum(each.count for each in calls),
                bytes=_bytes(calls),
                seconds=sum(known) if len(known) == len(calls) else None,
            )
        )
    return sorted(found, key=lambda each: (not each.exposed, -(each.seconds or 0.0), -each.bytes))


def axis_text(mesh: Mesh, axis: str) -> str:
    """An axis, or several joined; `every rank` where they are all that have more than one."""
    wide = [each.name for each in mesh.axes if each.size > 1]
    return "every rank" if len(wide) > 1 and axis.split(" · ") == wide else axis


def show_communication(page: Page, plan: Plan, detail: Detail) -> None:
    """A line for every axis and collective; what nothing is computed beside comes first."""
    if plan.mesh.world_size == 1:
        return
    if not any(each.traffic for each in plan.estimates.classes):
        page.heading("COMMUNICATION", "unknown: not estimated")
        return
    chosen = list(plan.estimates.classes) if detail.full else [busiest(plan)]
    for one in chosen:
        most = "takes longest" if all(each.seconds is not None for each in one.traffic) else "sends most"
        which = ranks_text(plan, one.pp) + (f", which {most}" if len(plan.estimates.classes) > len(chosen) else "")
        page.heading("COMMUNICATION", f"of one rank in one step: {which}")
        _table(page, plan, one, detail)


def _table(page: Page, plan: Plan, one: RankClass, detail: Detail) -> None:
    sent, seen = gather(one.traffic), _traced(plan, one.pp)
    most = detail.most(MOST)
    head = ("axis", "op", "calls", "bytes", "time", "", "over", "for")
    rows = [head if seen is None else (*head[:-1], "traced")]
    rows += [_row(plan, each, _last(plan, each, one, seen)) for each in sent[:most]]
    page.table(rows, align="<<>>>", styles=("cyan", "", "", "", "", "", "", "dim"))
    rest, known = sent[most:], all(each.seconds is not None for each in sent)
    if rest:
        page.line(
            f"  and {len(rest)} more, {bytes_text(sum(each.bytes for each in rest))}: --part communication", "dim"
        )
    total = f"{bytes_text(_bytes(one.traffic))} in {sum(each.count for each in sent):,} calls"
    if known:
        exposed = sum(each.seconds or 0.0 for each in sent if each.exposed)
        total += (
            f", {seconds_text(sum(each.seconds or 0.0 for each in sent))}, of which exposed {seconds_text(exposed)}"
        )
    else:
        total += f"; time unknown: {no_times(plan)}"
    page.line(f"  all: {total}", "bold")


def _last(plan: Plan, each: Sent, one: RankClass, seen: dict[tuple[Ranks, str], tuple[int, int]] | None) -> str:
    """The nodes that calls are for; with a trace, whether it saw as much between the same ranks."""
    if seen is None:
        return ", ".join(node.removeprefix("setup.parallel.").removeprefix("setup.") for node in each.nodes)
    kind = plan.mesh.group(each.axis), each.op
    planned, (calls, size) = sums_of_groups(plan.mesh, one.traffic)[kind], seen.get(kind, (0, 0))
    if (calls, size) == planned:
        return "the same"
    return f"{'' if planned == (each.count, each.bytes) else 'together '}{calls:,} calls, {bytes_text(size)}"


def _row(plan: Plan, each: Sent, last: str) -> tuple[str, ...]:
    return (
        axis_text(plan.mesh, each.axis),
        each.op,
        f"{each.count:,}",
        bytes_text(each.bytes),
        "unknown" if each.seconds is None else seconds_text(each.seconds),
        "exposed" if each.exposed else "overlapped",
        "network" if crosses_nodes(plan.mesh, each.axis) else "link",
        last,
    )


def _traced(plan: Plan, pp: int) -> dict[tuple[Ranks, str], tuple[int, int]] | None:
    """(calls, bytes) of every group and collective that a trace saw on a pipeline coordinate; None without a trace."""
    traced = next((each for each in plan.traced if each.pp == pp), None)
    return None if traced is None else sums_of_groups(plan.mesh, traced.traffic)
