"""The part of the page about memory: what the ranks of every pipeline coordinate hold at the peak of a step."""

from itertools import groupby
from shlex import quote
from typing import Final

import attrs

from xtrain.planner.costs.headroom import headroom, ranks_text
from xtrain.planner.plan import Memory, Plan, RankClass
from xtrain.planner.report.text import Detail, Page
from xtrain.planner.units import WIDTH, bytes_text, seconds_text

CATEGORIES: Final = tuple(each.name for each in attrs.fields(Memory) if each.type is int)
SHORT: Final = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim.",
    "averages": "ema",
    "activations": "activ.",
}
MEANING: Final = (
    ("params, grads, optim.", "the rank's shards of parameters, gradients and what the optimizer keeps for each"),
    ("ema", "averaged weights"),
    ("unsharded", "parameters that fsdp has gathered, at most at the same time"),
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
    """A line for every kind of rank, the trace beside it where there is one; then the verdict."""
    classes, room = plan.estimates.classes, headroom(plan)
    unit, size = next((u for u in UNITS if room.worst.memory.total_bytes >= u[1]), UNITS[-1])
    offloaded = any(each.memory.offloaded for each in classes)
    host = "; params, grads, optim. in host memory, not in total" if offloaded else ""
    peak = "forward_backward" if plan.serves else "step"
    page.heading("MEMORY", f"{unit} on a rank at the peak of a {peak}{host}")
    used = [each for each in CATEGORIES if any(getattr(memory, each) for memory in _memories(plan))]
    rows: list[tuple[str, ...]] = [("", *(SHORT.get(each) or each for each in used), "total")]
    groups = [list(group) for _, group in groupby(classes, key=lambda each: each.memory)]
    shown = _chosen(groups, room.worst, detail.most(MOST_CLASSES))
    for name, each in ((_name(plan, members), members[0]) for members in shown):
        rows.append((name, *_cells(each.memory, used, size)))
        rows += [("  traced", *_cells(t.memory, used, size, traced=True)) for t in plan.traced if t.pp == each.pp]
    page.table(rows, align="<" + ">" * (len(used) + 1), styles=("cyan",))
    styles = {"fits": "green", "tight": "yellow", "does not fit": "red", "unknown": "dim"}
    page.more(len(groups) - len(shown), "memory")
    if detail.full:  # else it stands at the top of the page
        page.line(f"  {page.paint(room.verdict, styles[room.verdict])}: {room.text}")
    _remedies(page, plan)
    if detail.full:
        page.described(MEANING)


def _remedies(page: Page, plan: Plan) -> None:
    """What would make the fullest rank hold less, and what that does to a step."""
    if not plan.estimates.remedies:
        return
    device, times = plan.cluster.memory_bytes, plan.estimates.times
    page.line("  the fullest rank would hold less with")
    rows = []
    for each in plan.estimates.remedies:
        share = f" ({each.memory_bytes / device:.0%})" if device else ""
        took = "a step takes unknown time"
        if each.seconds is not None and times is not None:
            took = f"a step takes {seconds_text(each.seconds)}, {each.seconds / times.step - 1:+.0%}"
        rows.append(([f"--set {quote(text)}" for text in each.sets], f"{bytes_text(each.memory_bytes)}{share}", took))
    room = WIDTH - len("  " + "  " + "  " + "  ") - sum(max(len(row[column]) for row in rows) for column in (1, 2))
    lines = []
    for sets, *figures in rows:
        first, *rest = _joined(sets, room)
        lines += [("  " + first, *figures), *(("  " + more, "", "") for more in rest)]
    page.table(lines, align="<>", styles=("cyan",))


def _joined(words: list[str], room: int) -> list[str]:
    """Words in lines of at most `room` columns; a word stays whole."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) <= room:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines


def _memories(plan: Plan) -> list[Memory]:
    return [*(each.memory for each in plan.estimates.classes), *(each.memory for each in plan.traced)]


def _cells(memory: Memory, used: list[str], size: int, *, traced: bool = False) -> list[str]:
    """Numbers in one unit; what a trace cannot see is left open."""
    parts = ["–" if traced and each == "reserve" else _number(getattr(memory, each), size) for each in used]
    return [*parts, _number(memory.total_bytes, size)]


def _number(count: int, size: int) -> str:
    value = count / size
    return "0" if count == 0 else f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _chosen(groups: list[list[RankClass]], worst: RankClass, most: int) -> list[list[RankClass]]:
    """Of many lines the worst, the ends and some others; neighbours that hold the same are one line."""
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
