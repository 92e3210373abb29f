"""The Plan screen's list: a heading for every kind of node, and one row a node with its times."""

from attrs import frozen

from xtrain.tui.model.planned import PlannedNode
from xtrain.tui.pages.plan_facts import PlanFacts
from xtrain.tui.pages.plan_list import Line, ListSection
from xtrain.tui.pages.sheet import (
    CURSOR,
    DONE,
    FOLDED,
    OPEN,
    UNDER_WAY,
    Row,
    bar,
    cells,
    cut,
    fit,
    joined,
    left,
    restyled,
    right,
    row,
)
from xtrain.tui.words import brief, duration

TIME = 8
SHARE = 5
# Less than this of a sentence says nothing.
MIN_DOES = 24


@frozen(kw_only=True)
class PlanColumns:
    """Widths of the columns, in cells; 0 for one without room."""

    id: int
    second: int
    bar: int
    axes: int
    does: int

    @property
    def middle(self) -> int:
        """Total width of the second time, share and bar, used for a tick's due time."""
        return (self.second + 1 if self.second else 0) + SHARE + (self.bar + 1 if self.bar else 0)


def columns(facts: PlanFacts, width: int) -> PlanColumns:
    """Return the widest columns that fit `width`: times and share always, then full ids, then the rest."""
    longest = max(map(len, facts.arranged.ids), default=0)
    axes = max((len(" ".join(node.axes)) for node in facts.plan.nodes), default=0)
    axes = min(axes, 22)
    second = TIME if width >= 66 and facts.ranks > 1 else 0  # one rank has no median
    spare = width - 3 - (TIME + 1) - (second + 1 if second else 0) - SHARE - 1
    bar_width = 12 if width >= 90 else 8 if width >= 50 else 0
    id_width = min(longest, spare - (bar_width + 1 if bar_width else 0), 36)
    spare -= id_width
    if spare - bar_width - 2 < MIN_DOES:  # what nodes do has no room: bars may be as long as the row
        return PlanColumns(id=id_width, second=second, bar=max(0, spare - 1), axes=0, does=0)
    spare -= bar_width + 1
    axes_width = axes if axes and spare - axes - 2 >= MIN_DOES else 0
    spare -= axes_width + 1 if axes_width else 0
    return PlanColumns(id=id_width, second=second, bar=bar_width, axes=axes_width, does=spare - 1)


# By kind of node: titles of its time and second time, or the title that replaces second time, share and bar.
_LABELS = {"step": ("slowest", "median"), "tick": ("took", "next"), "event": ("took", "when")}


def line_row(line: Line, facts: PlanFacts, room: PlanColumns, width: int, *, chosen: bool) -> Row:
    """Return one line of the list in exactly `width` cells. chosen: the cursor is on it."""
    spans = _heading(line, room, alone=facts.ranks == 1) if isinstance(line, ListSection) else _node(line, facts, room)
    pointer = CURSOR if chosen else " "
    whole = fit(((pointer, "mark"), *spans), width)
    return restyled(whole, "cursor") if chosen else whole


def _heading(line: ListSection, room: PlanColumns, *, alone: bool) -> Row:
    sign = FOLDED if line.folded else OPEN
    number = f"{line.nodes:,}" if line.shown == line.nodes else f"{line.shown:,} of {line.nodes:,}"
    title = row((f"{sign} {line.title}", "title"), (f"  {number}", "dim"))
    first, second = _LABELS.get(line.kind, ("took", ""))
    first = "takes" if line.kind == "step" and alone else first
    start = 2 + room.id + 1
    if line.folded or cells(title) >= start + TIME - len(first):
        return title
    labels = right(first, TIME + start - cells(title)) + " "
    if line.kind in ("tick", "event"):
        return (*title, (labels + second, "dim"))
    labels += f"{right(second, room.second)} " if room.second else ""
    return (*title, (labels + right("share", SHARE), "dim"))


def _node(node: PlannedNode, facts: PlanFacts, room: PlanColumns) -> Row:
    mark, style = _mark(node, facts)
    first, second = _times(node, facts)
    spans = [(f"{mark} ", style), (left(node.id, room.id), style), " ", (right(first, TIME), "")]
    spans.append((f" {left(_middle(node, facts, room, second), room.middle)}", "bar"))
    if room.axes:
        spans.append((f" {left(' '.join(node.axes), room.axes)}", "dim"))
    if room.does:
        spans.append((f" {cut(node.does, room.does)}", "dim"))
    return row(*spans)


def _mark(node: PlannedNode, facts: PlanFacts) -> tuple[str, str]:
    if node.id in facts.now_in:
        return UNDER_WAY, "mark bold"
    took = facts.setup.get(node.id)
    if took is not None:
        return (DONE, "good") if took.seconds is not None else (UNDER_WAY, "mark bold")
    return " ", ""


def _times(node: PlannedNode, facts: PlanFacts) -> tuple[str, str]:
    """Return the texts of the two time columns."""
    if (step := facts.step.get(node.id)) is not None:
        return brief(step.slowest), brief(step.median)
    took = facts.took(node.id)
    if took is None:
        return "", ""
    if took.seconds is None:  # under way in set-up: how long it has been, unless clocks differ
        since = facts.now - took.began if took.began is not None else -1
        return (f"{duration(since)}…" if 0 <= since < 86400 else "…"), ""
    return brief(took.seconds), ""


def _middle(node: PlannedNode, facts: PlanFacts, room: PlanColumns, second: str) -> str:
    if node.id in facts.arranged.ticks:
        ways = due_words(node.id, facts)
        return cut(next((way for way in ways if len(way) <= room.middle), ways[-1]), room.middle)
    if when := facts.arranged.when.get(node.id):
        return cut(", ".join(when), room.middle)
    share = facts.share(node.id)
    text = f"{right(second, room.second)} " if room.second else ""
    text += right("" if share is None else percent(share), SHARE)
    return f"{text} {bar(share, room.bar)}" if room.bar else text


def due_words(node: str, facts: PlanFacts) -> tuple[str, ...]:
    """Return a tick's next time as `step 60, in 12s (every 20 steps)`, then in shorter forms."""
    found = facts.next_due(node)
    if found is None:
        return ("",)
    when = found[1]
    if facts.over or (when.step is None and not when.over):
        return (f"every {when.every}",)
    if when.over:
        return f"not again (every {when.every})", "not again"
    soon = f", in {duration(when.seconds)}" if when.seconds is not None else ""
    return f"step {when.step:,}{soon} (every {when.every})", f"step {when.step:,}{soon}", f"{when.step:,}{soon}"


def percent(share: float) -> str:
    """Return `97.3%`, `0.2%`; a positive share is never shown as zero."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}" if share < 0.9995 else "100%"


def headline(facts: PlanFacts, shown: int, query: str, width: int) -> Row:
    """Return the summary: number of nodes, time of set-up and of a step, and the running nodes."""
    whole = len(facts.plan.nodes)
    parts = [f"{shown:,} of {whole:,} nodes have “{query}”" if query else f"{whole:,} nodes"]
    if facts.now_in:
        most = max(facts.now_in, key=lambda node: len(facts.now_in[node]))
        on = len(facts.now_in[most])
        where = "" if facts.ranks == 1 else f" on {on:,} of {facts.ranks:,} ranks"
        parts.append(f"now in {most}{where}")
    if facts.cost.actual is not None:
        parts.append(f"a step {brief(facts.cost.actual)}")
        if facts.cost.planned is not None:
            parts.append(f"planned {brief(facts.cost.planned)}")
    if facts.setup_seconds is not None:
        parts.append(f"set-up {brief(facts.setup_seconds)}")
    while len(parts) > 1 and len(joined(parts)) > width:
        parts.pop()
    return fit(row((joined(parts), "bold")), width)
