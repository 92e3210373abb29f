"""The Server screen: the models of a training server, and how busy it is."""

from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.binding import Binding

from ..pages import list_page
from ..pages.list_page import ListPage, ListView
from ..pages.server_page import page
from .rows_pane import RowsPane
from .sheet import Sheet

if TYPE_CHECKING:
    from ..model.board import Board


class ServerPane(RowsPane[ListView, ListPage]):
    """Clients, models, queue and pace."""

    title = "Server"
    short = "Serve"
    keys = list_page

    BINDINGS = [  # noqa: RUF012
        Binding("down,j", "do('moved', 1)", "next model", show=False),
        Binding("up,k", "do('moved', -1)", "previous model", show=False),
        Binding("pagedown", "turn(1)", "page down", show=False),
        Binding("pageup", "turn(-1)", "page up", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(ListView(), id=id)
        self._board: Board | None = None

    @classmethod
    def available(cls, board: "Board") -> bool:
        return board.server is not None

    def compose(self) -> ComposeResult:
        yield Sheet()

    def show(self, board: "Board") -> None:
        self._board = board
        self._draw()

    def _draw(self) -> None:
        width, height = self.content_size
        board = self._board
        if board is None or board.server is None or not width or not height:
            return
        self._page = page(board.server, self._view, width, height, board.now)
        self._view = self._page.view
        self.query_one(Sheet).draw(self._page.rows)
