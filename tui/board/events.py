"""The Events screen: what the run said in words, and the ends of its logs."""

from pathlib import Path
from typing import TYPE_CHECKING

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import Input

from xtrain.tui.board.rows_pane import SearchedPane
from xtrain.tui.board.sheet import Sheet
from xtrain.tui.model.event_log import EventLog
from xtrain.tui.pages import event_keys
from xtrain.tui.pages.event_keys import back, searched
from xtrain.tui.pages.event_pages import EventsPage, EventsView, page

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board


class EventsSheet(Sheet):
    """List of events; it has the keys of the screen."""


class EventsPane(SearchedPane[EventsView, EventsPage]):
    """Events screen: all events, newest last; the chosen one in full; the logs of the ranks."""

    title = "Events"
    short = "Event"
    keys = event_keys

    BINDINGS = [  # noqa: RUF012
        Binding("down,j", "do('moved', 1)", "later event", show=False),
        Binding("up,k", "do('moved', -1)", "earlier event", show=False),
        Binding("pagedown", "turn(1)", "page down", show=False),
        Binding("pageup", "turn(-1)", "page up", show=False),
        Binding("home", "do('moved', -1000000)", "oldest", show=False),
        Binding("f,end", "do('newest')", "follow", key_display="f", tooltip="to the newest, and follow"),
        Binding("enter", "do('entered')", "in full", tooltip="the event in full, and back"),
        Binding("slash", "search", "filter", tooltip="filter by a text"),
        Binding(
            "right_square_bracket,right",
            "do('other_kinds', 1)",
            "kind",
            key_display="]",
            tooltip="all events, problems, or one kind",
        ),
        Binding("left_square_bracket,left", "do('other_kinds', -1)", "previous kind", show=False),
        Binding("l", "do('other_log')", "logs", tooltip="the ends of the logs, one after the other"),
        Binding("escape", "back", "back", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(EventsView(), id=id)
        self._log = EventLog()
        self._directory = Path()

    def compose(self) -> ComposeResult:
        yield EventsSheet()
        yield Input(
            placeholder="only events and lines with this text; enter keeps the filter, esc removes it", compact=True
        )

    def show(self, board: "Board") -> None:
        if self._page is None or board.events.version != self._log.version or board.events is not self._log:
            self._log, self._directory = board.events, board.directory
            self._draw()

    def _draw(self) -> None:
        sheet = self.query_one(EventsSheet)
        width, height = sheet.content_size
        if not width or not height:
            return
        self._page = page(self._log, self._view, width, height, directory=str(self._directory))
        self._view = self._page.view
        sheet.draw(self._page.rows)

    def action_back(self) -> None:
        """Close the part that was opened last."""
        if self.has_class("searching"):
            self._end_search(clear=True)
        elif self._page:
            self._go(back(self._page))
            with self.prevent(Input.Changed):
                self.query_one(Input).value = self._view.query

    def on_input_changed(self, event: Input.Changed) -> None:
        if self._page:
            self._go(searched(self._page, event.value.strip()))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self.action_do("moved", 3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self.action_do("moved", -3)
