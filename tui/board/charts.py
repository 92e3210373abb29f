"""Charts screen: a grid of all metrics, over steps, tokens or time, with one cursor."""

import time
from typing import Any, Final, get_args

from attrs import evolve
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import ItemGrid, VerticalScroll
from textual.widgets import Input

from xtrain.text.units import plural
from xtrain.tui.board.overview import PLOT_SECONDS
from xtrain.tui.board.pane import RefreshLimiter, SearchedPane, Sheet
from xtrain.tui.board.plot import Plot
from xtrain.tui.curves.axis import Unit
from xtrain.tui.model.board import Board
from xtrain.tui.model.series import By
from xtrain.tui.pages.charts import chart_keys, unit_of
from xtrain.tui.pages.comparison import Compared, compared, lines
from xtrain.tui.pages.sheet import joined, rule

# The least columns and rows of a plot; with more room, plots are larger.
COLUMNS, ROWS = 38, 9
# A run whose hooks log thousands of metrics must not take seconds to show; a filter finds the others.
MOST_PLOTS = 200
LAYOUT_SECONDS = 0.05
AXES: Final = get_args(By)
_X_UNITS: Final[dict[By, Unit]] = {"step": "count", "tokens": "count", "time": "seconds"}


class ChartsPane(SearchedPane[Any, Any]):
    """Charts screen: a plot of each metric. All plots have the same range, smoothing and cursor."""

    title = "Charts"
    short = "Chart"

    DEFAULT_CSS = f"""
    ChartsPane Sheet {{ height: 1; }}
    ChartsPane VerticalScroll {{ height: 1fr; scrollbar-size-vertical: 1; }}
    ChartsPane ItemGrid {{ height: auto; grid-gutter: 0 2; grid-rows: {ROWS}; }}
    """
    BINDINGS = [  # noqa: RUF012
        Binding("slash", "search", "filter", tooltip="only metrics that match globs: eval/* *_seconds"),
        Binding("x", "axis", "axis", tooltip="over steps, tokens or time"),
        Binding("escape", "back", "back", show=False, tooltip="all plots again, without a filter"),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._plots: dict[str, Plot] = {}
        self._keys: tuple[str, ...] = ()
        self._by: By = "step"
        self._drawn: object = None
        self._drawn_at = 0.0
        self._limiter = RefreshLimiter()

    @classmethod
    def available(cls, board: Board) -> bool:
        return board.server is None

    def compose(self) -> ComposeResult:
        yield Sheet()
        with VerticalScroll():
            yield ItemGrid(min_column_width=COLUMNS)
        yield Input(placeholder="only metrics that match: eval/* *_seconds; enter keeps the filter", compact=True)

    def on_mount(self) -> None:
        self.query_one(Sheet).can_focus = False
        # Plots that come into view are drawn; all others cost nothing.
        self.watch(self.query_one(VerticalScroll), "scroll_y", self._scrolled, init=False)

    def _scrolled(self) -> None:
        self.call_after_refresh(self._draw)

    def show(self, board: Board) -> None:
        self._board = board
        early = time.monotonic() - self._drawn_at < PLOT_SECONDS or not self._limiter.due
        if board.series.version != self._drawn and not early:
            self._draw()

    # Drawing

    def _run(self) -> list[Compared]:
        return compared([self._board.directory], [self._board]) if self._board is not None else []

    def _draw(self) -> None:
        """Draw the plots in view, and mount plots of new metrics."""
        board, width = self._board, self.content_size.width
        if board is None or not width or not self.is_attached:
            return
        self._drawn, self._drawn_at = board.series.version, time.monotonic()
        with self._limiter.spending():
            query = self.query_one(Input).value.strip()
            found = chart_keys(self._run(), query)
            facts = joined([plural(len(found), "metric"), f"by {self._by}", f"“{query}”" if query else ""])
            self.query_one(Sheet).draw([rule("Charts", width, facts)])
            if found[:MOST_PLOTS] != self._keys:
                self._keys = found[:MOST_PLOTS]
                self._arrange()
                return
            if not all(self._plots[key].region for key in self._keys):  # some are mounted and have no place yet
                self.set_timer(LAYOUT_SECONDS, self._draw)
            view = self.query_one(VerticalScroll).region
            for key in self._keys:
                if self._plots[key].region.overlaps(view) or self._plots[key].is_maximized:
                    (line,) = lines(self._run(), key, self._by)
                    self._plots[key].show(
                        [line], title=key, x_label=self._by, unit=unit_of(key), x_unit=_X_UNITS[self._by]
                    )
                    self._plots[key].show_newest([board.series.latest(key)])

    def _arrange(self) -> None:
        """Show the plots of the wanted metrics, in their order."""
        grid, places = self.query_one(ItemGrid), {key: place for place, key in enumerate(self._keys)}
        new = {key: Plot() for key in self._keys if key not in self._plots}
        known = next(iter(self._plots.values()), None)
        for plot in new.values():
            plot.view = plot.view if known is None else _shared(plot, known)
        self._plots |= new
        for key, plot in self._plots.items():
            plot.display = key in places
        if new:
            grid.mount_all(new.values())
        of = {plot: places.get(key, len(places)) for key, plot in self._plots.items()}
        grid.sort_children(key=lambda child: of[child] if isinstance(child, Plot) else -1)
        if isinstance(self.app.focused, VerticalScroll):
            self._focus_first()
        self.call_after_refresh(self._draw)

    def on_plot_viewed(self, event: Plot.Viewed) -> None:
        """Give all plots the range, smoothing and cursor of the one that was changed."""
        event.stop()
        for plot in self._plots.values():
            if plot is not event.plot:
                plot.take_view(_shared(plot, event.plot))

    def on_resize(self) -> None:  # type: ignore[override]
        height = self.query_one(VerticalScroll).size.height
        rows = max(ROWS, height // max(1, height // ROWS))
        self.query_one(ItemGrid).styles.grid_rows = str(rows)
        self.call_after_refresh(self._draw)

    # Keys

    def action_axis(self) -> None:
        """Switch to the next x axis: steps, tokens, time."""
        self._by = AXES[(AXES.index(self._by) + 1) % len(AXES)]
        self._draw()

    def action_back(self) -> None:
        """Show all plots again, or remove the filter."""
        if self.screen.maximized is not None:
            self.screen.minimize()
        else:
            self._end_search(clear=True)

    def _end_search(self, *, clear: bool) -> None:
        if clear:
            self.query_one(Input).value = ""
        self.remove_class("searching")
        self._focus_first()

    def _focus_first(self) -> None:
        (self._plots[self._keys[0]] if self._keys else self.query_one(VerticalScroll)).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.query_one(VerticalScroll).scroll_home(animate=False)
        self._draw()


def _shared(plot: Plot, other: Plot) -> Any:
    """Return the view of a plot with what it shares with another one."""
    view = other.view
    return evolve(plot.view, span=view.span, right=view.right, cursor=view.cursor, smoothing=view.smoothing)
