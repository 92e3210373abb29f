"""The Server screen: the models of a training server, and how busy it is."""

from typing import TYPE_CHECKING

from xtrain.tui.board.rows_pane import ListPane
from xtrain.tui.pages import server_page
from xtrain.tui.pages.list_page import ListPage

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board


class ServerPane(ListPane):
    """Server screen: clients, models, queue and throughput."""

    title = "Server"
    short = "Serve"

    @classmethod
    def available(cls, board: "Board") -> bool:
        return board.server is not None

    def page(self, board: "Board", width: int, height: int) -> ListPage:
        assert board.server is not None
        return server_page.page(board.server, self._view, width, height, board.now)
