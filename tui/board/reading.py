"""The thread that reads the run's files, so that drawing and keys never wait for a file system."""

from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from . import fault

if TYPE_CHECKING:
    from ..model.board import Board

POLL_SECONDS = 0.25
# While a long run is being opened: most of a core, and still room to draw.
OPENING_BUDGET_SECONDS = 0.1
OPENING_PAUSE_SECONDS = 0.01


class Reading(Thread):
    """Reads until it is closed; `tell` is called, in this thread, when `newest` is there to be taken.

    It tells once for any number of boards that nobody has taken: a slow terminal makes no queue.
    """

    def __init__(self, directory: Path, tell: Callable[[], object]) -> None:
        super().__init__(name="reading", daemon=True)
        self._directory, self._tell = directory, tell
        self._closed = Event()
        self._told = False
        self.newest: Board | None = None
        self.fault: Path | None = None

    def take(self) -> "Board | None":
        """The newest board; the next one is told of again."""
        self._told = False
        return self.newest

    def close(self) -> None:
        """Read no more."""
        self._closed.set()

    def run(self) -> None:
        from ..model.board import BUDGET_SECONDS
        from ..model.reader import Reader

        reader, opening = Reader(self._directory), False
        while not self._closed.is_set():
            try:
                self.newest = reader.poll(OPENING_BUDGET_SECONDS if opening else BUDGET_SECONDS)
            except Exception as error:  # nothing that is read may end the view of it
                self.fault = fault.write(error)
                reader = Reader(self._directory)
            else:
                opening = self.newest.loading is not None
                if not self._told:
                    self._told = True
                    self._tell()
            self._closed.wait(OPENING_PAUSE_SECONDS if opening else POLL_SECONDS)
