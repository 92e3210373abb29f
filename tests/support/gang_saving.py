"""Faults around saving that tests put into ranks; the first rank alone has those of the folder."""

import errno
import os
import signal
import time
from concurrent.futures import Future
from typing import Any

from faulty_disk import CHANGES
from gang_mutations import mutation

from xtrain.runtime.checkpoint import durable, staging, writer


@mutation
def slow_disk(seconds: float) -> None:
    """Every file takes so long to be written that steps go by meanwhile."""
    original = writer._Writer.write_data

    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        time.sleep(seconds)
        return original(self, plan, planner)

    writer._Writer.write_data = write_data


@mutation
def live_tensors(seconds: float) -> None:
    """What is written beside training is not a copy."""
    slow_disk(seconds)

    def begin(self: Any, tensors: dict[str, Any]) -> Future:
        found: Future = Future()
        found.set_result(tensors)
        return found

    vars(staging)["Staging"].begin = begin


@mutation
def full_disk(rank: int, saves: list[int]) -> None:
    """On one rank there is no room for these saves, counted from 0."""
    original, count = writer._Writer.write_data, [0]

    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        number, count[0] = count[0], count[0] + 1
        if os.environ.get("RANK", "0") == str(rank) and number in saves:
            original(self, plan, planner)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(self, plan, planner)

    writer._Writer.write_data = write_data


@mutation
def death(change: int) -> None:
    """The first rank is killed when it is about to make its n-th change of the folder of checkpoints, from 0."""

    class Disk:
        count = 0

        def __getattr__(self, name: str) -> Any:
            found = getattr(os, name)
            if name not in CHANGES or os.environ.get("RANK", "0") != "0":
                return found
            number, Disk.count = Disk.count, Disk.count + 1
            if number == change:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

    vars(durable)["os"] = Disk()
