"""The Sweep screen: the trials of the sweep that a run belongs to."""

from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.binding import Binding

from xtrain.tui.board.plot import Plot
from xtrain.tui.board.rows_pane import ListPane
from xtrain.tui.board.sheet import Sheet
from xtrain.tui.pages import sweep_page
from xtrain.tui.pages.list_page import ListPage
from xtrain.tui.pages.sweep_curves import trial_lines

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board

LOSS = "loss"
# Rows that stand around the list; that the curves need, with less they are shown in its place; and that they take at
# most.
_LIST_ROWS, _PLOT_ROWS, _MOST_PLOT_ROWS = 12, 8, 26


class SweepPane(ListPane):
    """Sweep screen: progress, best trial, curves, importance of settings, and trials."""

    title = "Sweep"
    short = "Swp"

    DEFAULT_CSS = """
    SweepPane { layout: vertical; }
    """
    BINDINGS = [  # noqa: RUF012
        Binding("p", "plot", "curves", tooltip="only the curves, and back"),
        Binding("o", "metric", "objective", tooltip="curves of the objective, or of the training loss"),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._only_plot = False
        self._of_loss = False

    @classmethod
    def available(cls, board: "Board") -> bool:
        return board.sweep is not None

    def compose(self) -> ComposeResult:
        yield Sheet()
        yield Plot()

    def page(self, board: "Board", width: int, height: int) -> ListPage:
        assert board.sweep is not None
        return sweep_page.page(board.sweep, board.directory.name, self._view, width, height)

    def _room(self, height: int) -> int:
        """Return how many of `height` rows the curves take."""
        beside = height >= _LIST_ROWS + _PLOT_ROWS
        sheet, plot = self.query_one(Sheet), self.query_one(Plot)
        sheet.display, plot.display = not self._only_plot, self._only_plot or beside
        if self._only_plot:
            plot.styles.height = "1fr"
            return 0
        spare = height - _LIST_ROWS - (len(self._board.sweep.trials) if self._board and self._board.sweep else 0)
        plot.styles.height = rows = max(height * 2 // 5, min(_MOST_PLOT_ROWS, spare)) if beside else 0
        return rows

    def _draw(self) -> None:
        super()._draw()
        board = self._board
        if board is None or board.sweep is None:
            return
        key = LOSS if self._of_loss else board.sweep.objective or LOSS
        self.query_one(Plot).show(trial_lines(board.sweep, board.trials, key), title=key, x_label="tokens")

    def action_plot(self) -> None:
        """Toggle a view of the curves alone."""
        self._only_plot = not self._only_plot
        self._draw()
        self.query_one(Plot if self._only_plot else Sheet).focus()

    def action_metric(self) -> None:
        """Switch between the objective and the training loss."""
        self._of_loss = not self._of_loss
        self._draw()
