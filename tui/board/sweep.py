"""The Sweep screen: the trials of the sweep that a run belongs to."""

from typing import TYPE_CHECKING

from ..pages import sweep_page
from ..pages.list_page import ListPage
from .rows_pane import ListPane

if TYPE_CHECKING:
    from ..model.board import Board


class SweepPane(ListPane):
    """How far the sweep is, its best so far, which settings matter, and its trials."""

    title = "Sweep"
    short = "Swp"

    @classmethod
    def available(cls, board: "Board") -> bool:
        return board.sweep is not None

    def page(self, board: "Board", width: int, height: int) -> ListPage:
        assert board.sweep is not None
        return sweep_page.page(board.sweep, board.directory.name, self._view, width, height)
