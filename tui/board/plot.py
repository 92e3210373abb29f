"""A plot of curves that has its own keys while it has the focus."""

import io
import locale
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from xtrain.regular_files import reason_of
from xtrain.tui.curves.axis import Unit
from xtrain.tui.curves.canvas import ASCII, UNICODE, Curve, Glyphs, Line, Row, next_point
from xtrain.tui.curves.drawing import Drawing, draw, extent_of, head
from xtrain.tui.curves.picture import standalone
from xtrain.tui.curves.viewport import Viewport

__all__ = ["Line", "Plot", "terminal_glyphs"]

_PAN = 0.25
_ZOOM = 2.0
_WHEEL = 1.25


def terminal_glyphs() -> Glyphs:
    """Return braille glyphs if the terminal takes UTF-8 and has a font for them (the Linux console has none).

    The locale decides: Python writes UTF-8 also where the locale is `C` (its UTF-8 mode).
    """
    named = next(filter(None, map(os.environ.get, ("LC_ALL", "LC_CTYPE", "LANG"))), "")
    # A locale that is set but not installed here still shows what the terminal takes.
    charset = named.rpartition(".")[2] if "." in named else locale.getencoding()
    written = getattr(sys.__stdout__, "encoding", None) or charset
    takes = all(name.lower().replace("-", "").startswith("utf") for name in (charset, written))
    return UNICODE if takes and os.environ.get("TERM") != "linux" else ASCII


class Plot(Widget, can_focus=True):
    """Line plot; the owner calls `show` with the current lines.

    The reader's choices (scale, smoothing, range, cursor) are kept when the lines change.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        *(f"plot--line{number}" for number in range(8)),
        *(f"plot--{name}" for name in ("dim", "axis", "title", "note", "value", "cursor")),
    }
    DEFAULT_CSS = """
    Plot { height: 1fr; width: 1fr; }
    Plot > .plot--line0 { color: $primary; }
    Plot > .plot--line1 { color: $accent; }
    Plot > .plot--line2 { color: $success; }
    Plot > .plot--line3 { color: $error; }
    Plot > .plot--line4 { color: $secondary; }
    Plot > .plot--line5 { color: $foreground; }
    Plot > .plot--line6 { color: $primary 70%; }
    Plot > .plot--line7 { color: $accent 70%; }
    Plot > .plot--dim { color: $foreground 45%; text-style: dim; }
    Plot > .plot--axis { color: $foreground 65%; }
    Plot > .plot--note { color: $foreground 65%; }
    Plot > .plot--title { text-style: bold; }
    Plot:focus > .plot--title { text-style: bold reverse; }
    Plot > .plot--value { text-style: bold; }
    Plot > .plot--cursor { color: $accent; text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "log", "log", tooltip="logarithmic values, or linear ones again"),
        Binding("s", "smooth", "smooth", tooltip="smoothing 0.9, 0.99, 0.999, none"),
        Binding("plus,equals_sign", "zoom(1)", "zoom", key_display="+ -", tooltip="closer"),
        Binding("minus", "zoom(-1)", "zoom out", show=False),
        Binding("left", "move(-1)", "left, or the cursor a point back", show=False),
        Binding("right", "move(1)", "right, or the cursor a point on", show=False),
        Binding("shift+left", "move(-10)", "far left", show=False),
        Binding("shift+right", "move(10)", "far right", show=False),
        Binding("0", "whole", "the whole run", show=False),
        Binding("y", "fit", "scale", tooltip="y: all values, 1 to 99% of them, or fixed as it is now"),
        Binding("p", "picture", "svg", tooltip="save the plot as SVG, in this folder or as a download"),
        Binding("enter", "enlarge", "large", show=False, tooltip="only this plot, and back"),
        Binding("c", "cursor", "read", tooltip="read values at a step: left and right move the cursor"),
    ]

    class Viewed(Message):
        """Message that the reader has changed the view of a plot."""

        def __init__(self, plot: "Plot") -> None:
            super().__init__()
            self.plot = plot

    ALLOW_MAXIMIZE = True

    def __init__(self, *, id: str | None = None, classes: str | None = None, glyphs: Glyphs | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.view = Viewport()
        self._glyphs = glyphs or terminal_glyphs()
        self._curves: tuple[Curve, ...] = ()
        self._title, self._x_label = "", "step"
        self._unit: Unit = "number"
        self._x_unit: Unit = "count"
        self._drawing = Drawing(rows=())
        self._strips: list[Strip] = []
        self._drawn_for: object = None
        self._newest: tuple[float | None, ...] = ()
        self._newest_drawn: tuple[float | None, ...] = ()
        self._dragged_from: int | None = None
        self._dragged = False

    def show(
        self,
        lines: Sequence[Line],
        *,
        title: str,
        x_label: str = "step",
        unit: Unit = "number",
        x_unit: Unit = "count",
    ) -> None:
        """Draw `lines` from now on. A line of the very arrays that were there before costs nothing."""
        known = {(id(curve.line.x), id(curve.line.y), curve.line.name, curve.line.dim): curve for curve in self._curves}
        curves = tuple(known.get((id(line.x), id(line.y), line.name, line.dim)) or Curve(line) for line in lines)
        before = (self._curves, self._title, self._x_label, self._unit, self._x_unit)
        now = (curves, title, x_label, unit, x_unit)
        if x_label != self._x_label:
            # Positions in units of the old axis mean nothing on another axis.
            self.view = Viewport(log=self.view.log, smoothing=self.view.smoothing)
        if now != before:
            self._curves, self._title, self._x_label, self._unit, self._x_unit = now
            self.refresh()

    def show_newest(self, newest: Sequence[float | None]) -> None:
        """Show the newest values in the head: the lines may be redrawn less often, as that costs more."""
        if tuple(newest) != self._newest:
            self._newest = tuple(newest)
            self.refresh(Region(0, 0, self.size.width, max(1, self._drawing.heads)))

    @property
    def text(self) -> str:
        """The text on the screen, without colors."""
        self._draw()
        return "\n".join("".join(text for text, _ in row) for row in self._drawing.rows)

    def render_line(self, y: int) -> Strip:
        self._draw()
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width)

    def _draw(self) -> None:
        """Redraw if anything has changed."""
        wanted = (self._curves, self.view, self._title, self._x_label, self.size, self.app.theme, self.has_focus)
        if wanted == self._drawn_for and self._newest == self._newest_drawn:
            return
        place = (self._curves, self.view, self.size.width, self.size.height)
        said: dict[str, Any] = {"title": self._title, "x_label": self._x_label, "unit": self._unit}
        said |= {"glyphs": self._glyphs, "newest": self._newest}
        only_head = wanted == self._drawn_for
        under = self._drawing.with_head(head(*place, **said)) if only_head else None
        self._drawn_for, self._newest_drawn = wanted, self._newest
        self._drawing = under or draw(*place, **said, x_unit=self._x_unit)
        if only_head and under is None:
            self.refresh()  # it has other rows than before, and so has all below it
        strips_below = [] if under is None else self._strips[under.heads :]
        self._strips = [*self._styled(self._drawing.rows[: len(self._drawing.rows) - len(strips_below)]), *strips_below]

    def _styled(self, rows: Sequence[Row]) -> list[Strip]:
        styles: dict[str, Style] = {"": self.rich_style}
        for name in {name for row in rows for _, name in row} - styles.keys():
            part = "dim" if name.startswith("dim") else name
            styles[name] = self.get_component_rich_style(f"plot--{part}")
        return [Strip([Segment(text, styles[name]) for text, name in row], self.size.width) for row in rows]

    def _choose(self, view: Viewport) -> None:
        self.take_view(view)
        self.post_message(self.Viewed(self))

    def take_view(self, view: Viewport) -> None:
        """Draw in a view from now on."""
        self.view = view
        self.refresh()

    def action_fit(self) -> None:
        """Switch to the next scale of values."""
        self._choose(self.view.refitted(self._drawing.span))

    def action_enlarge(self) -> None:
        """Show this plot alone, or all of the screen again."""
        self.screen.minimize() if self.is_maximized else self.screen.maximize(self)

    def action_picture(self) -> None:
        """Save the plot as it is seen as an SVG file."""
        lines, x = [curve.line for curve in self._curves], (self._x_label, self._x_unit)
        text = standalone(lines, self.view, title=self._title, x_label=x[0], unit=self._unit, x_unit=x[1])
        if text is None:
            self.app.notify("the plot has no values to save", severity="warning")
            return
        directory: Path | None = getattr(self.app, "directory", None)
        stem = re.sub(r"[^\w.-]+", "_", "-".join(filter(None, (directory and directory.name, self._title)))) or "plot"
        if self.app.is_web:
            self.app.deliver_text(io.StringIO(text), save_filename=f"{stem}.svg", mime_type="image/svg+xml")
            return
        try:
            number = next((n for n in range(2, 1000) if not Path(f"{stem}-{n}.svg").exists()), 1000)
            path = Path.cwd() / (f"{stem}-{number}.svg" if Path(f"{stem}.svg").exists() else f"{stem}.svg")
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            message = f"the plot cannot be saved: {reason_of(error)}"
            self.app.notify(message, severity="error", markup=False)
        else:
            self.app.notify(f"saved {path}", markup=False)

    def action_log(self) -> None:
        """Switch between logarithmic and linear values."""
        self._choose(self.view.toggled_log())

    def action_smooth(self) -> None:
        """Switch to the next smoothing."""
        self._choose(self.view.smoother())

    def action_zoom(self, way: int) -> None:
        """Zoom in (1) or out (-1)."""
        if extent := extent_of(self._curves):
            self._choose(self.view.zoomed(_ZOOM**way, extent))

    def action_whole(self) -> None:
        """Show the whole run."""
        self._choose(self.view.whole())

    def action_move(self, by: int) -> None:
        """Move the cursor by columns of dots, or by points where these are further apart; without a cursor, move the
        visible range."""
        extent = extent_of(self._curves)
        if extent is None:
            return
        if self.view.cursor is None:
            self._choose(self.view.panned(_PAN * (1 if by > 0 else -1) * (1 if abs(by) == 1 else 4), extent))
            return
        low, high = self.view.seen(extent)
        column = (high - low) / max(1, self._drawing.width * self._glyphs.bits.shape[1])
        place = next_point(self._curves, self.view.cursor, by * column)
        self._choose(self.view.pointing(place, extent))

    def action_cursor(self) -> None:
        """Read the values at a step, beginning at the newest one that is seen; or no longer."""
        extent = extent_of(self._curves)
        if extent is None:
            return
        if self.view.cursor is not None:
            self._choose(self.view.pointing(None, extent))
        else:
            self._point_at(self.view.seen(extent)[1])

    def _point_at(self, place: float) -> None:
        found = [point[0] for curve in self._curves if (point := curve.at(place)) is not None]
        extent = extent_of(self._curves)
        if found and extent:
            self._choose(self.view.pointing(min(found, key=lambda x: abs(x - place)), extent))

    def _wheel(self, event: events.MouseEvent, factor: float) -> None:
        if extent := extent_of(self._curves):
            self._choose(self.view.zoomed(factor, extent, self._drawing.place_at(event.x)))
        event.stop()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._wheel(event, _WHEEL)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._wheel(event, 1 / _WHEEL)

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self._dragged_from, self._dragged = event.x, False
        self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        extent = extent_of(self._curves)
        if self._dragged_from is None or extent is None or event.x == self._dragged_from:
            return
        share = (self._dragged_from - event.x) / max(1, self._drawing.width)
        self._dragged_from, self._dragged = event.x, True
        self._choose(self.view.panned(share, extent))

    def on_mouse_up(self, event: events.MouseUp) -> None:
        self.release_mouse()
        if self._dragged_from is not None and not self._dragged:
            self._point_at(self._drawing.place_at(event.x))
        self._dragged_from = None
