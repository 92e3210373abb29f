"""Graph of a plan as an outline in execution order, with the recorded times, as rows."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from heapq import heapify, heappop, heappush
from typing import TypeVar

from attrs import field, frozen

from xtrain.text.units import brief, duration
from xtrain.tui.model.board import Board
from xtrain.tui.model.planned import Planned, PlannedEdge, PlannedNode, PlannedTick
from xtrain.tui.pages.node_times import (
    Due,
    StepCost,
    StepTime,
    StepTimes,
    Took,
    due,
    last_times,
    setup_times,
    step_cost,
    under_way,
)
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
    joined_within,
    left,
    restyled,
    right,
    row,
)

# Kinds in execution order, and their titles.
KINDS = {
    "setup": "Set-up",
    "collate": "Collate",
    "step": "Step",
    "tick": "Ticks",
    "event": "Events and commands",
    "shutdown": "Shutdown",
}


@frozen(kw_only=True)
class ListSection:
    """Heading of the nodes of one kind. folded: the nodes are not in the list."""

    kind: str
    title: str
    nodes: int
    shown: int
    folded: bool


@frozen(kw_only=True)
class Outline:
    """Outline of a plan: its nodes by kind in execution order, and their relations.

    ticks: node → its ticks. when: event node → `on sigterm`, `asked: save`. before, after: node → the edges that end
    and begin there.
    """

    nodes: Mapping[str, tuple[PlannedNode, ...]]
    ticks: Mapping[str, tuple[PlannedTick, ...]] = field(factory=dict)
    when: Mapping[str, tuple[str, ...]] = field(factory=dict)
    before: Mapping[str, tuple[PlannedEdge, ...]] = field(factory=dict)
    after: Mapping[str, tuple[PlannedEdge, ...]] = field(factory=dict)

    @property
    def ids(self) -> tuple[str, ...]:
        """All nodes from top to bottom."""
        return tuple(node.id for nodes in self.nodes.values() for node in nodes)


Line = ListSection | PlannedNode
ValueT = TypeVar("ValueT")


def outline(plan: Planned) -> Outline:
    """Arrange a plan."""
    nodes = _grouped((node.kind, node) for node in execution_order(plan))
    triggered = [
        (node, f"on {trigger.event}" + (f" ({trigger.count} in a row)" if (trigger.count or 1) > 1 else ""))
        for trigger in plan.triggers
        for node in dict.fromkeys(trigger.nodes)
    ]
    asked = [(node, f"asked: {command.name}") for command in plan.commands for node in dict.fromkeys(command.nodes)]
    return Outline(
        nodes={kind: nodes[kind] for kind in dict.fromkeys((*KINDS, *nodes)) if kind in nodes},
        ticks=_grouped((node, tick) for tick in plan.ticks for node in dict.fromkeys(tick.nodes)),
        when=_grouped((*triggered, *asked)),
        before=_grouped((edge.after, edge) for edge in plan.edges),
        after=_grouped((edge.before, edge) for edge in plan.edges),
    )


def _grouped(pairs: Iterable[tuple[str, ValueT]]) -> dict[str, tuple[ValueT, ...]]:
    found: dict[str, list[ValueT]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return {key: tuple(values) for key, values in found.items()}


def execution_order(plan: Planned) -> list[PlannedNode]:
    """Return nodes in an order that respects every edge, else in the plan's order; nodes of a cycle, which no plan has,
    come last."""
    place = {node.id: number for number, node in enumerate(plan.nodes)}
    sorter = TopologicalSorter(dict.fromkeys(place, ()))
    for edge in plan.edges:
        if edge.before in place and edge.after in place:
            sorter.add(edge.after, edge.before)
    with suppress(CycleError):
        sorter.prepare()
    order: list[PlannedNode] = []
    ready = [place[id] for id in sorter.get_ready()]
    heapify(ready)
    while ready:
        node = plan.nodes[heappop(ready)]
        order.append(node)
        sorter.done(node.id)
        for id in sorter.get_ready():
            heappush(ready, place[id])
    done = {node.id for node in order}
    return order + [node for node in plan.nodes if node.id not in done]


def lines(arranged: Outline, *, query: str = "", folded: frozenset[str] = frozenset()) -> list[Line]:
    """Return headings and nodes from top to bottom. query: only nodes that contain all of its words; sections are then
    unfolded, and those without such a node left out."""
    words = query.casefold().split()
    found: list[Line] = []
    for kind, nodes in arranged.nodes.items():
        matching = [node for node in nodes if _matches(node, arranged, words)] if words else list(nodes)
        if words and not matching:
            continue
        hidden = kind in folded and not words
        found.append(
            ListSection(kind=kind, title=KINDS.get(kind, kind), nodes=len(nodes), shown=len(matching), folded=hidden)
        )
        if not hidden:
            found += matching
    return found


def _matches(node: PlannedNode, arranged: Outline, words: list[str]) -> bool:
    about = (node.id, node.kind, node.op, node.does, *node.axes, *arranged.when.get(node.id, ()))
    whole = "\n".join(about).casefold()
    return all(word in whole for word in words)


@frozen(kw_only=True)
class PlanFacts:
    """Facts of the Plan screen. setup, last: node → its duration (in this start; last execution). step: node → its
    seconds in a step. now_in: node → the ranks that are running it. ended: finished optimizer steps; pace: seconds
    per step; now: seconds since 1970. ranks: their number; over: the run has ended."""

    plan: Planned
    arranged: Outline
    setup: Mapping[str, Took] = field(factory=dict)
    setup_seconds: float | None = None
    step: Mapping[str, StepTime] = field(factory=dict)
    last: Mapping[str, Took] = field(factory=dict)
    now_in: Mapping[str, tuple[int, ...]] = field(factory=dict)
    cost: StepCost = field(factory=StepCost)
    ended: int = 0
    steps: int | None = None
    pace: float | None = None
    now: float = 0.0
    ranks: int = 0
    over: bool = False

    def next_due(self, node: str) -> tuple[PlannedTick, Due] | None:
        """Return the next tick of a node and its due time; ticks with unknown times come last. None for a node without
        a tick."""
        found = [
            (tick, due(tick, self.plan, step=self.ended, pace=self.pace)) for tick in self.arranged.ticks.get(node, ())
        ]

        def far(pair: tuple[PlannedTick, Due]) -> float:
            return float("inf") if pair[1].over else 1e18 if pair[1].step is None else pair[1].step

        return min(found, key=far, default=None)

    def took(self, node: str) -> Took | None:
        """Return the duration of a set-up node or tick."""
        return self.setup.get(node) or self.last.get(node)

    def share(self, node: str) -> float | None:
        """Return a node's share of the step, or of the set-up, that it is part of."""
        if node in self.step:
            return self.step[node].share
        took = self.setup.get(node)
        if took is None or took.seconds is None:
            return None
        whole = sum(each.seconds for each in self.setup.values() if each.seconds is not None)
        return took.seconds / whole if whole else None


class PlanFactRows:
    """Cached facts of a board; expensive ones are computed again only after a change."""

    def __init__(self) -> None:
        self._times = StepTimes()
        self._arranged: tuple[Planned, Outline] | None = None
        self._last: tuple[int, Mapping[str, Took]] = (-1, {})

    def of(self, board: Board) -> PlanFacts | None:
        """Return the facts of `board`; None without a plan."""
        plan = board.planned
        if plan is None:
            return None
        if self._arranged is None or self._arranged[0] is not plan:
            self._arranged = plan, outline(plan)
        if self._last[0] != board.events.version:
            self._last = board.events.version, last_times(board.events.entries)
        over = board.life.over
        return PlanFacts(
            plan=plan,
            arranged=self._arranged[1],
            setup=setup_times(board.run),
            setup_seconds=board.run.setup_seconds,
            step=self._times.of(board.ranks),
            last=self._last[1],
            now_in={} if over else under_way(board.ranks),
            cost=step_cost(board.series.last, plan),
            ended=board.step,
            steps=board.run.steps or plan.steps,
            pace=None if over else board.run.history.seconds_per_step,
            now=board.now,
            ranks=len(board.ranks) or plan.world_size,
            over=over,
        )


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
        if facts.cost.planned.step is not None:
            parts.append(f"planned {brief(facts.cost.planned.step)}")
    if facts.setup_seconds is not None:
        parts.append(f"set-up {brief(facts.setup_seconds)}")
    return fit(row((joined_within(parts, width), "bold")), width)
