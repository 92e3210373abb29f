"""Threads that read the files of runs, so that drawing never waits for a file system; and the file for faults."""

import contextlib
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board
    from xtrain.tui.model.reader import RunReader


# A larger file is started over: an error that recurs four times a second must not fill a disk.
MOST_BYTES = 1 << 20


def state_folder() -> Path:
    """Return xtrain's folder in the user's state folder (XDG base directories)."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path("~/.local/state").expanduser()) / "xtrain"


def log_path() -> Path:
    """Return the path of the fault file."""
    return state_folder() / "dashboard.log"


def write(error: BaseException) -> Path | None:
    """Add an error with its traceback; the file it went to, None if nothing could be written."""
    text = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} pid {os.getpid()}\n{''.join(traceback.format_exception(error))}\n"
    for path in (log_path(), Path(tempfile.gettempdir()) / f"xtrain-dashboard-{os.getuid()}.log"):
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            full = path.exists() and path.stat().st_size > MOST_BYTES
            with path.open("w" if full else "a") as file:
                file.write(text)
            return path
    return None


POLL_SECONDS = 0.25
# While a long run is being opened: most of a core, and still room to draw.
OPENING_BUDGET_SECONDS = 0.1
OPENING_PAUSE_SECONDS = 0.01
# After an error everything is read from the beginning: each time later, unless none was seen for long.
FAULT_PAUSE_SECONDS = 1.0
MOST_FAULT_PAUSE_SECONDS = 60.0
FORGIVEN_SECONDS = 600.0
# Runs that this one is compared with.
OTHERS_POLL_SECONDS = 1.0
OTHERS_OPENING_SECONDS = 0.05
# Reading all runs together takes at most this much of each second.
OTHERS_BUDGET_SECONDS = 0.05
# Nothing is read after this time without a view of the screen.
UNSEEN_SECONDS = 3.0
# Bytes of columns that are kept of each run.
LIMIT_BYTES = 16 << 20


class BackgroundReader(Thread):
    """Thread that reads a run until it is closed; it calls `announce` when `newest` is ready.

    It calls `announce` once for any number of boards that were not taken: a slow terminal causes no queue. fault: file
    of the last read error. faults: number of read errors.
    """

    def __init__(self, directory: Path, announce: Callable[[], object]) -> None:
        super().__init__(name="reading", daemon=True)
        self._directory, self._announce = directory, announce
        self._closed = Event()
        self._is_announced = False
        self.newest: Board | None = None
        self.fault: Path | None = None
        self.faults = 0
        self._read_at = monotonic()
        self._pause = FAULT_PAUSE_SECONDS
        self._fault_at = float("-inf")

    @property
    def unread_seconds(self) -> float:
        """The seconds since the last completed read: large when a disk hangs or reading fails."""
        return monotonic() - self._read_at

    def take(self) -> "Board | None":
        """Return the newest board; the next one is announced again."""
        self._is_announced = False
        return self.newest

    def close(self) -> None:
        """Read no more."""
        self._closed.set()

    def run(self) -> None:
        from xtrain.tui.model.board import BUDGET_SECONDS
        from xtrain.tui.model.reader import RunReader

        reader, opening = RunReader(self._directory), False
        while not self._closed.is_set():
            pause = POLL_SECONDS
            try:
                self.newest = reader.poll(OPENING_BUDGET_SECONDS if opening else BUDGET_SECONDS)
            except Exception as error:  # nothing that is read may end the view of it
                self.fault = write(error)
                self.faults += 1
                reader, opening, pause = RunReader(self._directory), False, self._pause_after_fault()
            else:
                self._read_at = monotonic()
                opening = self.newest.loading is not None
                if not self._is_announced:
                    self._is_announced = True
                    self._announce()
            self._closed.wait(OPENING_PAUSE_SECONDS if opening else pause)

    def _pause_after_fault(self) -> float:
        now = monotonic()
        doubled = min(2 * self._pause, MOST_FAULT_PAUSE_SECONDS)
        self._pause = doubled if now - self._fault_at < FORGIVEN_SECONDS else FAULT_PAUSE_SECONDS
        self._fault_at = now
        return self._pause


class ReadingOthers(Thread):
    """Thread that reads the runs in `wanted` in small parts; it calls `announce` when one of them has a new board."""

    def __init__(self, announce: Callable[[], object]) -> None:
        super().__init__(name="reading others", daemon=True)
        self._announce = announce
        self._closed, self._woken = Event(), Event()
        self._lock = Lock()
        self._wanted: tuple[Path, ...] = ()
        self._boards: dict[Path, Board] = {}
        self._looked = 0.0

    def want(self, directories: Sequence[Path]) -> None:
        """Read these runs from now on and drop others; to be called whenever the screen is viewed."""
        self._looked = monotonic()
        if tuple(directories) != self._wanted:
            self._wanted = tuple(directories)
            self._woken.set()

    def board(self, directory: Path) -> "Board | None":
        """Return the board read last; None at first."""
        with self._lock:
            return self._boards.get(directory)

    def close(self) -> None:
        """Read no more."""
        self._closed.set()
        self._woken.set()

    def run(self) -> None:
        from xtrain.tui.model.reader import RunReader

        readers: dict[Path, RunReader] = {}
        while not self._closed.is_set():
            known = self._wanted
            wanted = known if monotonic() - self._looked < UNSEEN_SECONDS else ()
            readers = {path: readers.get(path) or RunReader(path, LIMIT_BYTES, with_trials=False) for path in known}
            opening = False
            for path in wanted:
                opening |= self._read(path, readers[path], len(wanted))
            with self._lock:
                self._boards = {path: board for path, board in self._boards.items() if path in readers}
            self._woken.wait(OTHERS_OPENING_SECONDS if opening else OTHERS_POLL_SECONDS)
            self._woken.clear()

    def _read(self, path: Path, reader: "RunReader", among: int) -> bool:
        """Read more of one run; return True if more can be read at once."""
        before = self.board(path)
        try:
            board = reader.poll(OTHERS_BUDGET_SECONDS / among)
        except Exception as error:  # a run that cannot be read leaves the others
            write(error)
            return False
        with self._lock:
            self._boards[path] = board
        if before is None or before.version != board.version:
            self._announce()
        return board.loading is not None
