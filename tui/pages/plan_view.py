"""Plan screen as rows: the list, one node in full, step time by node, and keys."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from attrs import evolve, field, frozen

from xtrain.text.units import brief, duration, number, plural, size
from xtrain.tui.model.planned import PlannedNode
from xtrain.tui.pages.node_times import due
from xtrain.tui.pages.plan_rows import (
    SHARE,
    TIME,
    Line,
    ListSection,
    PlanFacts,
    columns,
    due_words,
    headline,
    line_row,
    lines,
    percent,
)
from xtrain.tui.pages.sheet import (
    Row,
    bar,
    beside,
    block,
    clipped,
    fit,
    labelled,
    left,
    right,
    row,
    rule,
    scrolled,
    window,
    wrapped,
)

LABEL = 9


def node_rows(node: PlannedNode, facts: PlanFacts, width: int) -> list[Row]:
    """Return everything known about a node, in as many rows as needed."""
    rows = [rule(node.id, width, node.kind)]
    rows += [row((line, "")) for line in wrapped(node.does, width)]
    for label, text, style in (*_facts(node, facts), *((*pair, "") for pair in _plan(node, facts))):
        rows += labelled(label, text, width, max(LABEL, len(label) + 1), style)
    if node.args:
        rows.append(rule("arguments", width))
        for name, text in arguments(node.args):
            rows += [row((line, "")) for line in wrapped(f"{name} = {text}", width, "  ")]
    return [fit(each, width) for each in rows]


def _facts(node: PlannedNode, facts: PlanFacts) -> Iterator[tuple[str, str, str]]:
    """Yield the recorded facts of a node: label, text, style."""
    if ranks := facts.now_in.get(node.id):
        which = "" if facts.ranks == 1 else f" on {len(ranks):,} of {plural(facts.ranks, 'rank')}"
        yield "now", f"under way{which}", "mark"
    if (step := facts.step.get(node.id)) is not None:
        text = f"{brief(step.slowest)} on rank {step.slowest_rank:,}"
        if step.ranks > 1:
            text += f", the slowest; {brief(step.median)} on the median of {step.ranks:,}"
        yield "takes", f"{text}; {percent(step.share)} of a step", ""
    took = facts.took(node.id)
    if took is not None and took.seconds is not None:
        after = f", after step {took.step:,}" if took.step is not None and node.id not in facts.setup else ""
        yield "took", f"{brief(took.seconds)}{after}", ""
    elif took is not None and took.began is not None and not facts.over:
        yield "since", duration(facts.now - took.began), "mark"


def _plan(node: PlannedNode, facts: PlanFacts) -> Iterator[tuple[str, str]]:
    """Yield the node's place in the plan."""
    if node.id in facts.arranged.ticks:
        every = [f"every {each}" for each in _periods(node, facts)]
        first = due_words(node.id, facts)[0]
        yield "due", first if len(every) == 1 else f"{first}; {', '.join(every)}"
    for when in facts.arranged.when.get(node.id, ()):
        yield "when", when
    if node.op != node.id:
        yield "op", node.op
    if node.axes:
        sizes = {axis.name: axis.size for axis in (*facts.plan.axes, *facts.plan.expert_axes)}
        yield "axes", ", ".join(f"{name} {sizes[name]}" if name in sizes else name for name in node.axes)
    for edge in facts.arranged.before.get(node.id, ()):
        yield "after", f"{edge.before}: {edge.data}" if edge.data else edge.before
    for edge in facts.arranged.after.get(node.id, ()):
        yield "before", f"{edge.after}: {edge.data}" if edge.data else edge.after
    yield from _traffic(node, facts)


def _periods(node: PlannedNode, facts: PlanFacts) -> Iterator[str]:
    for tick in facts.arranged.ticks.get(node.id, ()):
        times = "" if tick.count is None else f", {tick.count:,} times"
        yield due(tick, facts.plan, step=facts.ended, pace=None).every + times


def _traffic(node: PlannedNode, facts: PlanFacts) -> Iterator[tuple[str, str]]:
    """Yield the traffic of this node in a step, for one rank of the first pipeline coordinate that sends something."""
    for found in facts.plan.classes:
        own = [each for each in found.traffic if each.node == node.id]
        for each in own:
            time = "" if each.seconds is None else f", {brief(each.seconds)}"
            beside = "exposed" if each.exposed else "overlapped"
            of = f", on ranks with pp {found.pp}" if len(facts.plan.classes) > 1 else ""
            yield "planned", f"{each.count:,} {each.op} over {each.axis}, {size(each.bytes)}{time}, {beside}{of}"
        if own:
            return


def arguments(args: Any) -> Iterator[tuple[str, str]]:
    """Yield arguments by name, as JSON."""
    for name, value in args.items():
        yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def breakdown_rows(facts: PlanFacts, width: int, height: int) -> list[Row]:
    """Return step times by node, longest first, with waiting for data and communication highlighted, next to the plan;
    in at most `height` rows, the last of which counts the nodes left out."""
    cost = facts.cost
    over = max((each.ranks for each in facts.step.values()), default=0)
    rows = [rule("step time by node", width, f"mean of {over:,} ranks" if over > 1 else "")]
    if cost.actual is None and not facts.step:
        return [*rows, row(("no step has been logged yet", "dim"))][:height]
    rows += _against_plan(facts, width)
    named = [
        ("data wait", cost.data, cost.share(cost.data)),
        ("communication", cost.communication, cost.share(cost.communication)),
    ]
    nodes = sorted(facts.step.values(), key=lambda each: -each.mean)
    name_width = min(max([len(each.node) for each in nodes] + [13]), max(13, width - TIME - SHARE - 8))
    called = [
        _bar_row(name, seconds, share, name_width, width, "warn" if (share or 0) >= 0.3 else "")
        for name, seconds, share in named
        if seconds is not None
    ]
    room = height - len(rows) - len(called) - (1 if called else 0)
    listed = nodes if len(nodes) <= room else nodes[: max(0, room - 1)]
    rows += [_bar_row(each.node, each.mean, each.share, name_width, width, "") for each in listed]
    if len(listed) < len(nodes):
        rest = nodes[len(listed) :]
        rows.append(
            _bar_row(
                plural(len(rest), "more node"),
                sum(each.mean for each in rest),
                sum(each.share for each in rest),
                name_width,
                width,
                "dim",
            )
        )
    if called:
        rows.append(row(("of this on the rank with the most:", "dim")))
        rows += called
    return [fit(each, width) for each in rows[:height]]


def _against_plan(facts: PlanFacts, width: int) -> list[Row]:
    cost, times = facts.cost, facts.cost.planned
    if cost.actual is None:
        return []
    text = f"{brief(cost.actual)} a step"
    if cost.over is None:
        return [row((line, "")) for line in wrapped(f"{text}; no planned time: the cluster is unknown", width)]
    near = (
        "as planned" if abs(cost.over) < 0.005 else f"{abs(cost.over):.0%} {'longer' if cost.over > 0 else 'shorter'}"
    )
    planned = f"planned {brief(times.step)}"
    if times.fast is not None and times.slow is not None:
        planned += f", {brief(times.fast)} to {brief(times.slow)}"
    late = times.slow is not None and cost.actual > times.slow
    rows = [row((line, "warn" if late else "bold")) for line in wrapped(f"{text}, {near} ({planned})", width)]
    if times.computing is not None and times.exposed is not None:
        parts = f"planned: computing {brief(times.computing)}, exposed communication {brief(times.exposed)}"
        rows += [row((line, "dim")) for line in wrapped(parts, width)]
    return rows


def _bar_row(name: str, seconds: float | None, share: float | None, name_width: int, width: int, style: str) -> Row:
    bar_width = width - name_width - TIME - SHARE - 3
    spans = [(left(name, name_width), style), " ", (right(brief(seconds), TIME), style), " "]
    spans.append((right("–" if number(share) is None else percent(share or 0.0), SHARE), style))
    if bar_width >= 4:
        spans.append((f" {bar(share, bar_width)}", "bar"))
    return row(*spans)


# From this width, list and details are side by side; below it, from this height, one above the other.
SIDE_BY_SIDE = 112
STACKED = 17
# Side by side, node and breakdown both have room from this height.
BOTH = 22

Shows = Literal["list", "node", "time"]


@frozen(kw_only=True)
class PlanView:
    """The reader's choices. cursor: id of a node, or `#kind` for a heading; empty for the first line. top: the first
    line shown. shows: the part that fills the screen without room for all; `node` and `time` are full pages that
    `scroll` moves. timing: the part next to the list shows step times, not the node."""

    cursor: str = ""
    top: int = 0
    folded: frozenset[str] = frozenset()
    query: str = ""
    shows: Shows = "list"
    timing: bool = False
    scroll: int = 0


@frozen(kw_only=True)
class PlanPage:
    """Drawn rows, and the facts that keys need: lines of the list, index of the chosen one, rows and columns of the
    list below the headline, whether another part (node or step times) is next to or below it, and how far a full
    page can be scrolled."""

    rows: list[Row] = field(repr=False)
    view: PlanView
    lines: tuple[Line, ...] = field(repr=False)
    chosen: int = 0
    height: int = 1
    list_width: int = 0
    beside: bool = False
    most_scroll: int = 0


def key_of(line: Line) -> str:
    """Return the cursor value of a line."""
    return f"#{line.kind}" if isinstance(line, ListSection) else line.id


def page(facts: PlanFacts, view: PlanView, width: int, height: int) -> PlanPage:
    """Return the screen in exactly `height` rows of `width` cells. The cursor of the returned view is on a line."""
    shown = tuple(lines(facts.arranged, query=view.query, folded=view.folded))
    chosen = next((place for place, line in enumerate(shown) if key_of(line) == view.cursor), None)
    if chosen is None:  # hidden by folding or a search: use the first visible node
        chosen = next((place for place, line in enumerate(shown) if not isinstance(line, ListSection)), 0)
    view = evolve(view, cursor=key_of(shown[chosen]) if shown else "")
    line = shown[chosen] if shown else None
    node = line if isinstance(line, PlannedNode) else None
    drawn = partial(PlanPage, lines=shown, chosen=chosen)
    if view.shows != "list":
        rows = node_rows(node, facts, width) if node else []
        if view.shows == "time":
            rows = breakdown_rows(facts, width, max(height - 1, len(facts.step) + 12))
        rows, scroll, most = scrolled(rows, view.scroll, width, height)
        return drawn(rows=rows, view=evolve(view, scroll=scroll), height=height - 1, most_scroll=most)
    head = headline(facts, sum(not isinstance(each, ListSection) for each in shown), view.query, width)
    body = height - 1
    if width >= SIDE_BY_SIDE:
        list_width = max(66, width * 58 // 100)
        rows, view = _list(facts, view, shown, chosen, list_width, body)
        rows = beside(rows, _side(facts, view, line, width - list_width - 3, body))
        return drawn(rows=[head, *rows], view=view, height=body, list_width=list_width, beside=body < BOTH)
    if height >= STACKED:
        below = max(7, height * 42 // 100)
        rows, view = _list(facts, view, shown, chosen, width, body - below)
        rows += _beside(facts, line, width, below, timing=view.timing)
        return drawn(rows=[head, *rows], view=view, height=body - below, list_width=width, beside=True)
    rows, view = _list(facts, view, shown, chosen, width, body - 1)
    foot = fit(row((node.does if node else "", "dim")), width)
    return drawn(rows=[head, *rows, foot], view=view, height=max(1, body - 1), list_width=width)


def _list(
    facts: PlanFacts, view: PlanView, shown: tuple[Line, ...], chosen: int, width: int, height: int
) -> tuple[list[Row], PlanView]:
    top = window(len(shown), height, view.top, chosen)
    room = columns(facts, width)
    rows = [
        line_row(shown[place], facts, room, width, chosen=place == chosen)
        for place in range(top, min(len(shown), top + height))
    ]
    if not shown:
        rows = [row((f"no node has “{view.query}”", "dim"))]
    return block(rows, width, height), evolve(view, top=top)


def _side(facts: PlanFacts, view: PlanView, line: Line | None, width: int, height: int) -> list[Row]:
    if height < BOTH:
        return _beside(facts, line, width, height, timing=view.timing)
    needed = len(facts.step) + 8
    below = min(max(8, needed), height // 2)
    return [
        *_beside(facts, line, width, height - below, timing=False),
        *block(breakdown_rows(facts, width, below), width, below),
    ]


def _beside(facts: PlanFacts, line: Line | None, width: int, height: int, *, timing: bool) -> list[Row]:
    if timing:
        return block(breakdown_rows(facts, width, height), width, height)
    return clipped(node_rows(line, facts, width) if isinstance(line, PlannedNode) else [], width, height)


def moved(page: PlanPage, by: int) -> PlanView:
    """Move the cursor `by` lines down, or scroll the full page."""
    view = page.view
    if view.shows != "list":
        return evolve(view, scroll=max(0, min(view.scroll + by, page.most_scroll)))
    if not page.lines:
        return view
    place = max(0, min(page.chosen + by, len(page.lines) - 1))
    return evolve(view, cursor=key_of(page.lines[place]))


def to_section(page: PlanPage, by: int) -> PlanView:
    """Move the cursor to the next heading, or to the previous one."""
    heads = [place for place, line in enumerate(page.lines) if isinstance(line, ListSection)]
    ahead = [place for place in heads if place > page.chosen] if by > 0 else [p for p in heads if p < page.chosen][::-1]
    return moved(page, ahead[0] - page.chosen) if ahead else moved(page, len(page.lines) * by)


def fold(page: PlanPage, folded: bool) -> PlanView:
    """Fold or unfold the cursor's section; the cursor moves to its heading."""
    if not page.lines or page.view.query or page.view.shows != "list":
        return page.view
    kind = page.lines[page.chosen].kind
    sections = page.view.folded | {kind} if folded else page.view.folded - {kind}
    cursor = f"#{kind}" if folded else page.view.cursor
    return evolve(page.view, folded=sections, cursor=cursor)


def entered(page: PlanPage) -> PlanView:
    """Handle Enter: show a node in full, or fold or unfold a section."""
    if page.view.shows != "list" or not page.lines:
        return evolve(page.view, shows="list", scroll=0)
    line = page.lines[page.chosen]
    if isinstance(line, ListSection):
        return fold(page, folded=not line.folded)
    return evolve(page.view, shows="node", scroll=0)


def to_node(view: PlanView, facts: PlanFacts, node: str) -> PlanView:
    """Move the cursor to a node, despite folding or a search."""
    kind = next((kind for kind, nodes in facts.arranged.nodes.items() if any(n.id == node for n in nodes)), None)
    if kind is None:
        return view
    return evolve(view, cursor=node, query="", shows="list", folded=view.folded - {kind})


def followed(view: PlanView, facts: PlanFacts) -> PlanView:
    """Move the cursor to the node that most ranks are running."""
    if not facts.now_in:
        return view
    return to_node(view, facts, max(facts.now_in, key=lambda node: len(facts.now_in[node])))
