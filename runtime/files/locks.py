"""Locks on a run directory, so that no two processes work in it."""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from ..errors import EnvironmentFault

LAUNCHER_LOCK = ".launcher.lock"
# Held by the first rank itself: a killed launcher leaves ranks behind that are still saving.
WORKER_LOCK = ".worker.lock"


def hold(directory: Path, name: str) -> IO[str]:
    """Lock a file of the run directory for as long as what is returned stays open.

    Raises EnvironmentFault if another process holds it.
    """
    lock = (directory / name).open("a")
    # To see whether the run is live, `xtrain control` and dashboards, of which there may be many, hold it for a moment.
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
    # Since when it is held, by the clock of the records and not of a file server: a dashboard sees that another start
    # has begun. Of the file of another user it does not.
    now = time.time()
    with suppress(OSError):
        os.utime(lock.fileno(), (now, now))
    return lock
