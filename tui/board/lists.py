"""Datasets, Experts, Events and Server screens."""

from pathlib import Path

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import Input

from xtrain.text.units import whole
from xtrain.tui.board.pane import ListPane, PlottedPane, RowsPane, SearchedPane, Sheet, cursor_keys
from xtrain.tui.board.plot import Line, Plot
from xtrain.tui.model.board import Board
from xtrain.tui.model.event_log import EventLog
from xtrain.tui.model.series import Series
from xtrain.tui.pages import events as event_keys
from xtrain.tui.pages import experts as expert_page
from xtrain.tui.pages import server_page
from xtrain.tui.pages import sheet as list_page
from xtrain.tui.pages.events import EventsPage, EventsView, back, searched
from xtrain.tui.pages.events import page as events_page
from xtrain.tui.pages.experts import ExpertsPage, ExpertsView, LayerLoad, layer_loads
from xtrain.tui.pages.experts import page as experts_page
from xtrain.tui.pages.mixture import MixtureTable, least_rows, mixture, several
from xtrain.tui.pages.mixture import page as datasets_page
from xtrain.tui.pages.sheet import ListPage, ListView

_DATASETS_PLOT_ROWS = 7
_TABLE_ROWS = 6
# Plots: title, and key of the metrics of a dataset.
_CURVES = (("loss by dataset", "loss/{}"), ("held-out loss", "eval/{}/loss"), ("data wait", ""))


class DatasetsPane(RowsPane[ListView, ListPage]):
    """Datasets screen: losses, rows and shares of every dataset."""

    title = "Datasets"
    short = "Data"
    keys = list_page

    DEFAULT_CSS = """
    DatasetsPane { layout: vertical; }
    """
    BINDINGS = [  # noqa: RUF012
        *cursor_keys("dataset"),
        Binding("v", "curves", "curves", tooltip="losses, held-out losses, data wait"),
    ]
    _view, _mixture, _version = ListView(), MixtureTable(), -1
    _curves, _beside, _only_plot = 0, True, False

    @classmethod
    def available(cls, board: Board) -> bool:
        return several(board)

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield Plot()

    def show(self, board: Board) -> None:
        if board.version != self._version:
            self._version, self._mixture = board.version, mixture(board)
            self._plot(board.series)
            super().show(board)

    def _plot(self, series: Series) -> None:
        title, key = _CURVES[self._curves]
        if not key:
            x, y = series.xy("data_seconds")
            self.query_one(Plot).show([Line(title, x, y)], title=title, unit="seconds")
            return
        found = [(one.name, series.xy(key.format(one.name))) for one in self._mixture.datasets]
        lines = [Line(name, x, y) for name, (x, y) in found if len(x)]
        self.query_one(Plot).show(lines, title=title)

    def _draw(self) -> None:
        sheet = self.query_one(Sheet)
        width, height = self.content_size
        if not width or not height or self._board is None:
            return
        # Without room for some of the table and a plot, `v` switches between the two.
        self._beside = height - _DATASETS_PLOT_ROWS >= min(_TABLE_ROWS, least_rows(self._mixture))
        only_plot = self._only_plot and not self._beside
        sheet.display, self.query_one(Plot).display = not only_plot, self._beside or only_plot
        most = height - _DATASETS_PLOT_ROWS if self._beside else height
        self._page = datasets_page(self._mixture, self._view, width, most, step=self._board.step)
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
        if self._board is not None:
            self._plot(self._board.series)
            self._draw()


AUX_LOSS = "moe/aux_loss"
# The plot takes the rows that the map leaves, within these limits; with fewer rows it replaces the map.
_EXPERTS_PLOT_ROWS, _MOST_PLOT_ROWS = 7, 26


class ExpertsPane(PlottedPane[ExpertsView, ExpertsPage]):
    """Experts screen: load of every expert of every layer, relative to an even load, and the balance loss."""

    title = "Experts"
    short = "MoE"
    keys = expert_page
    BINDINGS = [  # noqa: RUF012
        *cursor_keys("layer"),
        Binding("home", "do('moved', -1000000)", "first layer", show=False),
        Binding("end", "do('moved', 1000000)", "last layer", show=False),
        Binding("o", "do('reordered')", "order", tooltip="the most uneven layer first, or by number"),
        Binding("a", "plot", "aux loss", tooltip="only the load-balancing loss, and back"),
    ]
    _view, _version = ExpertsView(), -1
    _loads: tuple[LayerLoad, ...] = ()

    @classmethod
    def available(cls, board: Board) -> bool:
        planned = board.planned
        if planned is not None and (whole(_architecture(board).get("experts")) or 0) > 1:
            return True
        return AUX_LOSS in board.series.keys or any(key.startswith("moe/") for key in board.series.last.rest)

    def show(self, board: Board) -> None:
        if board.series.version != self._version:
            self._version = board.series.version
            # A record without loads, as of a step that was skipped, leaves those that were there.
            self._loads = layer_loads(board.series.last.rest) or self._loads
            line = Line("aux loss", *board.series.xy(AUX_LOSS))
            self.query_one(Plot).show([line], title="aux loss (1: balanced)")
            super().show(board)

    def _plot_rows(self, height: int) -> int:
        spare = height - 12 - max(1, len(self._loads))
        beside = spare >= _EXPERTS_PLOT_ROWS or height >= 30
        return min(_MOST_PLOT_ROWS, max(_EXPERTS_PLOT_ROWS, spare)) if beside else 0

    def _new_page(self, width: int, height: int) -> ExpertsPage | None:
        if self._board is None:
            return None
        return experts_page(self._loads, self._view, width, height, facts=_facts(self._board, self._loads))


def _architecture(board: Board) -> dict[str, object]:
    found = board.planned.content.get("architecture") if board.planned else None
    return found if isinstance(found, dict) else {}


def _facts(board: Board, loads: tuple[LayerLoad, ...]) -> list[str]:
    """Return `4 layers of 8 experts`, `2 a token`, `step 60`."""
    planned, parts = _architecture(board), []
    if loads:
        parts.append(f"{len(loads)} {'layer' if len(loads) == 1 else 'layers'} of {loads[0].num_experts} experts")
    if taken := whole(planned.get("experts_per_token")):
        parts.append(f"{taken} a token")
    step = board.series.last.step
    return [*parts, f"step {step:,}"] if step is not None else parts


class EventsPane(SearchedPane[EventsView, EventsPage]):
    """Events screen: all events, newest last; the chosen one in full; the logs of the ranks."""

    title = "Events"
    short = "Event"
    keys = event_keys
    searches = "only events and lines with this text; enter keeps the filter, esc removes it"
    _view, _log, _directory = EventsView(), EventLog(), Path()

    BINDINGS = [  # noqa: RUF012
        *cursor_keys("event"),
        Binding("home", "do('moved', -1000000)", "oldest", show=False),
        Binding("f,end", "do('newest')", "follow", key_display="f", tooltip="to the newest, and follow"),
        Binding("enter", "do('entered')", "in full", tooltip="the event in full, and back"),
        Binding("slash", "search", "filter", tooltip="filter by a text"),
        Binding("right_square_bracket,right", "do('other_kinds', 1)", "kind", key_display="]",
                tooltip="all events, problems, or one kind"),
        Binding("left_square_bracket,left", "do('other_kinds', -1)", "previous kind", show=False),
        Binding("l", "do('other_log')", "logs", tooltip="the ends of the logs, one after the other"),
        Binding("escape", "back", "back", show=False),
    ]  # fmt: skip

    def show(self, board: Board) -> None:
        if self._page is None or board.events.version != self._log.version or board.events is not self._log:
            self._log, self._directory = board.events, board.directory
            self._draw()

    def _new_page(self, width: int, height: int) -> EventsPage:
        return events_page(self._log, self._view, width, height, directory=str(self._directory))

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


class ServerPane(ListPane):
    """Server screen: clients, models, queue and throughput."""

    title = "Server"
    short = "Serve"

    @classmethod
    def available(cls, board: Board) -> bool:
        return board.server is not None

    def _new_page(self, width: int, height: int) -> ListPage | None:
        board = self._board
        if board is None or board.server is None:
            return None
        return server_page.page(board.server, self._view, width, height, board.now)
