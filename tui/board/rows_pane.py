"""What screens made of rows have in common: a view that keys turn into another one, and a text that is asked for."""

from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import Input

from xtrain.tui.board.pane import Pane
from xtrain.tui.board.sheet import Sheet
from xtrain.tui.pages import list_page
from xtrain.tui.pages.list_page import ListPage, ListView

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board

ViewT = TypeVar("ViewT")
PageT = TypeVar("PageT")


class RowsPane(Pane, Generic[ViewT, PageT]):
    """Screen whose rows follow from its data and the reader's choices.

    _view: the choices. _page: the page drawn last, None before.
    """

    keys: ClassVar[ModuleType]
    """Key functions: each takes the drawn page and returns the next view."""
    _view: ViewT
    _page: PageT | None

    def __init__(self, view: ViewT, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._view = view
        self._page = None

    def _draw(self) -> None:
        """Draw the known data."""
        raise NotImplementedError

    def _go(self, view: ViewT) -> None:
        """Change to `view` and draw."""
        self._view = view
        self._draw()

    def action_do(self, name: str, first: object = None, second: object = None) -> None:
        """Apply a function of `keys` with these arguments. (Textual passes only as many arguments as an action has
        named parameters.)"""
        if self._page is not None:
            given = (each for each in (first, second) if each is not None)
            self._go(getattr(self.keys, name)(self._page, *given))

    def action_turn(self, by: int) -> None:
        """Scroll by `by` pages."""
        self.action_do("moved", by * max(1, getattr(self._page, "height", 1) - 1))

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self._draw)


class ListPane(RowsPane[ListView, ListPage]):
    """Screen with one list and a cursor."""

    keys = list_page
    BINDINGS = [  # noqa: RUF012
        Binding("down,j", "do('moved', 1)", "next row", show=False),
        Binding("up,k", "do('moved', -1)", "previous row", show=False),
        Binding("pagedown", "turn(1)", "page down", show=False),
        Binding("pageup", "turn(-1)", "page up", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(ListView(), id=id)
        self._board: Board | None = None

    def compose(self) -> ComposeResult:
        yield Sheet()

    def show(self, board: "Board") -> None:
        self._board = board
        self._draw()

    def page(self, board: "Board", width: int, height: int) -> ListPage:
        """Return the page of a board for which the screen is available."""
        raise NotImplementedError

    def _room(self, height: int) -> int:
        """Return how many of `height` rows something else takes."""
        return 0

    def _draw(self) -> None:
        width, height = self.content_size
        board = self._board
        if board is None or not self.available(board) or not width or not height:
            return
        self._page = self.page(board, width, height - self._room(height))
        self._view = self._page.view
        self.query_one(Sheet).draw(self._page.rows)


class SearchedPane(RowsPane[ViewT, PageT]):
    """Screen of rows with a search line below them."""

    DEFAULT_CSS = """
    SearchedPane { layout: vertical; }
    SearchedPane Input { height: 1; border: none; padding: 0 1; display: none; }
    SearchedPane.searching Input { display: block; }
    """

    def action_search(self) -> None:
        """Ask for a text."""
        self.add_class("searching")
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._end_search(clear=False)

    def _end_search(self, *, clear: bool) -> None:
        """Return to the rows. clear: also delete the search text."""
        if clear:
            self.query_one(Input).value = ""
        self.remove_class("searching")
        self.query(Sheet).last().focus()
        self.call_after_refresh(self._draw)
