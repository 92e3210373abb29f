"""Compare and Sweep screens: several runs, or the trials of a sweep, in one picture."""

import time
from pathlib import Path
from typing import Any, get_args

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from xtrain.text.units import printable
from xtrain.tui.board.pane import PlottedPane, SearchedPane, Sheet, cursor_keys
from xtrain.tui.board.plot import Plot, terminal_glyphs
from xtrain.tui.board.reading import ReadingOthers
from xtrain.tui.curves.axis import Unit
from xtrain.tui.curves.canvas import MOST_LINES
from xtrain.tui.model.board import Board
from xtrain.tui.model.find import FoundRun, found_runs
from xtrain.tui.pages import sheet
from xtrain.tui.pages import sweeps as sweep_page
from xtrain.tui.pages.charts import unit_of
from xtrain.tui.pages.comparison import (
    Axis,
    Compared,
    RunColors,
    common_place,
    compared,
    difference_rows,
    differences,
    lines,
    metric_keys,
    run_items,
    standing_rows,
    standings,
)
from xtrain.tui.pages.sheet import ListPage, ListView, joined, rule
from xtrain.tui.pages.sweeps import LOSS, trial_lines

# From this height on, settings are also shown below the curves.
_ROOM_FOR_SETTINGS = 34
_SETTINGS_ROWS = 9
_RUNS, _METRICS = "Runs to compare with", "Metrics"


class OtherRead(Message):
    """Message that another run has new records."""


class ComparePane(SearchedPane[Any, Any]):
    """Compare screen: curves of several runs over the same steps or tokens, their values, and the settings that
    differ."""

    title = "Compare"
    short = "Comp"

    DEFAULT_CSS = """
    ComparePane #compare-settings { display: none; }
    ComparePane #compare-list { display: none; height: 1fr; padding: 0 1; background: transparent; }
    ComparePane #compare-list > .option-list--option-highlighted { text-style: reverse; }
    ComparePane.choosing #compare-list { display: block; }
    ComparePane.choosing Plot { display: none; }
    ComparePane.settings Plot { display: none; }
    """
    BINDINGS = [  # noqa: RUF012
        Binding("r", "choose('runs')", "runs", tooltip="choose the runs to compare with"),
        Binding("m", "choose('metrics')", "metric", tooltip="choose the metric"),
        Binding("x", "axis", "axis", tooltip="over steps, tokens or time"),
        Binding("d", "settings", "settings", tooltip="only the settings in which the runs differ, and back"),
        Binding("slash", "search", "filter", show=False),
        Binding("down,j", "move(1)", "next", show=False),
        Binding("up,k", "move(-1)", "before", show=False),
        Binding("pagedown", "move(10)", "page down", show=False),
        Binding("pageup", "move(-10)", "page up", show=False),
        Binding("escape", "back", "back", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._others: list[Path] | None = None
        self._reading = ReadingOthers(lambda: self.post_message(OtherRead()))
        self._colors = getattr(self.app, "run_colors", None) or RunColors()
        self._key = "loss"
        self._axis: Axis = "step"
        self._choosing = ""
        self._found: list[FoundRun] | None = None
        self._about_list = ""
        self._scroll = 0
        self._seen: object = None

    def compose(self) -> ComposeResult:
        yield Sheet(id="compare-table")
        yield Plot()
        yield Sheet(id="compare-settings")
        yield OptionList(id="compare-list", compact=True)
        yield Input(placeholder="only runs with this text", compact=True)

    def on_mount(self) -> None:
        self.query_one("#compare-table", Sheet).can_focus = False
        self._reading.start()

    def on_unmount(self) -> None:
        self._reading.close()

    def show(self, board: Board) -> None:
        if self._others is None:
            given = getattr(self.app, "compared", ())
            self._others = [path for path in given if path.absolute() != board.directory.absolute()][: MOST_LINES - 1]
        self._board = board
        self._reading.want(self._others)
        seen = tuple((run.directory, run.board and run.board.version) for run in self._runs())
        if seen != self._seen:
            self._seen = seen
            self._draw()

    def on_other_read(self) -> None:
        if self.display and self._board is not None and not getattr(self.app, "frozen_at", ""):
            self._draw()

    # Drawing

    def _runs(self) -> list[Compared]:
        if self._board is None:
            return []
        directories = [self._board.directory, *(self._others or ())]
        boards = [self._board, *(self._reading.board(path) for path in self._others or ())]
        return compared(directories, boards, self._colors)

    def _draw(self) -> None:
        width, height = self.content_size
        runs = self._runs()
        if not width or not height or not runs:
            return
        table, plot = self.query_one("#compare-table", Sheet), self.query_one(Plot)
        settings = self.query_one("#compare-settings", Sheet)
        if self._choosing:
            table.styles.height, settings.display = 1, False
            table.draw([rule(self._choosing, width, self._about_list)])
            return
        curves = lines(runs, self._key, self._axis)
        common = common_place(curves)
        markers = terminal_glyphs().markers
        rows = standing_rows(standings(runs, self._key, curves), self._key, self._axis, common, width, markers=markers)
        if len(runs) == 1:
            rows.append(((" r: choose runs to compare with", "dim"),))
        table.styles.height = len(rows)
        table.draw(rows)
        x_unit: Unit = "seconds" if self._axis == "time" else "count"
        plot.show(curves, title=self._key, x_label=self._axis, unit=unit_of(self._key), x_unit=x_unit)
        only = self.has_class("settings")
        settings.display = only or (len(runs) > 1 and height >= _ROOM_FOR_SETTINGS)
        room = height - len(rows) if only else _SETTINGS_ROWS
        settings.styles.height = max(1, room)
        if settings.display:
            signs = [(markers[run.color], f"line{run.color}") for run in runs]
            settings.draw(difference_rows(differences(runs), width, max(1, room), top=self._scroll, signs=signs))

    def _fill_list(self) -> None:
        """List the runs or metrics that contain the text of the search; the cursor stays on its line."""
        listed, query = self.query_one(OptionList), self.query_one(Input).value.strip()
        of_runs = self._choosing == _RUNS
        items = ((key, key) for key in metric_keys(self._runs()))
        if of_runs:
            items = run_items(self._found or (), self._others or (), time.time())
        found = {key: text for key, text in items if query.casefold() in text.casefold()}
        options = [Option(Content(printable(text)), id=key) for key, text in found.items()]
        place = listed.highlighted or 0
        listed.clear_options().add_options(options)
        listed.highlighted = min(place, len(options) - 1) if options else None
        if not options:
            words = "no other runs" if of_runs and not query else "none with this text"
            listed.add_option(Option("looking for runs" if of_runs and self._found is None else words, disabled=True))
        keys = "enter: add or remove" if of_runs else "enter: choose"
        self._about_list = joined([f"“{query}”" if query else "", f"{len(options):,}", keys, "esc: back"])
        self._draw()

    # Keys

    def action_choose(self, what: str) -> None:
        """Open a list, or close it."""
        wanted = _RUNS if what == "runs" else _METRICS
        if self._choosing == wanted:
            self.action_back()
            return
        self._choosing = wanted
        self.add_class("choosing")
        with self.prevent(Input.Changed):  # each list begins without a filter
            self.query_one(Input).value = ""
        self._fill_list()
        keys = metric_keys(self._runs())
        listed = self.query_one(OptionList)
        listed.highlighted = keys.index(self._key) if wanted == _METRICS and self._key in keys else 0
        listed.focus()
        if wanted == _RUNS and self._board is not None:
            self._find(self._board.directory)

    @work(thread=True, exclusive=True, group="finding", exit_on_error=False)
    def _find(self, directory: Path) -> None:
        found = found_runs(directory)
        self.app.call_from_thread(self._take_found, found)

    def _take_found(self, found: list[FoundRun]) -> None:
        # Runs named on the command line may be elsewhere.
        known = {run.directory for run in found}
        others = [path.absolute() for path in self._others or () if path.absolute() not in known]
        self._others = [path.absolute() for path in self._others or ()]
        named = [
            FoundRun(directory=path, name=str(path), step=None, loss=None, status="", time=None) for path in others
        ]
        self._found = [*named, *found]
        if self._choosing:
            self._fill_list()

    def action_move(self, by: int) -> None:
        """Move the cursor of a list, or scroll the settings."""
        listed = self.query_one(OptionList)
        if self._choosing:
            page = abs(by) > 1
            down, up = (f"action_{'page' if page else 'cursor'}_{way}" for way in ("down", "up"))
            getattr(listed, down if by > 0 else up)()
        else:
            self._scroll = max(0, self._scroll + by)
            self._draw()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Choose a metric, or add or remove a run."""
        event.stop()
        if self._choosing == _METRICS:
            self._key = event.option_id or self._key
            self.action_back()
            return
        path, others = Path(event.option_id or ""), list(self._others or ())
        if path in others:
            others.remove(path)
        elif len(others) < MOST_LINES - 1:
            others.append(path)
        else:
            self.app.notify(f"{MOST_LINES} runs are the most that can be compared", severity="warning")
        self._others = others
        self._reading.want(others)
        self._fill_list()

    def action_axis(self) -> None:
        """Switch to the next x axis: steps, tokens, time."""
        axes = get_args(Axis)
        self._axis = axes[(axes.index(self._axis) + 1) % len(axes)]
        self._draw()

    def action_settings(self) -> None:
        """Toggle a view of the settings alone."""
        self.toggle_class("settings")
        self._scroll = 0
        target = self.query_one("#compare-settings", Sheet) if self.has_class("settings") else self.query_one(Plot)
        self._draw()
        target.focus()

    def action_back(self) -> None:
        """Close the part that was opened last."""
        if self.has_class("searching"):
            self._end_search(clear=True)
        elif self._choosing:
            self._choosing = ""
            self.remove_class("choosing")
            self.query_one(Input).value = ""
            self.query_one(Plot).focus()
            self.call_after_refresh(self._draw)
        elif self.has_class("settings"):
            self.action_settings()

    def action_search(self) -> None:
        """Ask for a text, of the runs or the metrics."""
        if not self._choosing:
            self.action_choose("runs")
        super().action_search()

    def on_input_changed(self, event: Input.Changed) -> None:
        if self._choosing:
            self.query_one(OptionList).highlighted = None
            self._fill_list()


# Rows that stand around the list; that the curves need, with less they are shown in its place; and that they take at
# most.
_LIST_ROWS, _PLOT_ROWS, _MOST_PLOT_ROWS = 12, 8, 26


class SweepPane(PlottedPane[ListView, ListPage]):
    """Sweep screen: progress, best trial, curves, importance of settings, and trials."""

    title = "Sweep"
    short = "Swp"
    keys = sheet
    BINDINGS = [  # noqa: RUF012
        *cursor_keys("trial"),
        Binding("v", "plot", "curves", tooltip="only the curves, and back"),
        Binding("o", "metric", "objective", tooltip="curves of the objective, or of the training loss"),
    ]
    _view, _of_loss = ListView(), False

    @classmethod
    def available(cls, board: Board) -> bool:
        return board.sweep is not None

    def _plot_rows(self, height: int) -> int:
        if self._only_plot or height < _LIST_ROWS + _PLOT_ROWS:
            return 0
        spare = height - _LIST_ROWS - (len(self._board.sweep.trials) if self._board and self._board.sweep else 0)
        return max(height * 2 // 5, min(_MOST_PLOT_ROWS, spare))

    def _new_page(self, width: int, height: int) -> ListPage | None:
        board = self._board
        if board is None or board.sweep is None:
            return None
        key = LOSS if self._of_loss else board.sweep.objective or LOSS
        folder, colors = board.directory.parent, getattr(self.app, "run_colors", None) or RunColors()
        curves = trial_lines(board.sweep, board.trials, key, colors, folder)
        self.query_one(Plot).show(curves, title=key, x_label="tokens")
        return sweep_page.page(board.sweep, board.directory.name, self._view, width, height)

    def action_metric(self) -> None:
        """Switch between the objective and the training loss."""
        self._of_loss = not self._of_loss
        self._draw()
