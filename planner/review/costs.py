"""Parts of the page about memory, communication and time, and the check of estimates against a trace."""

from collections.abc import Iterable
from itertools import groupby
from shlex import quote
from typing import Final

import attrs
from attrs import evolve

from xtrain.lazy_attrs import frozen
from xtrain.plan.estimates import Memory, RankClass, Times, Traffic
from xtrain.plan.plan import Check, Mesh, Plan, Status, Traced
from xtrain.plan.views import headroom, no_times, ranks_text
from xtrain.planner.review.mesh import crosses_nodes
from xtrain.text.page import Detail, Page
from xtrain.text.units import WIDTH, bytes_text, count_text, flops_text, rate_text, seconds_text

CATEGORIES: Final = tuple(field.name for field in attrs.fields(Memory) if field.type is int)
SHORT: Final = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim.",
    "averages": "ema",
    "activations": "activ.",
}
MEANING: Final = (
    ("params, grads, optim.", "the rank's shards of parameters, gradients and optimizer state"),
    ("ema", "averaged weights"),
    ("unsharded", "parameters gathered by fsdp, at their peak"),
    ("unreduced", "unsharded gradients that fsdp accumulates before it reduces them"),
    ("activ.", "activations saved for the backward, of all microbatches in flight"),
    ("loss", "activations of the output head"),
    ("working", "temporary tensors while a block or a chunk of the loss is computed"),
    ("reserve", "CUDA context, communication buffers and fragmentation"),
    ("host", "in host memory, not in total"),
)
MOST_CLASSES = 6
UNITS: Final = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def show_memory(page: Page, plan: Plan, detail: Detail) -> None:
    """Show a line for every kind of rank, with its trace if there is one, then the verdict."""
    classes, room = plan.estimates.classes, headroom(plan)
    unit, size = next((u for u in UNITS if room.worst.memory.total_bytes >= u[1]), UNITS[-1])
    offloaded = any(one.memory.offloaded for one in classes)
    host = "; params, grads, optim. in host memory, not in total" if offloaded else ""
    peak = "forward_backward" if plan.serves else "step"
    page.heading("MEMORY", f"{unit} on a rank at the peak of a {peak}{host}")
    used = [name for name in CATEGORIES if any(getattr(one.memory, name) for one in (*classes, *plan.traced))]
    rows: list[tuple[str, ...]] = [("", *(SHORT.get(name) or name for name in used), "total")]
    groups = [list(group) for _, group in groupby(classes, key=lambda one: one.memory)]
    shown = _chosen(groups, room.worst, detail.most(MOST_CLASSES))
    for name, first in ((_name(plan, members), members[0]) for members in shown):
        rows.append((name, *_cells(first.memory, used, size)))
        rows += [("  traced", *_cells(t.memory, used, size, traced=True)) for t in plan.traced if t.pp == first.pp]
    page.table(rows, align="<" + ">" * (len(used) + 1), styles=("cyan",))
    styles = {"fits": "green", "tight": "yellow", "does not fit": "red", "unknown": "dim"}
    page.more(len(groups) - len(shown), "memory")
    if detail.full:  # otherwise it is shown at the top of the page
        page.line(f"  {page.paint(room.verdict, styles[room.verdict])}: {room.text}")
    _remedies(page, plan)
    if detail.full:
        page.described(MEANING)


def _remedies(page: Page, plan: Plan) -> None:
    """Show changes that reduce memory on the fullest rank, and their effect on a step."""
    if not plan.estimates.remedies:
        return
    device, times = plan.cluster.memory_bytes, plan.estimates.times
    page.line("  the fullest rank would hold less with")
    rows = []
    for remedy in plan.estimates.remedies:
        share = f" ({remedy.memory_bytes / device:.0%})" if device else ""
        took = "step time unknown"
        if remedy.seconds is not None and times is not None:
            took = f"a step takes {seconds_text(remedy.seconds)}, {remedy.seconds / times.step - 1:+.0%}"
        rows.append(
            ([f"--set {quote(text)}" for text in remedy.sets], f"{bytes_text(remedy.memory_bytes)}{share}", took)
        )
    room = WIDTH - len("  " + "  " + "  " + "  ") - sum(max(len(row[column]) for row in rows) for column in (1, 2))
    lines = []
    for sets, *figures in rows:
        first, *rest = _joined(sets, room)
        lines += [("  " + first, *figures), *(("  " + more, "", "") for more in rest)]
    page.table(lines, align="<>", styles=("cyan",))


def _joined(words: list[str], room: int) -> list[str]:
    """Return words in lines of at most `room` columns; words are not broken."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) <= room:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines


def _cells(memory: Memory, used: list[str], size: int, *, traced: bool = False) -> list[str]:
    """Return numbers in one unit; cells that a trace cannot measure are `–`."""
    parts = ["–" if traced and name == "reserve" else _number(getattr(memory, name), size) for name in used]
    return [*parts, _number(memory.total_bytes, size)]


def _number(count: int, size: int) -> str:
    value = count / size
    return "0" if count == 0 else f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _chosen(groups: list[list[RankClass]], worst: RankClass, most: int) -> list[list[RankClass]]:
    """Return the worst line, the ends and some others if there are many; equal neighbors share a line."""
    if len(groups) <= most:
        return groups
    holder = next(number for number, group in enumerate(groups) if worst in group)
    order = dict.fromkeys((holder, 0, len(groups) - 1, *range(len(groups))))
    return [groups[number] for number in sorted(list(order)[:most])]


def _name(plan: Plan, members: list[RankClass]) -> str:
    first, last = members[0].pp, members[-1].pp
    if plan.mesh.size("pp") == 1:
        return ranks_text(plan, first)
    return f"pp {first}" if first == last else f"pp {first} to {last}"


TOLERANCE: Final = 0.10
# share of everything that a rank holds or sends; smaller amounts do not matter, however far they are off
NEGLIGIBLE: Final = 1e-3
PREFIX: Final = "trace."

Ranks = tuple[int, ...]


@frozen(kw_only=True)
class TraceComparison:
    """One figure from estimate and trace on one rank; `whole` is the total that it is part of."""

    rank: int
    closed: int
    traced: int
    whole: int

    @property
    def apart(self) -> float:
        """Difference as a share of the larger value; 0 if negligible."""
        difference = abs(self.closed - self.traced)
        return difference / max(self.closed, self.traced) if difference > NEGLIGIBLE * self.whole else 0.0


def ranks_to_trace(plan: Plan) -> tuple[int, ...]:
    """Return the first rank of every pipeline coordinate, but only one of neighbors with equal estimates."""
    distinct: list[RankClass] = []
    for one in plan.estimates.classes:
        if not distinct or evolve(one, pp=distinct[-1].pp) != distinct[-1]:
            distinct.append(one)
    size = plan.mesh.world_size // plan.mesh.size("pp")
    return tuple(one.pp * size for one in distinct)


def with_trace(plan: Plan, traced: tuple[Traced, ...]) -> Plan:
    """Return the plan with its trace and the checks that compare it with the estimates."""
    own = tuple(check for check in plan.checks if not check.id.startswith(PREFIX))
    return evolve(plan, traced=traced, checks=(*own, *agreement(evolve(plan, traced=traced))))


def agreement(plan: Plan) -> tuple[Check, ...]:
    """Return a check for each figure, with the rank on which estimate and trace differ most; it warns beyond
    TOLERANCE."""
    pairs = [(traced, one) for traced in plan.traced for one in plan.estimates.classes if one.pp == traced.pp]
    if not pairs:
        return ()
    compiled = any(node.op == "setup.compile" for node in plan.nodes)
    return (*_memory(pairs, compiled), *_traffic(plan.mesh, pairs))


def _memory(pairs: list[tuple[Traced, RankClass]], compiled: bool) -> Iterable[Check]:
    """Yield checks of memory at the peak. The reserve is outside tensors, so no trace sees it; a trace runs compiled
    blocks operation by operation, with more activations and temporary tensors."""
    for name in CATEGORIES:
        if name == "reserve" or (compiled and name in ("activations", "working")):
            continue
        comparisons = [
            TraceComparison(
                rank=traced.rank,
                closed=getattr(one.memory, name),
                traced=getattr(traced.memory, name),
                whole=traced.memory.total_bytes,
            )
            for traced, one in pairs
        ]
        if any(one.closed or one.traced for one in comparisons):
            yield _check(f"memory.{name}", comparisons)


def _traffic(mesh: Mesh, pairs: list[tuple[Traced, RankClass]]) -> Iterable[Check]:
    """Yield checks of calls and bytes by group of ranks: a trace cannot distinguish axes with the same ranks, such as
    tp 2 and ep 2."""
    sums = [(traced, sums_of_groups(mesh, one.traffic), sums_of_groups(mesh, traced.traffic)) for traced, one in pairs]
    names = _axes_of_groups(mesh, (call for traced, _ in pairs for call in traced.traffic))
    names |= _axes_of_groups(mesh, (call for _, one in pairs for call in one.traffic))
    for kind, axes in names.items():
        bytes_found, calls_found = [], []
        for traced, planned, seen in sums:
            (calls, size), (calls_seen, size_seen) = planned.get(kind, (0, 0)), seen.get(kind, (0, 0))
            whole_calls, whole = map(sum, zip((0, 0), *seen.values(), strict=True))
            calls_found.append(TraceComparison(rank=traced.rank, closed=calls, traced=calls_seen, whole=whole_calls))
            bytes_found.append(TraceComparison(rank=traced.rank, closed=size, traced=size_seen, whole=whole))
        yield _check(f"traffic.{'_or_'.join(axes)}.{kind[1]}".replace(" · ", "_"), bytes_found, calls_found)


def _axes_of_groups(mesh: Mesh, traffic: Iterable[Traffic]) -> dict[tuple[Ranks, str], dict[str, None]]:
    axes: dict[tuple[Ranks, str], dict[str, None]] = {}
    for call in traffic:
        axes.setdefault((mesh.group(call.axis), call.op), {})[call.axis] = None
    return axes


def sums_of_groups(mesh: Mesh, traffic: Iterable[Traffic]) -> dict[tuple[Ranks, str], tuple[int, int]]:
    """Return (calls, bytes) by group of ranks, as in `Mesh.group`, and op."""
    sums: dict[tuple[Ranks, str], tuple[int, int]] = {}
    for call in traffic:
        kind = mesh.group(call.axis), call.op
        calls, size = sums.get(kind, (0, 0))
        sums[kind] = calls + call.count, size + call.bytes
    return sums


def _check(id: str, sizes: list[TraceComparison], counts: list[TraceComparison] | None = None) -> Check:
    size = max(sizes, key=lambda comparison: comparison.apart)
    text = f"formula {bytes_text(size.closed)}, trace {bytes_text(size.traced)}"
    apart = size.apart
    if counts is not None:
        count = max(counts, key=lambda comparison: comparison.apart)
        text += f"; {count.closed:,} calls, {count.traced:,}"
        apart = max(apart, count.apart)
    status: Status = "warn" if apart > TOLERANCE else "pass"
    text += f" on rank {size.rank:,}" + (f", {apart:.0%} apart" if apart > 0 else "")
    return Check(id=f"{PREFIX}{id}", status=status, evidence=text)


MOST = 10


@frozen(kw_only=True)
class Sent:
    """All calls of one collective over one axis, for any node."""

    axis: str
    op: str
    exposed: bool
    nodes: tuple[str, ...]
    count: int
    bytes: int
    seconds: float | None


def busiest(plan: Plan) -> RankClass:
    """Return the class that spends the most time on communication; without known times, the one that sends the most."""
    return max(
        plan.estimates.classes, key=lambda one: (sum(t.seconds or 0.0 for t in one.traffic), _bytes(one.traffic))
    )


def _bytes(traffic: Iterable[Traffic]) -> int:
    return sum(call.bytes for call in traffic)


def gather(traffic: Iterable[Traffic]) -> list[Sent]:
    """Group calls by kind: exposed calls first, and among those the longest first."""
    kinds: dict[tuple[str, str, bool], list[Traffic]] = {}
    for call in traffic:
        kinds.setdefault((call.axis, call.op, call.exposed), []).append(call)
    groups = []
    for (axis, op, exposed), calls in kinds.items():
        known = [call.seconds for call in calls if call.seconds is not None]
        groups.append(
            Sent(
                axis=axis,
                op=op,
                exposed=exposed,
                nodes=tuple(dict.fromkeys(call.node for call in calls)),
                count=sum(call.count for call in calls),
                bytes=_bytes(calls),
                seconds=sum(known) if len(known) == len(calls) else None,
            )
        )
    return sorted(groups, key=lambda call: (not call.exposed, -(call.seconds or 0.0), -call.bytes))


def axis_text(mesh: Mesh, axis: str) -> str:
    """Return an axis, or several joined, as text; `every rank` if they are all axes with several ranks."""
    wide = [one.name for one in mesh.axes if one.size > 1]
    return "every rank" if len(wide) > 1 and axis.split(" · ") == wide else axis


def show_communication(page: Page, plan: Plan, detail: Detail) -> None:
    """Show a line for every axis and collective; exposed communication comes first."""
    if plan.mesh.world_size == 1:
        return
    if not any(one.traffic for one in plan.estimates.classes):
        page.heading("COMMUNICATION", "unknown: not estimated")
        return
    chosen = list(plan.estimates.classes) if detail.full else [busiest(plan)]
    for one in chosen:
        most = "takes longest" if all(call.seconds is not None for call in one.traffic) else "sends most"
        which = ranks_text(plan, one.pp) + (f", which {most}" if len(plan.estimates.classes) > len(chosen) else "")
        page.heading("COMMUNICATION", f"of one rank in one step: {which}")
        _table(page, plan, one, detail)


def _table(page: Page, plan: Plan, one: RankClass, detail: Detail) -> None:
    sent, seen = gather(one.traffic), _traced(plan, one.pp)
    most = detail.most(MOST)
    head = ("axis", "op", "calls", "bytes", "time", "", "over", "for")
    rows = [head if seen is None else (*head[:-1], "traced")]
    rows += [_row(plan, call, _last(plan, call, one, seen)) for call in sent[:most]]
    page.table(rows, align="<<>>>", styles=("cyan", "", "", "", "", "", "", "dim"))
    rest, known = sent[most:], all(call.seconds is not None for call in sent)
    if rest:
        page.line(
            f"  and {len(rest)} more, {bytes_text(sum(call.bytes for call in rest))}: --part communication", "dim"
        )
    total = f"{bytes_text(_bytes(one.traffic))} in {sum(call.count for call in sent):,} calls"
    if known:
        exposed = sum(call.seconds or 0.0 for call in sent if call.exposed)
        total += (
            f", {seconds_text(sum(call.seconds or 0.0 for call in sent))}, of which exposed {seconds_text(exposed)}"
        )
    else:
        total += f"; time unknown: {no_times(plan)}"
    page.line(f"  all: {total}", "bold")


def _last(plan: Plan, sent: Sent, one: RankClass, seen: dict[tuple[Ranks, str], tuple[int, int]] | None) -> str:
    """Return the nodes that calls are for; with a trace, whether it saw the same amount between the same ranks."""
    if seen is None:
        return ", ".join(node.removeprefix("setup.parallel.").removeprefix("setup.") for node in sent.nodes)
    kind = plan.mesh.group(sent.axis), sent.op
    planned, (calls, size) = sums_of_groups(plan.mesh, one.traffic)[kind], seen.get(kind, (0, 0))
    if (calls, size) == planned:
        return "the same"
    return f"{'' if planned == (sent.count, sent.bytes) else 'together '}{calls:,} calls, {bytes_text(size)}"


def _row(plan: Plan, sent: Sent, last: str) -> tuple[str, ...]:
    return (
        axis_text(plan.mesh, sent.axis),
        sent.op,
        f"{sent.count:,}",
        bytes_text(sent.bytes),
        "unknown" if sent.seconds is None else seconds_text(sent.seconds),
        "exposed" if sent.exposed else "overlapped",
        "network" if crosses_nodes(plan.mesh, sent.axis) else "link",
        last,
    )


def _traced(plan: Plan, pp: int) -> dict[tuple[Ranks, str], tuple[int, int]] | None:
    """Return (calls, bytes) of every group and collective that a trace saw on a pipeline coordinate; None without a
    trace."""
    traced = next((one for one in plan.traced if one.pp == pp), None)
    return None if traced is None else sums_of_groups(plan.mesh, traced.traffic)


# Nodes that add forwards to each step: by a teacher, or for a loss's reference.
OTHER_MODELS: Final = frozenset({"setup.teacher_model", "step.reference_point", "rollout.reference"})


def show_compute(page: Page, plan: Plan, detail: Detail) -> None:
    """Show the amount of computation and its duration; a range if devices are known only by their data sheet."""
    estimates, sequence = plan.estimates, plan.node("setup.loader").args["sequence"]
    world = plan.mesh.world_size
    attention = estimates.work.pair * estimates.work.pairs(sequence) // sequence / estimates.flops_per_token
    slowest = max(estimates.classes, key=lambda one: one.hardware_flops)
    page.heading("COMPUTE")
    each_rank = f"{flops_text(estimates.flops_per_step / world)} a rank"
    if again := slowest.hardware_flops - slowest.optimizer_flops - slowest.flops:
        each_rank += f"; {again / slowest.flops:.0%} more is recomputed"
        each_rank += ", or computed by other models" if any(node.op in OTHER_MODELS for node in plan.nodes) else ""
    if slowest.optimizer_flops:
        each_rank += f"; {slowest.optimizer_flops / slowest.flops:.1%} more by the optimizer"
    rows = [
        ("a token", flops_text(estimates.flops_per_token), f"{attention:.0%} of it attention"),
        ("a step", flops_text(estimates.flops_per_step), each_rank),
    ]
    if plan.cluster.flops:
        fp8 = estimates.work.position_fp8 * estimates.tokens_per_step
        bound = plan.cluster.at_usual_speed(estimates.flops_per_step, fp8) / (plan.cluster.flops * world)
        peak = rate_text(plan.cluster.flops, "FLOP/s")
        text = f"a step, if every device reached {peak} and never waited"
        if fp8 and plan.cluster.fp8_flops:
            share, faster = f"{fp8 / estimates.flops_per_step:.0%}", rate_text(plan.cluster.fp8_flops, "FLOP/s")
            text = f"a step at {peak}, the {share} in fp8 at {faster}, and no waiting"
        rows.append(("at best", seconds_text(bound), text))
    if estimates.times is None:
        rows.append(("a step takes", "unknown", no_times(plan)))
        if plan.mesh.size("pp") > 1:
            rows.append(("bubble", f"{estimates.bubble:.0%}", "of a step: pipeline bubble on the busiest rank"))
    else:
        rows += _times(plan, estimates.times)
    page.table(rows, align="<>", styles=("", "", "dim"))
    if detail.full:
        page.described([(name, text) for name, text in estimates.sources.items()])


def _times(plan: Plan, times: Times) -> list[tuple[str, str, str]]:
    low, high = plan.cluster.efficiency[0], plan.cluster.efficiency[-1]
    reached = f"{low:.0%}" if low == high else f"{low:.0%} to {high:.0%}"
    source = "from cluster.efficiency" if low == high else "an assumption"
    span = f"{seconds_text(times.fast)} to {seconds_text(times.slow)}" if times.fast != times.slow else ""
    if plan.cluster.measured is not None and plan.launch["device"] == "cpu" and low != high:
        source = "measured with a block of width 512"
    parts = [f"computing {seconds_text(times.computing)}", f"exposed communication {seconds_text(times.exposed)}"]
    if plan.mesh.size("pp") > 1:
        parts.append(f"bubble {plan.estimates.bubble:.0%} of the step")
    world = plan.mesh.world_size
    rows = [("a step takes", seconds_text(times.step), " + ".join(parts))]
    if times.label is not None:
        rows.append(("", "", f"{span}, {times.label} from the runs of {plan.cluster.calibration}"))
        rows += [("", "", text) for text in times.beyond]
    else:
        rows.append(("", "", f"{span}{span and ', '}devices at {reached} of their peak, {source}"))
    rows.append(
        (
            "tokens/s",
            count_text(times.tokens_per_second),
            f"{count_text(times.tokens_per_second / world)} a device; {_mfu(times)}",
        )
    )
    return rows


def _mfu(times: Times) -> str:
    low, high = times.mfu * times.step / times.slow, times.mfu * times.step / times.fast
    return f"MFU {times.mfu:.0%}" + (f", {low:.0%} to {high:.0%}" if times.fast != times.slow else "")
