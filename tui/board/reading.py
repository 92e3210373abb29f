"""The thread that reads the run's files, so that drawing and keys never wait for a file system."""

from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING

from . import fault

if TYPE_CHECKING:
    from ..model.board import Board

POLL_SECONDS = 0.25
# While a long run is being opened: most of a core, and still room to draw.
OPENING_BUDGET_SECONDS = 0.1
OPENING_PAUSE_SECONDS = 0.01
# After an error everything is read from the beginning: each time later, unless none was seen for long.
FAULT_PAUSE_SECONDS = 1.0
MOST_FAULT_PAUSE_SECONDS = 60.0
FORGIVEN_SECONDS = 600.0


class BackgroundReader(Thread):
    """Reads until it is closed; `tell` is called, in this thread, when `newest` is there to be taken.

    It tells once for any number of boards that nobody has taken: a slow terminal makes no queue.
    fault: the file in which an error of reading is written; of several the last. faults: how many there were.
    """

    def __init__(self, directory: Path, tell: Callable[[], object]) -> None:
        super().__init__(name="reading", daemon=True)
        self._directory, self._tell = directory, tell
        self._closed = Event()
        self._told = False
        self.newest: Board | None = None
        self.fault: Path | None = None
        self.faults = 0
        self._read_at = monotonic()
        self._pause = FAULT_PAUSE_SECONDS
        self._fault_at = float("-inf")

    @property
    def unread_seconds(self) -> float:
        """How long ago a look at the files last came to its end: much, where a disk hangs or reading fails."""
        return monotonic() - self._read_at

    def take(self) -> "Board | None":
        """The newest board; the next one is told of again."""
        self._told = False
        return self.newest

    def close(self) -> None:
        """Read no more."""
        self._closed.set()

    def run(self) -> None:
        from ..model.board import BUDGET_SECONDS
        from ..model.reader import RunReader

        reader, opening = RunReader(self._directory), False
        while not self._closed.is_set():
            pause = POLL_SECONDS
            try:
                self.newest = reader.poll(OPENING_BUDGET_SECONDS if opening else BUDGET_SECONDS)
            except Exception as error:  # nothing that is read may end the view of it
                self.fault = fault.write(error)
                self.faults += 1
                reader, opening, pause = RunReader(self._directory), False, self._pause_after_fault()
            else:
                self._read_at = monotonic()
                opening = self.newest.loading is not None
                if not self._told:
                    self._told = True
                    self._tell()
            self._closed.wait(OPENING_PAUSE_SECONDS if opening else pause)

    def _pause_after_fault(self) -> float:
        now = monotonic()
        doubled = min(2 * self._pause, MOST_FAULT_PAUSE_SECONDS)
        self._pause = doubled if now - self._fault_at < FORGIVEN_SECONDS else FAULT_PAUSE_SECONDS
        self._fault_at = now
        return self._pause
