"""What keys do to the Ranks screen."""

import numpy as np
from attrs import evolve

from xtrain.tui.pages.rank_facts import RankFacts
from xtrain.tui.pages.rank_figures import FIGURES
from xtrain.tui.pages.rank_table import columns, ordered
from xtrain.tui.pages.rank_view import RankPage, RankView


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


def next_figure(view: RankView, facts: RankFacts, by: int) -> RankView:
    """Switch to the next figure that any rank has reported."""
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


def sorted_by_next(page: RankPage, facts: RankFacts, width: int) -> RankView:
    """Sort the table by its next column; numbers and states in descending order."""
    keys = [column.key for column in columns(facts, width) if column.figure or column.key in ("rank", "state")]
    place = keys.index(page.view.sort) if page.view.sort in keys else -1
    key = keys[(place + 1) % len(keys)]
    return _resorted(evolve(page.view, sort=key, most_first=key != "rank"), facts)


def reversed_order(page: RankPage, facts: RankFacts) -> RankView:
    """Reverse the order of the table."""
    return _resorted(evolve(page.view, most_first=not page.view.most_first), facts)


def _resorted(view: RankView, facts: RankFacts) -> RankView:
    """Move the cursor to the first rank of the new order."""
    order = ordered(facts, view.only or range(len(facts.ranks)), view.sort, most_first=view.most_first)
    return evolve(view, rank=order[0], top=0)


def to_worst(view: RankView, facts: RankFacts) -> RankView:
    """Return the view with the cursor on the rank with the highest value."""
    values = facts.figure(FIGURES[view.figure]).values
    if np.isnan(values).all():
        return view
    return evolve(view, rank=int(np.nanargmax(values)), only=(), shows="map" if view.shows == "rank" else view.shows)


def to_trouble(page: RankPage, facts: RankFacts) -> RankView:
    """Move the cursor to the next rank with a problem, the worst first, and around."""
    found = facts.states.troubled()
    if not found:
        return page.view
    place = found.index(page.rank) if page.rank in found else -1
    shows = "map" if page.view.shows == "rank" else page.view.shows
    return evolve(page.view, rank=found[(place + 1) % len(found)], only=(), shows=shows)
