"""The first screen: is the run healthy, on plan, and when does it end."""

import time
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Horizontal

from xtrain.tui.board.block import TextBlock
from xtrain.tui.board.overview_text import alerts, figure_lines, lower, verdict
from xtrain.tui.board.pane import Pane
from xtrain.tui.board.pieces import stack
from xtrain.tui.board.plot import Line, Plot
from xtrain.tui.board.refresh_limiter import RefreshLimiter

if TYPE_CHECKING:
    from textual.content import Content

    from xtrain.tui.model.board import Board

# Rows that a plot needs to say anything, and rows that leave space for bands and more alerts.
PLOT_ROWS = 6
TALL_ROWS = 26
# From this width on, the gradient norm has its own plot next to the loss.
TWO_PLOTS_COLUMNS = 120
EVAL_LINES = 3
# A curve of hours does not change to the eye in a quarter of a second, and is what costs most to draw.
PLOT_SECONDS = 1.0


class OverviewPane(Pane):
    """Overview screen: main figures, loss, and comparison with the plan."""

    title = "Overview"
    short = "Over"
    DEFAULT_CSS = """
    OverviewPane { layout: vertical; }
    OverviewPane #plots { height: 1fr; }
    OverviewPane #plots Plot { width: 2fr; }
    OverviewPane #plots #norm-plot { width: 1fr; margin-left: 2; }
    """

    @classmethod
    def available(cls, board: "Board") -> bool:
        return board.server is None

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines: tuple[str, ...] = ()
        self._plotted: tuple[object, ...] = ()
        self._plotted_at = 0.0
        self._sparing = RefreshLimiter()

    def compose(self) -> ComposeResult:
        yield TextBlock(id="verdict")
        yield TextBlock(id="alerts")
        yield TextBlock(id="figures")
        with Horizontal(id="plots"):
            yield Plot(id="loss-plot")
            yield Plot(id="norm-plot")
        yield TextBlock(id="lower")

    def show(self, board: "Board") -> None:
        """Draw `board`: text takes the rows it needs; the plot takes the rest if that is enough."""
        width, height = self.size
        if not width or not height:
            return
        tall = height >= TALL_ROWS
        above: dict[str, list[Content]] = {}
        left = height
        for name, lines in (
            ("verdict", verdict(board, width, tall=tall)),
            ("alerts", alerts(board, width, most=4 if tall else 1)),
            ("figures", figure_lines(board, width)),
        ):
            above[name] = lines[:left]
            left -= len(above[name])
        below = lower(board, width, max(0, left - PLOT_ROWS))
        plots = left - len(below) >= PLOT_ROWS and len(board.series) > 1
        if not plots:
            below = lower(board, width, left)[:left]
        for name, lines in (*above.items(), ("lower", below)):
            self._put(name, lines)
        self.query_one("#plots").display = plots
        if plots:
            self._plot_in_time(board, width, height)
            self.query_one("#loss-plot", Plot).show_newest([board.series.latest(key) for key in self._lines])
            self.query_one("#norm-plot", Plot).show_newest([board.series.latest("grad_norm")])

    def _put(self, name: str, lines: "list[Content]") -> None:
        self.query_one(f"#{name}", TextBlock).show(stack(lines), rows=len(lines))

    def _plot_in_time(self, board: "Board", width: int, height: int) -> None:
        """Draw the curves if they have changed and it is time again; at once where their space is another."""
        space, version = (id(board.series), width, height), board.series.version
        if self._plotted[:1] == (space,):
            early = time.monotonic() - self._plotted_at < PLOT_SECONDS or not self._sparing.due
            if early or self._plotted == (space, version):
                return
        self._plotted, self._plotted_at = (space, version), time.monotonic()
        with self._sparing.spending():
            self._plot(board, width)

    def _plot(self, board: "Board", width: int) -> None:
        series = board.series
        lines = [Line(key, *series.xy(key)) for key in _minimised(board)]
        evaluations = [key for key in series.keys if key.startswith("eval/") and key.endswith("/loss")]
        for key in evaluations[:EVAL_LINES]:
            name = "eval" if len(evaluations) == 1 else f"eval {key.split('/')[1]}"
            lines.append(Line(name, *series.xy(key)))
        self._lines = (*_minimised(board), *evaluations[:EVAL_LINES])
        self.query_one("#loss-plot", Plot).show(lines, title="loss")
        second = self.query_one("#norm-plot", Plot)
        second.display = width >= TWO_PLOTS_COLUMNS
        if second.display:
            second.show([Line("grad norm", *series.xy("grad_norm"))], title="gradient norm")


def _minimised(board: "Board") -> tuple[str, ...]:
    """Return the keys of the loss and, where another value is minimized, of the objective."""
    last = board.series.last
    return ("loss", "objective") if last.objective not in (None, last.loss) else ("loss",)
