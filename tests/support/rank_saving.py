"""Faults around saving that tests put into ranks; the first rank alone has those of the folder."""

import errno
import os
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from faulty_disk import CHANGES
from rank_mutations import mutation

from xtrain.runtime.base import files as durable
from xtrain.runtime.store import saver as staging
from xtrain.runtime.store import writing as writer


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

    staging.HostCopy.begin = begin


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


@mutation
def weighed_folder(report: str) -> None:
    """The first rank writes into a file the most bytes that its folder of checkpoints has held at any moment.

    It looks behind each change that it makes itself; of the others' there are none but in a folder that is written.
    """
    most = 0

    def weigh(folder: Path) -> None:
        nonlocal most
        files = (path for path in folder.parent.rglob("*") if path.is_file() and folder.parent.name == "checkpoints")
        sizes = {path.stat().st_ino: path.stat().st_size for path in files}  # a hard link takes no room
        most = max(most, sum(sizes.values()))
        Path(report).write_text(str(most))

    original = durable.rename

    def rename(path: Path, to: Path) -> None:
        weigh(path)
        original(path, to)
        weigh(to)

    if os.environ.get("RANK", "0") == "0":
        vars(durable)["rename"] = rename
