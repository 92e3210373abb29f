"""Terminal checks and the table of screens, both without textual, for commands that open the dashboard."""

import contextlib
import os
import re
import select
import sys
import termios
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xtrain.tui.board.pane import Pane


# Turn off what Textual turns on: mouse, focus and paste reports, the other keyboard protocol, the second screen.
_BACK = (
    "\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?1016l\x1b[?1004l\x1b[?2004l\x1b[?2048l\x1b[?7h"
    "\x1b[<u\x1b[?1049l\x1b[?25h\x1b[0m"
)


# OSC 11 asks for the background's color. Terminals answer in order, and nearly all answer the second question (DA1), so
# that one without colors costs no wait. The answer may be `rgb:` or `rgba:` with 1 to 4 hexadecimal digits a channel.
_ASK_COLOR = b"\x1b]11;?\x1b\\\x1b[c"
_COLOR = re.compile(
    rb"\x1b\]11;rgba?:([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})/([0-9a-fA-F]{1,4})[^\x07\x1b]*(?:\x07|\x1b\\)"
)
_DEVICE = re.compile(rb"\x1b\[\?[0-9;]*c")
ANSWER_SECONDS = 0.5
# Terminals that would print the question.
_MUTE = ("dumb", "unknown", "linux", "vt", "ansi", "cons")


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

    def is_light(self, seconds: float = ANSWER_SECONDS) -> bool | None:
        """Ask the terminal for the color of its background; None without an answer within `seconds`.

        The answer is not echoed, and the terminal has its settings back afterwards. Never waits for a terminal that
        takes nothing.
        """
        if self._attributes is None or os.environ.get("TERM", "dumb").startswith(_MUTE):
            return None
        heard = b""
        with contextlib.suppress(OSError, termios.error):
            own = os.open(os.ttyname(self._descriptor), os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
            quiet = [*self._attributes[:6], list(self._attributes[6])]
            quiet[3] &= ~(termios.ICANON | termios.ECHO)
            try:
                termios.tcsetattr(own, termios.TCSANOW, quiet)
                heard = _answer(own, time.monotonic() + seconds)
            finally:
                termios.tcsetattr(own, termios.TCSANOW, self._attributes)
                os.close(own)
        found = _COLOR.search(heard)
        if found is None:
            return None
        red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in found.groups())
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5  # weights of ITU-R BT.709

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


def _answer(terminal: int, deadline: float) -> bytes:
    """Ask for the color, and read until both answers, or the second one alone, are there."""
    heard = b""
    if os.write(terminal, _ASK_COLOR) == len(_ASK_COLOR):
        while not _DEVICE.search(heard) and len(heard) < 4096 and (left := deadline - time.monotonic()) > 0:
            if select.select([terminal], [], [], left)[0]:
                heard += os.read(terminal, 1024)
    return heard


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
