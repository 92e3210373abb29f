"""Ranks that have outlived their worker group: stopped, or waiting for dead ranks. No restart may meet them."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.files.locks import WORKER_LOCK, hold

PATIENCE = 20.0  # seconds: a killed process leaves within one, unless a disk holds it
_PAUSE = 0.05


def end_leftovers(directory: Path) -> None:
    """Kill what is left of the ranks that this process has started over `directory`, and wait until they are gone.

    SIGKILL, as a stopped process hears nothing else. Raises EnvironmentFault if one stays, as it does while the kernel
    waits for its disk.
    """
    deadline = time.monotonic() + PATIENCE
    while left := ranks_of(directory, os.getpid()):
        if time.monotonic() > deadline:
            pids = ", ".join(map(str, left))
            raise EnvironmentFault(
                "X707", f"processes of an earlier start do not exit: {pids}; it is not safe to continue"
            )
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE)
    _wait_for_lock(directory, deadline)


def rank_command(directory: Path, launcher: int) -> list[str]:
    """How a process `launcher` starts a rank over `directory`. By these words the rank is found again."""
    return [sys.executable, "-P", "-m", "xtrain.runtime.worker", str(directory), str(launcher)]


def ranks_of(directory: Path, launcher: int) -> list[int]:
    """Process ids of ranks over `directory` that `launcher` has started and that are alive; none without /proc."""
    found, arguments = [], [os.fsencode(each) for each in rank_command(directory, launcher)[1:]]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            if command[1:-1] != arguments:
                continue
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue  # it has just ended
        if state not in "ZX":
            found.append(int(process.name))
    return found


def _wait_for_lock(directory: Path, deadline: float) -> None:
    """The first rank's lock goes with its last file descriptor, which a child of it may hold a moment longer."""
    while True:
        try:
            hold(directory, WORKER_LOCK).close()
        except EnvironmentFault:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE)
        else:
            return
