"""Terminal checks and the table of screens, both without textual, for commands that open the dashboard."""

import contextlib
import os
import sys
import termios
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xtrain.tui.board.pane import Pane


# Turn off what Textual turns on: mouse, focus and paste reports, the other keyboard protocol, the second screen.
_BACK = (
    "\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?1016l\x1b[?1004l\x1b[?2004l\x1b[?2048l\x1b[?7h"
    "\x1b[<u\x1b[?1049l\x1b[?25h\x1b[0m"
)


def why_not() -> str:
    """Return why nothing can be drawn here; empty if drawing is possible."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return "its input and output are not a terminal"
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return "the terminal cannot move its cursor (TERM is dumb or not set)"
    with contextlib.suppress(OSError):
        if os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp():
            return "it is in the background of its terminal"
    return ""


class Terminal:
    """Terminal whose original state can be restored."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._attributes: list[Any] | None = None
        with contextlib.suppress(termios.error):
            self._attributes = termios.tcgetattr(descriptor)

    @property
    def there(self) -> bool:
        """True if the terminal is still open."""
        try:
            termios.tcgetattr(self._descriptor)
        except termios.error:
            return False
        return True

    def give_back(self) -> None:
        """Undo what a dashboard does to a terminal, and discard its pending output."""
        with contextlib.suppress(OSError, termios.error):
            termios.tcflush(self._descriptor, termios.TCIOFLUSH)
            if self._attributes is not None:
                termios.tcsetattr(self._descriptor, termios.TCSANOW, self._attributes)
        self.leave_screen()

    def leave_screen(self) -> None:
        """Leave the second screen, and ask for no more reports of mouse, focus and keys; never waits for a terminal
        that takes nothing."""
        with contextlib.suppress(OSError):
            # Opened again: settings of the inherited descriptor also apply to the shell.
            own = os.open(os.ttyname(self._descriptor), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
            try:
                os.write(own, _BACK.encode())
            finally:
                os.close(own)


# Name (as of `--screen`) → its module and class.
SCREENS = {
    "overview": ("xtrain.tui.board.overview", "OverviewPane"),
    "plan": ("xtrain.tui.board.plan", "PlanPane"),
    "ranks": ("xtrain.tui.board.plan", "RanksPane"),
    "experts": ("xtrain.tui.board.lists", "ExpertsPane"),
    "datasets": ("xtrain.tui.board.lists", "DatasetsPane"),
    "events": ("xtrain.tui.board.lists", "EventsPane"),
    "compare": ("xtrain.tui.board.compare", "ComparePane"),
    "charts": ("xtrain.tui.board.charts", "ChartsPane"),
    "sweep": ("xtrain.tui.board.compare", "SweepPane"),
    "server": ("xtrain.tui.board.lists", "ServerPane"),
}
# A server has its screen instead of the overview.
NUMBERS = {name: place for place, name in enumerate(SCREENS, start=1)} | {"server": 1}


def pane_classes() -> "dict[str, type[Pane]]":
    """Return every screen's class by its name."""
    return {name: getattr(import_module(module), cls) for name, (module, cls) in SCREENS.items()}
