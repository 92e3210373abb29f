"""Waiting for work that one rank of every machine does for the others, however long it takes."""

import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import torch
import torch.distributed as dist

from xtrain.runtime.monitoring.heartbeat import HeartbeatWriter
from xtrain.runtime.state import Rank

T = TypeVar("T")
# Seconds between two questions: short work is not kept waiting for, long work is not disturbed.
SOONEST: Final = 0.05
LATEST: Final = 2.0


def first_of_machine(rank: Rank, work: Callable[[], T], beat: HeartbeatWriter) -> T | None:
    """Do `work` on the first rank of every machine; returns when it is done on all of them, what it gave, or None.

    Collective. The work runs in a thread where there are other ranks, and all ask each other now and then whether it is
    done: so no collective lasts long, no time limit of the process group is hit by hours of work, and a rank that is
    lost meanwhile is noticed. Raises what the work raises on the rank that does it.
    """
    if rank.world_size == 1:
        return work()
    mine = _Work(work) if rank.local_rank == 0 else None
    pause = SOONEST
    while True:
        if mine is not None:
            mine.wait(pause)
        done = torch.tensor([float(mine is None or mine.done)])
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        beat.mark()
        if done.item():
            return None if mine is None else mine.result()
        pause = min(2 * pause, LATEST)


class _Work(Generic[T]):
    """A call in a thread of its own."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="preparing data", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._found.append(work())
        except BaseException as error:
            self._error = error

    def wait(self, seconds: float) -> None:
        """Until it is done, but no longer than that. Raises what it has raised."""
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error

    @property
    def done(self) -> bool:
        return bool(self._found)

    def result(self) -> T:
        return self._found[0]
