"""The thread that reads the runs this one is compared with, while somebody looks."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from . import fault

if TYPE_CHECKING:
    from ..model.board import Board
    from ..model.reader import RunReader

POLL_SECONDS = 1.0
OPENING_SECONDS = 0.05
# Of each second at most so much is spent reading: all runs together.
BUDGET_SECONDS = 0.05
# Without a look for so long nothing is read.
UNSEEN_SECONDS = 3.0
# Bytes of columns that are kept of each run.
LIMIT_BYTES = 16 << 20


class ReadingOthers(Thread):
    """Reads the runs in `wanted` on, a bit at a time, and calls `tell` (in this thread) when one of them is new."""

    def __init__(self, tell: Callable[[], object]) -> None:
        super().__init__(name="reading others", daemon=True)
        self._tell = tell
        self._closed, self._woken = Event(), Event()
        self._lock = Lock()
        self._wanted: tuple[Path, ...] = ()
        self._boards: dict[Path, Board] = {}
        self._looked = 0.0

    def want(self, directories: Sequence[Path]) -> None:
        """Read these from now on, and let go of others; to be called whenever somebody looks."""
        self._looked = time.monotonic()
        if tuple(directories) != self._wanted:
            self._wanted = tuple(directories)
            self._woken.set()

    def board(self, directory: Path) -> "Board | None":
        """What was read last; None at first."""
        with self._lock:
            return self._boards.get(directory)

    def close(self) -> None:
        """Read no more."""
        self._closed.set()
        self._woken.set()

    def run(self) -> None:
        from ..model.reader import RunReader

        readers: dict[Path, RunReader] = {}
        while not self._closed.is_set():
            known = self._wanted
            wanted = known if time.monotonic() - self._looked < UNSEEN_SECONDS else ()
            readers = {path: readers.get(path) or RunReader(path, LIMIT_BYTES) for path in known}
            opening = False
            for path in wanted:
                opening |= self._read(path, readers[path], len(wanted))
            with self._lock:
                self._boards = {path: board for path, board in self._boards.items() if path in readers}
            self._woken.wait(OPENING_SECONDS if opening else POLL_SECONDS)
            self._woken.clear()

    def _read(self, path: Path, reader: "RunReader", among: int) -> bool:
        """Read on in one run; whether there is more to be read at once."""
        before = self.board(path)
        try:
            board = reader.poll(BUDGET_SECONDS / among)
        except Exception as error:  # a run that cannot be read leaves the others
            fault.write(error)
            return False
        with self._lock:
            self._boards[path] = board
        if before is None or before.version != board.version:
            self._tell()
        return board.loading is not None
