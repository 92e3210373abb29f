"""The Datasets screen: what the run takes of each dataset, and what it learns from each."""

from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.binding import Binding

from xtrain.tui.board.plot import Line, Plot
from xtrain.tui.board.rows_pane import RowsPane
from xtrain.tui.board.sheet import Sheet
from xtrain.tui.pages import list_page
from xtrain.tui.pages.dataset_page import least_rows, page
from xtrain.tui.pages.list_page import ListPage, ListView
from xtrain.tui.pages.mixture import MixtureTable, mixture, several

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board

_PLOT_ROWS = 7
_TABLE_ROWS = 6
# Plots: title, and key of the metrics of a dataset.
_CURVES = (("loss by dataset", "loss/{}"), ("held-out loss", "eval/{}/loss"), ("data wait", ""))


class DatasetsSheet(Sheet):
    """Table of datasets; it has the keys of the screen."""


class DatasetsPane(RowsPane[ListView, ListPage]):
    """Datasets screen: losses, rows and shares of every dataset."""

    title = "Datasets"
    short = "Data"
    keys = list_page

    DEFAULT_CSS = """
    DatasetsPane { layout: vertical; }
    """
    BINDINGS = [  # noqa: RUF012
        Binding("down,j", "do('moved', 1)", "next dataset", show=False),
        Binding("up,k", "do('moved', -1)", "previous dataset", show=False),
        Binding("pagedown", "turn(1)", "page down", show=False),
        Binding("pageup", "turn(-1)", "page up", show=False),
        Binding("v", "curves", "curves", tooltip="losses, held-out losses, data wait"),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(ListView(), id=id)
        self._mixture = MixtureTable()
        self._step = 0
        self._version: object = None
        self._curves = 0
        self._beside, self._only_plot = True, False
        self._board: Board | None = None

    @classmethod
    def available(cls, board: "Board") -> bool:
        return several(board)

    def compose(self) -> ComposeResult:
        yield DatasetsSheet()
        yield Plot()

    def show(self, board: "Board") -> None:
        if board.version == self._version:
            return
        self._version, self._board = board.version, board
        self._mixture, self._step = mixture(board), board.step
        self._plot()
        self._draw()

    def _plot(self) -> None:
        if self._board is None:
            return
        series = self._board.series
        title, key = _CURVES[self._curves]
        if not key:
            x, y = series.xy("data_seconds")
            self.query_one(Plot).show([Line(title, x, y)], title=title, unit="seconds")
            return
        found = [(one.name, series.xy(key.format(one.name))) for one in self._mixture.datasets]
        lines = [Line(name, x, y) for name, (x, y) in found if len(x)]
        self.query_one(Plot).show(lines, title=title)

    def _draw(self) -> None:
        sheet = self.query_one(DatasetsSheet)
        width, height = self.content_size
        if not width or not height:
            return
        # Without room for some of the table and a plot, `v` switches between the two.
        self._beside = height - _PLOT_ROWS >= min(_TABLE_ROWS, least_rows(self._mixture))
        only_plot = self._only_plot and not self._beside
        sheet.display, self.query_one(Plot).display = not only_plot, self._beside or only_plot
        most = height - _PLOT_ROWS if self._beside else height
        self._page = page(self._mixture, self._view, width, most, step=self._step)
        self._view = self._page.view
        sheet.styles.height = len(self._page.rows)
        sheet.draw(self._page.rows)

    def action_curves(self) -> None:
        """Show the next plot: losses, held-out losses, the wait for rows."""
        if self._beside or self._only_plot:
            self._curves = (self._curves + 1) % len(_CURVES)
            self._only_plot = self._curves > 0
        else:
            self._only_plot = True
        self._plot()
        self._draw()
