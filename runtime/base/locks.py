"""Locks on run directories and folders, so that no two processes change one at the same time."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from attrs import define

from xtrain.runtime.base.errors import EnvironmentFault

LAUNCHER_LOCK = ".launcher.lock"
# Held by the first rank itself: ranks may still be saving after their launcher was killed.
WORKER_LOCK = ".worker.lock"


@define(eq=False)
class HeldLock:
    """Lock on a file, held until it is closed or garbage-collected."""

    _fd: int

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Release the lock; may be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> "HeldLock":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    __del__ = close


def hold_for_reading(folder: Path) -> HeldLock | None:
    """Hold a folder for reading until the returned lock is closed; None if the folder does not exist.

    `unless_read` yields False meanwhile. On file systems without locks on folders, the folder can be read all the same.
    """
    try:
        lock = HeldLock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except FileNotFoundError:
        return None
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH)
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(lock.fileno()), folder.stat()):
            return lock
    return None  # it was removed before it was locked


@contextmanager
def unless_read(folder: Path) -> Iterator[bool]:
    """Yield False if a process holds a folder for reading; otherwise no process can before the block ends."""
    with HeldLock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # no locks: readers notice that the folder is gone
            pass
        yield True


@contextmanager
def scratch_folder(kind: str) -> Iterator[Path]:
    """Yield a temporary folder that is removed at the end, after those that killed processes left.

    kind: part of its name, `xtrain-KIND-…`.
    """
    for old in Path(gettempdir()).glob(f"xtrain-{kind}-*"):
        with suppress(OSError), unless_read(old) as free:  # folders of other users cannot be opened
            if free:
                shutil.rmtree(old, ignore_errors=True)
    while True:
        with TemporaryDirectory(prefix=f"xtrain-{kind}-", ignore_cleanup_errors=True) as folder:
            if (lock := hold_for_reading(Path(folder))) is not None:
                with lock:
                    yield Path(folder)
                return


def hold(directory: Path, name: str) -> HeldLock:
    """Lock a file of the run directory until the returned lock is closed.

    Raises EnvironmentFault if another process holds it.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a reader.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    lock = HeldLock(os.open(directory / name, flags, 0o666))
    # `xtrain control` and any number of dashboards hold the lock for a moment to see whether the run is running.
    for seconds in (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.0):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not seconds:
                lock.close()
                raise EnvironmentFault(
                    "X707",
                    f"another process is running in {directory}; wait until it ends, or give this run another name "
                    "with workspace.run",
                ) from error
            time.sleep(seconds)
        else:
            break
    # Record the start by this machine's clock, as records do, not by a file server's: dashboards notice a new start.
    # This fails on a file of another user.
    now = time.time()
    with suppress(OSError):
        os.utime(lock.fileno(), (now, now))
    return lock
