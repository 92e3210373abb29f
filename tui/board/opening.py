"""Opening the dashboard on this terminal, and leaving it in order whatever ends it."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from xtrain.tui.board import reading as fault
from xtrain.tui.board.app import BoardApp, remembered_theme
from xtrain.tui.board.terminal import Terminal

# A terminal that takes nothing any more must not keep a process that was asked to end.
LEAVE_SECONDS = 2.0
LOOK_SECONDS = 0.5
# Training on the same cores comes first.
NICENESS = 10
THEME_FILE = "theme"


class AttachedApp(BoardApp):
    """Dashboard on a real terminal: handles signals, and ends with its terminal or its launcher."""

    def __init__(self, *args, terminal: Terminal, **options) -> None:
        super().__init__(*args, **options)
        self._terminal = terminal

    def on_mount(self) -> None:  # in addition to `BoardApp.on_mount`, which Textual calls as well
        loop = asyncio.get_running_loop()

        def on_signal(number: int, frame: FrameType | None) -> None:
            leave_at_last(self._terminal, LEAVE_SECONDS)
            loop.call_soon_threadsafe(self.exit, 128 + number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
        if self.launcher is not None:
            # When the launcher is gone, the shell takes the terminal: that must not suspend this process.
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        self.set_interval(LOOK_SECONDS, self._look_around)

    def _look_around(self) -> None:
        if not self._terminal.there:
            os._exit(0)
        if self.launcher is not None and os.getppid() != self.launcher:
            # The shell has the terminal back already, with the settings it wants: only the screen is to be given back.
            self._terminal.leave_screen()
            os._exit(0)


def open_board(directory: Path, *, compared: Sequence[Path] = (), first: str = "", launcher: int | None = None) -> int:
    """Show the run until the reader leaves; the exit code. Main thread only.

    One line on standard error says where to look if the dashboard itself has failed.
    """
    os.nice(NICENESS)
    terminal = Terminal(sys.stdin.fileno())

    def hung_up(number: int, frame: FrameType | None) -> None:
        terminal.give_back()  # there may still be one, if only this process got the signal
        os._exit(0)

    signal.signal(signal.SIGHUP, hung_up)
    if hasattr(sys.__stderr__, "reconfigure"):
        sys.__stderr__.reconfigure(errors="replace")  # type: ignore[union-attr]
    threading.excepthook = partial(_thread_has_failed, terminal)
    no_color = bool(os.environ.get("NO_COLOR"))
    theme_file = fault.state_folder() / THEME_FILE
    app = AttachedApp(
        directory,
        compared=compared,
        first=first,
        launcher=launcher,
        no_color=no_color,
        theme_file=theme_file,
        light=None if no_color or remembered_theme(theme_file) else terminal.is_light(),
        terminal=terminal,
    )
    code = app.run()
    if app.return_code:
        where = f"; details are in {app.fault}" if app.fault else ""
        print(f"the dashboard failed and was closed; training continues{where}", file=sys.stderr)
        return 1
    return code or 0


def _thread_has_failed(terminal: Terminal, said: threading.ExceptHookArgs) -> None:
    """Report that a drawing or reading thread has failed, and end the process."""
    if not terminal.there:
        os._exit(0)
    where = fault.write(said.exc_value) if said.exc_value else None
    terminal.give_back()
    print(f"the dashboard failed and was closed; training continues; see {where}", file=sys.__stderr__)
    os._exit(1)


def leave_at_last(terminal: Terminal, seconds: float) -> None:
    """End this process after `seconds`, if it is still running."""

    def end() -> None:
        terminal.give_back()
        os._exit(0)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


if __name__ == "__main__":  # as `xtrain run --ui tui` starts it
    sys.exit(open_board(Path(sys.argv[1]), launcher=int(sys.argv[2])))
