"""The Ranks screen as rows of text for a size, and what keys do to it."""

from typing import Literal

import numpy as np
from attrs import evolve, field, frozen

from xtrain.tui.pages.heat import Heat, heat
from xtrain.tui.pages.mesh_grid import Grid, lay_out
from xtrain.tui.pages.rank_detail import rank_rows
from xtrain.tui.pages.rank_facts import RankFacts
from xtrain.tui.pages.rank_figures import FIGURES, MEMORY
from xtrain.tui.pages.rank_map import legend_rows, map_rows
from xtrain.tui.pages.rank_states import FINE, OVER, SILENT, SLOW
from xtrain.tui.pages.rank_table import COLUMNS, columns, ordered, table_head, table_row
from xtrain.tui.pages.sheet import CUT, Row, beside, block, clipped, cut, fit, joined, row, scrolled, window, wrapped

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
    """Drawn rows, and the facts that keys need. rank: the one whose details are shown. grid, heat: of the map; order:
    of the table; first_row: where cells or lines of the table begin; height: number of lines shown."""

    rows: list[Row] = field(repr=False)
    view: RankView
    rank: int = 0
    grid: Grid | None = None
    heat: Heat | None = None
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
    while len(parts) > 1 and len(joined(parts)) > width:
        parts.pop()
    rows = [fit(row((joined(parts), "bold")), width)]
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
        rows=rows, view=view, rank=rank, grid=grid, heat=found,
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
    return RankPage(rows=drawn, view=view, rank=view.rank, order=tuple(order), first_row=len(head) + 1, height=body)


def _full(facts: RankFacts, view: RankView, width: int, height: int) -> RankPage:
    rows = rank_rows(facts.ranks[view.rank], facts, width)
    drawn, scroll, most = scrolled(rows, view.scroll, width, height)
    view = evolve(view, scroll=scroll)
    return RankPage(rows=drawn, view=view, rank=view.rank, height=height - 1, most_scroll=most)
