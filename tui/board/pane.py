"""What every screen of the dashboard is."""

from typing import TYPE_CHECKING, ClassVar

from textual.widget import Widget

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board


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
    def available(cls, board: "Board") -> bool:
        """Return True if this run has anything to show here; other panes are not on the tab line."""
        return True

    def show(self, board: "Board") -> None:
        """Draw `board`. It may be called before the run has a plan, a rank or a step."""
        raise NotImplementedError
