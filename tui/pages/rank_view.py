"""Ranks screen as rows, one rank in full, and keys."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
from attrs import evolve, field, frozen

from xtrain.records.metrics import RankMetrics
from xtrain.text.units import brief, size
from xtrain.tui.model.life import OneRank
from xtrain.tui.pages.figures import gauges_text
from xtrain.tui.pages.rank_figures import (
    COMMUNICATION,
    DATA,
    FIGURES,
    FINE,
    MEMORY,
    OVER,
    PROGRESS,
    SILENT,
    SLOW,
    STEP,
    WORDS,
    WORK,
    RankFacts,
    expected,
    heat,
    seconds_ago,
)
from xtrain.tui.pages.rank_map import (
    COLUMNS,
    Grid,
    columns,
    lay_out,
    legend_rows,
    map_rows,
    ordered,
    table_head,
    table_row,
)
from xtrain.tui.pages.sheet import (
    CUT,
    Row,
    beside,
    block,
    clipped,
    cut,
    fit,
    joined,
    joined_within,
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
# Nodes that take less than this share of a rank's step say nothing of why it is slow.
SMALL = 0.001


def rank_rows(rank: OneRank, facts: RankFacts, width: int) -> list[Row]:
    """Return everything known about a rank, in as many rows as needed."""
    state = int(facts.states.of[rank.rank])
    rows = [rule(f"rank {rank.rank:,}", width, WORDS[state])]
    for label, text, style in (
        *_where(rank, facts),
        *_now(rank, facts),
        *_figures(rank, facts),
        *_stuck(rank, facts),
    ):
        rows += labelled(label, text, width, LABEL, style)
    rows += _nodes(rank, facts, width)
    return [fit(each, width) for each in rows]


def _where(rank: OneRank, facts: RankFacts) -> Iterator[tuple[str, str, str]]:
    places = [f"{name} {rank.coordinates[name]}" for name in facts.real if name in rank.coordinates]
    if facts.experts:
        expert = [
            f"{axis.name} {rank.rank // axis.stride % axis.size}"
            for axis in facts.expert_axes
            if axis.size > 1 and axis.name not in facts.real
        ]
        places += [f"({', '.join(expert)})"] if expert else []
    if places:
        yield "place", joined(places), ""
    host = [f"host {rank.beat.host}", f"process {rank.beat.pid}"] if rank.beat else []
    if host or rank.machine is not None:
        machine = f"machine {rank.machine}" if rank.machine is not None else ""
        yield "runs on", joined([*host, machine]), ""


def _now(rank: OneRank, facts: RankFacts) -> Iterator[tuple[str, str, str]]:
    beat = rank.beat
    if beat is not None:
        step = f"step {beat.step:,}" if beat.step else "set-up"
        yield "last" if facts.over else "now", f"{step}, {beat.node or 'no node yet'}, {beat.marks:,} marks", ""
    if beat is not None and not facts.over:
        old = PROGRESS.of(rank) or 0.0
        if old >= 2 or beat.place:
            at = f", at {beat.place}" if beat.place else ""
            lasting = ", which may take long" if beat.lasting else ""
            yield "still", f"for {seconds_ago(old)}{lasting}{at}", "warn" if old >= 10 and not beat.lasting else ""
        if rank.seconds_silent >= 2:
            yield "silent", f"no heartbeat for {seconds_ago(rank.seconds_silent)}", "warn"
        if beat.debugger:
            yield "debugger", "a Python debugger has stopped it", "warn"


def _figures(rank: OneRank, facts: RankFacts) -> Iterator[tuple[str, str, str]]:
    for figure, label in ((STEP, "step"), (WORK, "own work"), (DATA, "data"), (COMMUNICATION, "comm")):
        value, median = figure.of(rank), facts.figure(figure).median
        if value is None:
            continue
        against = "" if len(facts.ranks) == 1 or median is None else f", median {figure.words(median)}"
        more = f", {signed(value / median - 1)}" if against and median and figure in (STEP, WORK) else ""
        more += " (newest records)" if figure is WORK else ""
        slow = figure is WORK and rank.rank in facts.states.slow
        yield label, f"{figure.words(value)}{against}{more}", "warn" if slow else ""
    if rank.memory_bytes is not None:
        plan = expected(rank, facts.memory)
        share = f", {rank.memory_bytes / plan:.0%} of the planned {size(plan)}" if plan else ""
        yield "memory", f"{size(rank.memory_bytes)}{share}", "bad" if plan and rank.memory_bytes > plan else ""
    if now := _memory_now(rank.last):
        yield "", ", ".join(now), ""
    if rank.last is not None and (gauges := gauges_text(rank.last)):
        yield "GPU", gauges, ""
    if rank.step is not None:
        yield "reported", f"all this after step {rank.step:,}", ""


def _memory_now(last: RankMetrics | None) -> list[str]:
    """Return the memory figures in the rank's newest line."""
    if last is None:
        return []
    memory = ((last.allocated_bytes, "allocated"), (last.reserved_bytes, "reserved"), (last.resident_bytes, "resident"))
    now = [f"{size(value)} {name}" for value, name in memory if value is not None]
    return [*now, *([f"{last.retries:,} allocation retries"] if last.retries else [])]


def signed(share: float) -> str:
    """Return `+31%`, `-4%`, `0%`."""
    return f"{share:+.0%}" if abs(share) >= 0.005 else "0%"


def _stuck(rank: OneRank, facts: RankFacts) -> Iterator[tuple[str, str, str]]:
    if (said := facts.states.failed.get(rank.rank)) is not None:
        yield "failed", said, "bad"
    if (blame := facts.states.blamed.get(rank.rank)) is not None:
        since = f" for {seconds_ago(blame.seconds)}" if blame.seconds is not None else ""
        at = f" at {blame.place}" if blame.place else ""
        yield "blamed", f"{blame.state or 'stuck'} in {blame.node}{at}{since}", "bad"


def _nodes(rank: OneRank, facts: RankFacts, width: int) -> Iterator[Row]:
    """Yield the nodes of a step, longest first: this rank next to the median rank."""
    whole = sum(rank.node_seconds.values())
    shown = sorted(rank.node_seconds.items(), key=lambda pair: -pair[1])
    shown = [(node, seconds) for node, seconds in shown if seconds >= SMALL * whole]
    if not shown:
        return
    alone = len(facts.ranks) == 1
    yield rule("nodes of a step" if alone else "nodes of a step, against the median rank", width)
    name = min(max(len(node) for node, _ in shown), max(10, width - 26))
    for node, seconds in shown:
        spans = [left(node, name), " ", right(brief(seconds), 8)]
        times = facts.times.get(node)
        if times is not None and not alone:
            more = seconds / times.median - 1 if times.median else 0.0
            sure = abs(more) >= 0.1 and abs(seconds - times.median) >= 0.02 * whole
            spans += [f" {right(brief(times.median), 8)}"]
            yield row(*spans, (f" {right(signed(more), 6)}", "warn" if sure and more > 0 else "dim"))
        else:
            yield row(*spans)


# From this width, map and details are side by side; below it, from this height, one above the other.
SIDE_BY_SIDE = 104
STACKED = 17

Shows = Literal["map", "table", "rank"]


@frozen(kw_only=True)
class RankView:
    """The reader's choices. figure: index of the shown figure; experts: show the mesh of the experts. rank: under the
    cursor; in the map, the worst rank of its cell. only: ranks in the table, empty for all. sort: key of a column.
    shows, back: current screen, and the one before a rank's full page."""

    figure: int = 0
    experts: bool = False
    rank: int = 0
    shows: Shows = "map"
    back: Shows = "map"
    only: tuple[int, ...] = ()
    sort: str = "rank"
    most_first: bool = False
    top: int = 0
    scroll: int = 0


@frozen(kw_only=True)
class RankPage:
    """Drawn rows, `width` cells wide, and the facts that keys need. rank: the one whose details are shown. grid: of the
    map; order: of the table; first_row: where cells or lines of the table begin; height: number of lines shown."""

    rows: list[Row] = field(repr=False)
    view: RankView
    facts: RankFacts = field(repr=False)
    width: int
    rank: int = 0
    grid: Grid | None = None
    order: tuple[int, ...] = ()
    first_row: int = 0
    height: int = 1
    most_scroll: int = 0


def page(facts: RankFacts, view: RankView, width: int, height: int) -> RankPage:
    """Return the screen in exactly `height` rows of `width` cells."""
    view = evolve(view, rank=min(view.rank, len(facts.ranks) - 1), experts=view.experts and facts.experts)
    if view.shows == "rank":
        return _full(facts, view, width, height)
    head = _head(facts, view, width, height)
    if view.shows == "table":
        return _table(facts, view, head, width, height)
    return _map(facts, view, head, width, height)


def _head(facts: RankFacts, view: RankView, width: int, height: int) -> list[Row]:
    """Return the heading and sentences on ranks: more of them on a high screen."""
    ranks = len(facts.ranks)
    measured = facts.figure(FIGURES[view.figure])
    parts = ["1 rank" if ranks == 1 else f"{ranks:,} ranks"]
    if view.only:
        parts = [f"{len(view.only):,} of {ranks:,} ranks"]
    if view.shows == "map":
        share = ", share of the planned" if measured.against_plan else ""
        parts.append(f"{measured.figure.title}{share}")
        if view.experts:
            parts.append("mesh of experts")
        worst = _worst(facts, view)
        if worst is not None and ranks > 1:
            value = float(measured.values[worst])
            parts.append(f"median {measured.words(measured.median)}")
            parts.append(f"most {measured.words(value)} on rank {worst:,}")
    if facts.machines > 1:
        parts.append(f"{facts.machines:,} machines")
    rows = [fit(row((joined_within(parts, width), "bold")), width)]
    most = 1 if height < 14 else 2 if height < 26 else 4
    styles = {FINE: "good", SLOW: "warn", SILENT: "warn"}
    lines = [(line, styles.get(state, "bad")) for text, state in facts.said for line in wrapped(text, width)]
    if len(lines) > most:
        text, style = lines[most - 1]
        lines = [*lines[: most - 1], (cut(f"{text} {CUT}", width), style)]
    return rows + [fit(row(pair), width) for pair in lines]


def _worst(facts: RankFacts, view: RankView) -> int | None:
    values = facts.figure(FIGURES[view.figure]).values
    return None if np.isnan(values).all() else int(np.nanargmax(values))


def _map(facts: RankFacts, view: RankView, head: list[Row], width: int, height: int) -> RankPage:
    measured = facts.figure(FIGURES[view.figure])
    wide = width >= SIDE_BY_SIDE
    map_width = width * 60 // 100 if wide else width
    below = 0 if wide else max(7, height * 36 // 100) if height >= STACKED else 1
    body = height - len(head) - below
    axes = facts.expert_axes if view.experts else facts.axes
    states, most = _states(facts, view), 2 if body < 9 else 4
    legend: list[Row] = [row("")] * 2  # as many lines as it may take; where it takes more, the map is laid out again
    while True:
        grid = lay_out(axes, len(facts.ranks), map_width, max(2, body - len(legend)))
        found = heat(grid.cell_of, grid.num_rows * grid.num_columns, measured.values, states, measured.scale)
        before, legend = len(legend), legend_rows(measured, grid, found, map_width, most)
        if len(legend) <= before:
            break
    cell = int(grid.cell_of[view.rank])
    rank = int(found.rank[cell])
    drawn = map_rows(grid, found, measured, cell, map_width)
    gap = [row("")] if len(drawn) + len(legend) < body else []
    drawn = [*drawn[: max(1, body - len(legend))], *gap, *legend]
    says = [row((line, "dim")) for line in wrapped(measured.figure.says, map_width)]
    if len(drawn) + len(says) <= body:
        drawn += says
    if len(drawn) + len(facts.ranks) + 2 <= body:  # few ranks: there is room for all their numbers
        drawn += [row(""), *_all(facts, rank, map_width)]
    drawn = block(drawn, map_width, body)
    side = _side(facts, rank, int((grid.cell_of == cell).sum()), width - map_width - 3 if wide else width,
                 body if wide else below)  # fmt: skip
    rows = [*head, *(beside(drawn, side) if wide else [*drawn, *side])]
    return RankPage(
        rows=rows, view=view, facts=facts, width=width, rank=rank, grid=grid,
        first_row=len(head) + grid.heading, height=grid.num_rows,
    )  # fmt: skip


def _all(facts: RankFacts, chosen: int, width: int) -> list[Row]:
    """Return a table of all ranks, shown below the map."""
    shown = columns(facts, width)
    rows = [table_head(shown, "", width, most_first=False)]
    return rows + [table_row(rank, facts, shown, width, chosen=rank.rank == chosen) for rank in facts.ranks]


def _states(facts: RankFacts, view: RankView) -> np.ndarray:
    """Return the states that cells are marked by: stragglers have none, as the map shows their times; memory above plan
    has one."""
    states = np.where(facts.states.of <= SLOW, FINE, facts.states.of)
    measured = facts.figure(MEMORY)
    if FIGURES[view.figure] is MEMORY and measured.against_plan:
        states = np.where((np.nan_to_num(measured.values) > 1.0) & (states == FINE), OVER, states)
    return states


def _side(facts: RankFacts, rank: int, of: int, width: int, height: int) -> list[Row]:
    rows = rank_rows(facts.ranks[rank], facts, width)
    if of > 1:
        rows.insert(1, fit(row((f"the worst of the {of:,} ranks of this cell", "dim")), width))
    if height == 1:  # room for one line only: where the rank is, and its figure
        return [fit(row(*_line(facts, rank)), width)]
    return clipped(rows, width, height)


def _line(facts: RankFacts, rank: int) -> list[tuple[str, str]]:
    one = facts.ranks[rank]
    places = [f"{name} {one.coordinates.get(name, '–')}" for name in facts.real]
    node = [f"in {one.beat.node}"] if one.beat and one.beat.node else []
    return [(f"rank {rank:,}", "title"), ("  " + "  ".join([*places, *node]), "")]


def _table(facts: RankFacts, view: RankView, head: list[Row], width: int, height: int) -> RankPage:
    shown = columns(facts, width)
    order = ordered(facts, view.only or range(len(facts.ranks)), view.sort, most_first=view.most_first)
    place = order.index(view.rank) if view.rank in order else 0
    view = evolve(view, rank=order[place])
    body = height - len(head) - 2
    view = evolve(view, top=window(len(order), body, view.top, place))
    rows = [
        table_row(facts.ranks[order[at]], facts, shown, width, chosen=at == place)
        for at in range(view.top, min(len(order), view.top + body))
    ]
    last = view.top + len(rows)
    by = next(column.title for column in COLUMNS if column.key == view.sort)
    note = f"{view.top + 1:,} to {last:,} of {len(order):,}, by {by}, {'most' if view.most_first else 'least'} first"
    drawn = [
        *head,
        table_head(shown, view.sort, width, most_first=view.most_first),
        *block(rows, width, body),
        fit(row((note, "dim")), width),
    ]
    return RankPage(
        rows=drawn, view=view, facts=facts, width=width, rank=view.rank, order=tuple(order), first_row=len(head) + 1,
        height=body,
    )  # fmt: skip


def _full(facts: RankFacts, view: RankView, width: int, height: int) -> RankPage:
    rows = rank_rows(facts.ranks[view.rank], facts, width)
    drawn, scroll, most = scrolled(rows, view.scroll, width, height)
    view = evolve(view, scroll=scroll)
    return RankPage(
        rows=drawn, view=view, facts=facts, width=width, rank=view.rank, height=height - 1, most_scroll=most
    )


def moved(page: RankPage, down: int, right: int = 0) -> RankView:
    """Move the cursor by cells or by lines of the table, or scroll the rank's page."""
    view = page.view
    if view.shows == "rank":
        return evolve(view, scroll=max(0, min(view.scroll + down, page.most_scroll)))
    if view.shows == "table":
        place = page.order.index(view.rank)
        return evolve(view, rank=page.order[max(0, min(place + down, len(page.order) - 1))])
    grid = page.grid
    assert grid is not None
    line, column = divmod(int(grid.cell_of[view.rank]), grid.num_columns)
    line = max(0, min(line + down, grid.num_rows - 1))
    column = max(0, min(column + right, grid.num_columns - 1))
    return at_cell(page, line * grid.num_columns + column)


def at_cell(page: RankPage, cell: int) -> RankView:
    """Move the cursor to a cell of the map."""
    assert page.grid is not None
    ranks = page.grid.ranks(cell)
    return evolve(page.view, rank=int(ranks[0])) if len(ranks) else page.view


def next_figure(page: RankPage, by: int) -> RankView:
    """Switch to the next figure that any rank has reported."""
    view, facts = page.view, page.facts
    for number in range(1, len(FIGURES) + 1):
        place = (view.figure + by * number) % len(FIGURES)
        if not np.isnan(facts.figure(FIGURES[place]).values).all():
            return evolve(view, figure=place, shows="map", only=())
    return view


def entered(page: RankPage) -> RankView:
    """Handle Enter: show a cell's ranks as a table, or one rank in full, or return from there."""
    view = page.view
    if view.shows == "rank":
        return back(page)
    if view.shows == "map" and page.grid is not None:
        ranks = page.grid.ranks(int(page.grid.cell_of[view.rank]))
        if len(ranks) > 1:
            only = tuple(int(rank) for rank in ranks)
            return evolve(view, shows="table", only=only, rank=page.rank, top=0)
    return evolve(view, shows="rank", back=view.shows, rank=page.rank, scroll=0)


def back(page: RankPage) -> RankView:
    """Handle Escape: return from a rank's page to where it was opened, from a table to the map."""
    view = page.view
    if view.shows == "rank":
        return evolve(view, shows=view.back, scroll=0)
    return evolve(view, shows="map", only=())


def table(page: RankPage) -> RankView:
    """Switch between the table of all ranks and the map."""
    view = page.view
    if view.shows == "table":
        return evolve(view, shows="map", only=())
    return evolve(view, shows="table", only=(), rank=page.rank, top=0)


def other_mesh(page: RankPage) -> RankView:
    """Switch between the mesh and the experts' mesh."""
    return evolve(page.view, experts=not page.view.experts)


def sorted_by_next(page: RankPage) -> RankView:
    """Sort a table by its next column; numbers and states in descending order."""
    if page.view.shows != "table":
        return page.view
    shown = columns(page.facts, page.width)
    keys = [column.key for column in shown if column.figure or column.key in ("rank", "state")]
    place = keys.index(page.view.sort) if page.view.sort in keys else -1
    key = keys[(place + 1) % len(keys)]
    return _resorted(evolve(page.view, sort=key, most_first=key != "rank"), page.facts)


def reversed_order(page: RankPage) -> RankView:
    """Reverse the order of a table."""
    view = page.view
    return _resorted(evolve(view, most_first=not view.most_first), page.facts) if view.shows == "table" else view


def _resorted(view: RankView, facts: RankFacts) -> RankView:
    """Move the cursor to the first rank of the new order."""
    order = ordered(facts, view.only or range(len(facts.ranks)), view.sort, most_first=view.most_first)
    return evolve(view, rank=order[0], top=0)


def to_worst(page: RankPage) -> RankView:
    """Move the cursor to the rank with the highest value."""
    worst = _worst(page.facts, page.view)
    return page.view if worst is None else _to(page, worst)


def to_trouble(page: RankPage) -> RankView:
    """Move the cursor to the next rank with a problem, the worst first, and around."""
    found = page.facts.states.troubled()
    place = found.index(page.rank) if page.rank in found else -1
    return _to(page, found[(place + 1) % len(found)]) if found else page.view


def _to(page: RankPage, rank: int) -> RankView:
    view = page.view
    return evolve(view, rank=rank, only=(), shows="map" if view.shows == "rank" else view.shows)
