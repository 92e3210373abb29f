"""The Sweep screen: the trials of the sweep that a run belongs to."""

from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.binding import Binding

from ..pages import sweep_page
from ..pages.sweep_page import SweepPage, SweepView, page
from .rows_pane import RowsPane
from .sheet import Sheet

if TYPE_CHECKING:
    from ..model.board import Board


class SweepPane(RowsPane[SweepView, SweepPage]):
    """How far the sweep is, its best so far, which settings matter, and its trials."""

    title = "Sweep"
    short = "Swp"
    keys = sweep_page

    BINDINGS = [  # noqa: RUF012
        Binding("down,j", "do('moved', 1)", "next trial", show=False),
        Binding("up,k", "do('moved', -1)", "previous trial", show=False),
        Binding("pagedown", "turn(1)", "page down", show=False),
        Binding("pageup", "turn(-1)", "page up", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(SweepView(), id=id)
        self._board: Board | None = None

    @classmethod
    def available(cls, board: "Board") -> bool:
        return board.sweep is not None

    def compose(self) -> ComposeResult:
        yield Sheet()

    def show(self, board: "Board") -> None:
        self._board = board
        self._draw()

    def _draw(self) -> None:
        width, height = self.content_size
        board = self._board
        if board is None or board.sweep is None or not width or not height:
            return
        self._page = page(board.sweep, board.directory.name, self._view, width, height)
        self._view = self._page.view
        self.query_one(Sheet).draw(self._page.rows)
