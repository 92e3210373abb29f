"""Panes of the dashboard and the widgets they draw on: text blocks, sheets of styled rows, searched lists."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, thread_time
from types import ModuleType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input, Static

from xtrain.tui.board.plot import Plot
from xtrain.tui.model.board import Board
from xtrain.tui.pages import sheet as list_page
from xtrain.tui.pages.sheet import ListPage, ListView, Row, cells

# Share of the time that updates of one screen may take; and seconds that are not counted.
SHARE = 0.05
FREE = 0.02


class RefreshLimiter:
    """Limiter of screen updates by their share of processor time. clock, spent: return elapsed seconds, and processor
    seconds of this thread."""

    def __init__(self, clock: Callable[[], float] = monotonic, spent: Callable[[], float] = thread_time) -> None:
        self._clock, self._spent = clock, spent
        self._next = float("-inf")

    @property
    def due(self) -> bool:
        return self._clock() >= self._next

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Time the enclosed work; the next update is due once this time is a small share of elapsed time."""
        began = self._spent()
        yield
        spent = self._spent() - began
        self._next = self._clock() + (spent / SHARE if spent > FREE else 0.0)


class TextBlock(Static):
    """Lines of text, cut at the edge and never wrapped: the caller makes them for the width."""

    DEFAULT_CSS = """
    TextBlock { height: 1; width: 1fr; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    _shown = Content()
    _rows: int | None = None

    def show(self, content: Content, *, rows: int | None = None) -> None:
        """Show `content` from now on, in `rows` rows of the screen (None: as many as it has now)."""
        if rows is not None and rows != self._rows:
            self._rows = rows
            self.display = rows > 0
            self.styles.height = rows
        if not self._shown.is_same(content):
            self._shown = content
            self.update(content, layout=False)


class Sheet(Widget, can_focus=True):
    """Rows of text, one per screen line. The owner makes them for `content_size` and calls `draw`."""

    DEFAULT_CSS = """
    Sheet { height: 1fr; width: 1fr; }
    Sheet .sheet--dim { color: $text-muted; }
    Sheet .sheet--title { color: $text-primary; text-style: bold; }
    Sheet .sheet--good { color: $text-success; }
    Sheet .sheet--warn { color: $text-warning; text-style: bold; }
    Sheet .sheet--bad { color: $text-error; text-style: bold; }
    Sheet .sheet--mark { color: $text-accent; text-style: bold; }
    Sheet .sheet--bar { color: $text-secondary; }
    Sheet .sheet--line0 { color: $primary; }
    Sheet .sheet--line1 { color: $accent; }
    Sheet .sheet--line2 { color: $success; }
    Sheet .sheet--line3 { color: $error; }
    Sheet .sheet--line4 { color: $secondary; }
    Sheet .sheet--line5 { color: $foreground; }
    Sheet .sheet--line6 { color: $primary 70%; }
    Sheet .sheet--line7 { color: $accent 70%; }
    """
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        *(f"sheet--{name}" for name in ("dim", "title", "good", "warn", "bad", "mark", "bar")),
        *(f"sheet--line{number}" for number in range(8)),  # of curves, as `Plot` has them
    }

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._rows: Sequence[Row] = ()
        self._styles_of: dict[str, Style] = {}

    def draw(self, rows: Sequence[Row]) -> None:
        """Show these rows from now on; only those that are others than before are drawn again."""
        before, self._rows = self._rows, tuple(rows)
        if len(before) != len(rows):
            self.refresh()
            return
        for y, (old, new) in enumerate(zip(before, rows, strict=True)):
            if old != new:
                self.refresh(Region(0, y, self.size.width, 1))

    def notify_style_update(self) -> None:
        """Look styles up again after a change of theme."""
        self._styles_of = {}
        super().notify_style_update()

    def render_line(self, y: int) -> Strip:
        if y >= len(self._rows):
            return Strip.blank(self.size.width, self.rich_style)
        spans = self._rows[y]
        strip = Strip([Segment(text, self._style(name)) for text, name in spans], cells(spans))
        return strip.extend_cell_length(self.size.width, self.rich_style).crop(0, self.size.width)

    def _style(self, name: str) -> Style:
        if name not in self._styles_of:
            style = self.rich_style
            for part in name.split():
                style += _style_of(part) or self.get_component_rich_style(f"sheet--{part}")
            self._styles_of[name] = style
        return self._styles_of[name]


# From cool to hot, each visible on dark and light ground; the signs show the order without color.
HEAT = ("#5b7fb5", "#4482b4", "#2f8ba0", "#2f8f6e", "#5a8c46", "#80822c", "#a07420", "#bf6420", "#d04a36", "#cf2f5c")


def _style_of(name: str) -> Style | None:
    """Return a style that is the same in every theme; None for other names."""
    if name.startswith("heat"):
        return Style(color=HEAT[int(name.removeprefix("heat"))])
    return {"bold": Style(bold=True), "cursor": Style(reverse=True)}.get(name)


class Pane(Widget):
    """Base class of screens: a screen draws a `Board`, and nothing else.

    The app mounts a pane when it is first visited, and calls `show` only while it is visible: when the board has
    changed, and once a second for clocks and ages.
    """

    title: ClassVar[str]
    """Name on the tab line, where it fits."""
    short: ClassVar[str]
    """Title in at most five letters, for narrow terminals."""

    DEFAULT_CSS = """
    Pane { height: 1fr; width: 1fr; }
    """

    @classmethod
    def available(cls, board: Board) -> bool:
        """Return True if this run has anything to show here; other panes are not on the tab line."""
        return True

    def show(self, board: Board) -> None:
        """Draw `board`. It may be called before the run has a plan, a rank or a step."""
        raise NotImplementedError


class DrawnPage(Protocol):
    """Rows of a screen, and the view that they show."""

    @property
    def rows(self) -> Sequence[Row]: ...
    @property
    def view(self) -> Any: ...


ViewT = TypeVar("ViewT")
PageT = TypeVar("PageT", bound=DrawnPage)


class RowsPane(Pane, Generic[ViewT, PageT]):
    """Screen whose rows follow from its data and the reader's choices.

    _view: the choices, at first from the class. _page: the page drawn last, None before.
    """

    nothing: ClassVar[str] = ""
    """Sentence that is shown while there is no page."""
    keys: ClassVar[ModuleType]
    """Key functions: each takes the drawn page and returns the next view."""
    _view: ViewT
    _page: PageT | None = None
    _board: Board | None = None

    def compose(self) -> ComposeResult:
        yield Sheet()

    def show(self, board: Board) -> None:
        self._board = board
        self._draw()

    def _new_page(self, width: int, height: int) -> PageT | None:
        """Return the page of the known data in the view; None without data."""
        raise NotImplementedError

    def _draw(self) -> None:
        """Draw the known data, once there is room for it."""
        sheet = self.query_one(Sheet)
        width, height = sheet.content_size
        if width and height:
            self._page = page = self._new_page(width, height)
            self._view = self._view if page is None else page.view
            sheet.draw([((self.nothing, "dim"),)] if page is None else page.rows)

    def _go(self, view: ViewT) -> None:
        """Change to `view` and draw."""
        self._view = view
        self._draw()

    def action_do(self, name: str, first: object = None, second: object = None) -> None:
        """Apply a function of `keys` with these arguments. (Textual passes only as many arguments as an action has
        named parameters.)"""
        if self._page is not None:
            given = (each for each in (first, second) if each is not None)
            self._go(getattr(self.keys, name)(self._page, *given))

    def action_turn(self, by: int) -> None:
        """Scroll by `by` pages."""
        self.action_do("moved", by * max(1, getattr(self._page, "height", 1) - 1))

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self._draw)


def cursor_keys(noun: str) -> list[BindingType]:
    """Return the keys that move a cursor by rows and by pages."""
    keys = (
        ("down,j", "do('moved', 1)", f"next {noun}"),
        ("up,k", "do('moved', -1)", f"previous {noun}"),
        ("pagedown", "turn(1)", "page down"),
        ("pageup", "turn(-1)", "page up"),
    )
    return [Binding(*key, show=False) for key in keys]


class ListPane(RowsPane[ListView, ListPage]):
    """Screen with one list and a cursor."""

    keys = list_page
    BINDINGS = cursor_keys("row")
    _view = ListView()


class PlottedPane(RowsPane[ViewT, PageT]):
    """Screen of rows above curves; with few rows, one of the two."""

    DEFAULT_CSS = """
    PlottedPane { layout: vertical; }
    """
    _only_plot = False

    def compose(self) -> ComposeResult:
        yield Sheet()
        yield Plot()

    def _plot_rows(self, height: int) -> int:
        """Return how many of `height` rows the curves take below the sheet; 0 without room for both."""
        raise NotImplementedError

    def _draw(self) -> None:
        width, height = self.content_size
        if not width or not height:
            return
        sheet, plot, rows = self.query_one(Sheet), self.query_one(Plot), self._plot_rows(height)
        sheet.display, plot.display = not self._only_plot, self._only_plot or rows > 0
        plot.styles.height = "1fr" if self._only_plot else rows
        self._page = page = self._new_page(width, max(1, height - rows))
        if page is not None:
            self._view = page.view
            sheet.draw(page.rows)

    def action_plot(self) -> None:
        """Toggle a view of the curves alone."""
        self._only_plot = not self._only_plot
        self._draw()
        self.query_one(Plot if self._only_plot else Sheet).focus()


class SearchedPane(RowsPane[ViewT, PageT]):
    """Screen of rows with a search line below them."""

    DEFAULT_CSS = """
    SearchedPane { layout: vertical; }
    SearchedPane Input { height: 1; border: none; padding: 0 1; display: none; }
    SearchedPane.searching Input { display: block; }
    """
    searches: ClassVar[str]
    """Prompt of the search line."""

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield Input(placeholder=self.searches, compact=True)

    def action_search(self) -> None:
        """Ask for a text."""
        self.add_class("searching")
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._end_search(clear=False)

    def _end_search(self, *, clear: bool) -> None:
        """Return to the rows. clear: also delete the search text."""
        if clear:
            self.query_one(Input).value = ""
        self.remove_class("searching")
        self.query("Sheet, OptionList").last().focus()
        self.call_after_refresh(self._draw)
