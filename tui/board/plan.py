"""The Plan screen: the graph of the plan with the times of the run."""

from typing import TYPE_CHECKING

from attrs import evolve
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import Input

from xtrain.tui.board.refresh_limiter import RefreshLimiter
from xtrain.tui.board.rows_pane import SearchedPane
from xtrain.tui.board.sheet import Sheet
from xtrain.tui.pages import plan_view
from xtrain.tui.pages.plan_facts import PlanFactRows, PlanFacts
from xtrain.tui.pages.plan_view import PlanPage, PlanView, followed, moved, page

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board


class PlanSheet(Sheet):
    """List of nodes; it has the keys of the screen."""


class PlanPane(SearchedPane[PlanView, PlanPage]):
    """Plan screen: all nodes in execution order with descriptions and times, the chosen node in full, and step time by
    node."""

    title = "Plan"
    short = "Plan"
    keys = plan_view

    BINDINGS = [  # noqa: RUF012
        Binding("down,j", "do('moved', 1)", "next node", show=False),
        Binding("up,k", "do('moved', -1)", "previous node", show=False),
        Binding("pagedown", "turn(1)", "page down", show=False),
        Binding("pageup", "turn(-1)", "page up", show=False),
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
        super().__init__(PlanView(), id=id)
        self._facts = PlanFactRows()
        self._sparing = RefreshLimiter()
        self._known: PlanFacts | None = None
        self._placed = False

    def compose(self) -> ComposeResult:
        yield PlanSheet()
        yield Input(placeholder="search nodes: words of an id, a description, an axis", compact=True)

    def show(self, board: "Board") -> None:
        if not self._sparing.due:
            return
        with self._sparing.spending():
            self._known = self._facts.of(board)
            if self._known is not None and not self._placed:
                self._placed = True  # begin where the run is
                self._view = followed(self._view, self._known)
            self._draw()

    def _draw(self) -> None:
        sheet = self.query_one(PlanSheet)
        width, height = sheet.content_size
        if not width or not height:
            return
        if self._known is None:
            sheet.draw([(("The run has no plan yet.", "dim"),)])
            return
        self._page = page(self._known, self._view, width, height)
        self._view = self._page.view
        sheet.draw(self._page.rows)

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
        if self._page is None or self._view.shows != "list" or event.widget is not self.query_one(PlanSheet):
            return
        place = event.y - 1 + self._view.top
        if 0 <= event.y - 1 < self._page.height and place < len(self._page.lines) and event.x < self._page.list_width:
            self._go(moved(self._page, place - self._page.chosen))
