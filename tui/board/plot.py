"""A plot of curves that has its own keys while it has the focus."""

from collections.abc import Sequence

from textual.widget import Widget

from ..model.drawing import Line, Unit

__all__ = ["Line", "Plot"]


class Plot(Widget, can_focus=True):
    """Draws lines; whoever owns it calls `show` with what there is now."""

    DEFAULT_CSS = """
    Plot { height: 1fr; width: 1fr; }
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._lines: tuple[Line, ...] = ()
        self._title = ""

    def show(self, lines: Sequence[Line], *, title: str, x_label: str = "step", unit: Unit = "number") -> None:
        """Draw `lines` from now on; zoom, smoothing and the other choices of the reader stay as they are."""
        self._lines, self._title = tuple(lines), title
        self.refresh()

    def render(self) -> str:
        return self._title
