"""Plan and Ranks screens: the graph of the plan with times, and the mesh as a heat map."""

from attrs import evolve
from textual import events
from textual.binding import Binding
from textual.widgets import Input

from xtrain.tui.board.pane import RefreshLimiter, RowsPane, SearchedPane, Sheet, cursor_keys
from xtrain.tui.model.board import Board
from xtrain.tui.pages import plan_view
from xtrain.tui.pages import rank_view as rank_keys
from xtrain.tui.pages.plan_rows import PlanFactRows, PlanFacts
from xtrain.tui.pages.plan_view import PlanPage, PlanView, followed, moved
from xtrain.tui.pages.plan_view import page as plan_page
from xtrain.tui.pages.rank_figures import RankFactRows, RankFacts
from xtrain.tui.pages.rank_view import RankPage, RankView, at_cell
from xtrain.tui.pages.rank_view import page as ranks_page


class PlanPane(SearchedPane[PlanView, PlanPage]):
    """Plan screen: all nodes in execution order with descriptions and times, the chosen node in full, and step time by
    node."""

    title = "Plan"
    short = "Plan"
    keys = plan_view
    nothing = "The run has no plan yet."
    searches = "search nodes: words of an id, a description, an axis"
    _view = PlanView()

    BINDINGS = [  # noqa: RUF012
        *cursor_keys("node"),
        Binding("home", "do('moved', -1000000)", "first node", show=False),
        Binding("end", "do('moved', 1000000)", "last node", show=False),
        Binding("right_square_bracket", "do('to_section', 1)", "next section", show=False, key_display="]"),
        Binding("left_square_bracket", "do('to_section', -1)", "previous section", show=False, key_display="["),
        Binding("left", "do('fold', True)", "fold the section", show=False),
        Binding("right", "do('fold', False)", "open the section", show=False),
        Binding("enter", "do('entered')", "in full", tooltip="the node in full, with its arguments; and back"),
        Binding("b", "timing", "time", tooltip="step time by node"),
        Binding("f", "follow", "now", tooltip="to the current node"),
        Binding("slash", "search", "search", tooltip="search nodes by words in their id or description"),
        Binding("escape", "back", "back", show=False, tooltip="back, or end the search"),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._facts = PlanFactRows()
        self._sparing = RefreshLimiter()
        self._known: PlanFacts | None = None
        self._placed = False

    def show(self, board: Board) -> None:
        if not self._sparing.due:
            return
        with self._sparing.spending():
            self._known = self._facts.of(board)
            if self._known is not None and not self._placed:
                self._placed = True  # begin where the run is
                self._view = followed(self._view, self._known)
            self._draw()

    def _new_page(self, width: int, height: int) -> PlanPage | None:
        return None if self._known is None else plan_page(self._known, self._view, width, height)

    def action_timing(self) -> None:
        """Show step times by node: next to the list where there is room, else as a page."""
        if self._page is None:
            return
        if self._view.shows != "list":
            self._go(evolve(self._view, shows="list" if self._view.shows == "time" else "time", scroll=0))
        elif self._page.beside:
            self._go(evolve(self._view, timing=not self._view.timing))
        else:
            self._go(evolve(self._view, shows="time", scroll=0))

    def action_follow(self) -> None:
        """Move the cursor to the running node."""
        if self._known:
            self._go(followed(self._view, self._known))

    def action_back(self) -> None:
        """Close a full page, else a search."""
        if self._view.shows != "list":
            self._go(evolve(self._view, shows="list", scroll=0))
        else:
            self._end_search(clear=True)

    def on_input_changed(self, event: Input.Changed) -> None:
        self._go(evolve(self._view, query=event.value.strip(), shows="list", top=0))

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the mouse."""
        if self._page is None or self._view.shows != "list" or event.widget is not self.query_one(Sheet):
            return
        place = event.y - 1 + self._view.top
        if 0 <= event.y - 1 < self._page.height and place < len(self._page.lines) and event.x < self._page.list_width:
            self._go(moved(self._page, place - self._page.chosen))


class RanksPane(RowsPane[RankView, RankPage]):
    """Ranks screen: one figure of every rank of the mesh, and stragglers in words."""

    title = "Ranks"
    short = "Ranks"
    keys = rank_keys
    nothing = "No rank has sent a heartbeat yet."
    _view = RankView()

    BINDINGS = [  # noqa: RUF012
        Binding("down,j", "do('moved', 1, 0)", "down", show=False),
        Binding("up,k", "do('moved', -1, 0)", "up", show=False),
        Binding("left,h", "do('moved', 0, -1)", "left", show=False),
        Binding("right,l", "do('moved', 0, 1)", "right", show=False),
        Binding("pagedown", "turn(1)", "page down", show=False),
        Binding("pageup", "turn(-1)", "page up", show=False),
        Binding("home", "do('moved', -1000000, -1000000)", "first", show=False),
        Binding("end", "do('moved', 1000000, 1000000)", "last", show=False),
        Binding("m", "do('next_figure', 1)", "metric", tooltip="next metric: step time, own work, data wait, …"),
        Binding("M", "do('next_figure', -1)", "previous metric", show=False),
        Binding("v", "do('table')", "table", tooltip="all ranks as a table, or the map again"),
        Binding("o", "do('sorted_by_next')", "sort", tooltip="sort the table by its next column"),
        Binding("r", "do('reversed_order')", "other way round", show=False, tooltip="sort the other way round"),
        Binding("e", "do('other_mesh')", "experts", tooltip="the mesh of experts, and back"),
        Binding("w", "do('to_worst')", "worst", tooltip="to the rank with the highest value"),
        Binding("g", "do('to_trouble')", "trouble", tooltip="to the next rank with a problem"),
        Binding("enter", "do('entered')", "in full", tooltip="the ranks of a cell, or a rank in full; and back"),
        Binding("escape", "do('back')", "back", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._facts = RankFactRows()
        self._sparing = RefreshLimiter()
        self._known: RankFacts | None = None

    def show(self, board: Board) -> None:
        if self._sparing.due:
            with self._sparing.spending():
                self._known = self._facts.of(board)
                self._draw()

    def _new_page(self, width: int, height: int) -> RankPage | None:
        return None if self._known is None else ranks_page(self._known, self._view, width, height)

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the mouse."""
        if self._page is None:
            return
        line, grid = event.y - self._page.first_row, self._page.grid
        if self._view.shows == "table":
            place = self._view.top + line
            if 0 <= line < self._page.height and place < len(self._page.order):
                self._go(evolve(self._view, rank=self._page.order[place]))
        elif self._view.shows == "map" and grid is not None:
            column = (event.x - grid.label_width - 1) // grid.cell_width
            if 0 <= line < grid.num_rows and 0 <= column < grid.num_columns:
                self._go(at_cell(self._page, line * grid.num_columns + column))
