"""A widget that draws rows of styled text as they are, in the colours of the theme."""

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from xtrain.tui.pages.sheet import Row, cells


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
