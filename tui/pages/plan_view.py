"""The Plan screen as rows of text for a size, and what keys do to it."""

from typing import Literal

from attrs import evolve, field, frozen

from xtrain.tui.model.planned import PlannedNode
from xtrain.tui.pages.plan_facts import PlanFacts
from xtrain.tui.pages.plan_list import Line, ListSection, lines
from xtrain.tui.pages.plan_parts import breakdown_rows, node_rows
from xtrain.tui.pages.plan_rows import columns, headline, line_row
from xtrain.tui.pages.sheet import Row, beside, block, clipped, fit, row, scrolled, window

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
    if view.shows != "list":
        return _full(facts, view, shown, chosen, node, width, height)
    head = headline(facts, sum(not isinstance(each, ListSection) for each in shown), view.query, width)
    body = height - 1
    if width >= SIDE_BY_SIDE:
        list_width = max(66, width * 58 // 100)
        rows, view = _list(facts, view, shown, chosen, list_width, body)
        side = _side(facts, view, line, width - list_width - 3, body)
        return PlanPage(
            rows=[head, *beside(rows, side)], view=view, lines=shown, chosen=chosen,
            height=body, list_width=list_width, beside=body < BOTH,
        )  # fmt: skip
    if height >= STACKED:
        below = max(7, height * 42 // 100)
        rows, view = _list(facts, view, shown, chosen, width, body - below)
        side = _beside(facts, line, width, below, timing=view.timing)
        return PlanPage(
            rows=[head, *rows, *side], view=view, lines=shown, chosen=chosen,
            height=body - below, list_width=width, beside=True,
        )  # fmt: skip
    rows, view = _list(facts, view, shown, chosen, width, body - 1)
    does = node.does if node else ""
    foot = fit(row((does, "dim")), width)
    return PlanPage(
        rows=[head, *rows, foot], view=view, lines=shown, chosen=chosen, height=max(1, body - 1), list_width=width
    )


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


def _full(
    facts: PlanFacts,
    view: PlanView,
    shown: tuple[Line, ...],
    chosen: int,
    node: PlannedNode | None,
    width: int,
    height: int,
) -> PlanPage:
    """Return the page of one node or of the step times, on the whole screen."""
    if view.shows == "time":
        rows = breakdown_rows(facts, width, max(height - 1, len(facts.step) + 12))
    else:
        rows = node_rows(node, facts, width) if node else []
    drawn, scroll, most = scrolled(rows, view.scroll, width, height)
    view = evolve(view, scroll=scroll)
    return PlanPage(rows=drawn, view=view, lines=shown, chosen=chosen, height=height - 1, most_scroll=most)


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
