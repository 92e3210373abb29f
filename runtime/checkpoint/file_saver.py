"""`FileSaver`: saves of one process beside training, with a copy of the state for each that is not written yet."""

import threading
import time
from collections import deque
from typing import Any

from attrs import Factory, define
from torch import Tensor

from xtrain.runtime.checkpoint.file_queue import SaveQueue
from xtrain.runtime.checkpoint.file_snapshots import Snapshots
from xtrain.runtime.checkpoint.saver import SaveJob, Saver
from xtrain.runtime.errors import StorageFailed


@define(eq=False)
class _Queued:
    job: SaveJob
    copy: dict[str, Tensor]


@define(kw_only=True, eq=False)
class FileSaver(Saver):
    """A saver that lets nothing wait but for a copy, and for room where too many saves that must be kept are waiting.

    With `overlap = wait` every save is kept; with `overlap = latest` those that may be the best so far, and of the rest
    the newest. What the run ends with is written when all that is kept is, and from the state itself.
    """

    snapshots: Snapshots
    queue: SaveQueue[_Queued] = Factory(lambda self: SaveQueue(self._carry_out, self._room()), takes_self=True)
    _outcomes: deque[StorageFailed | BaseException | None] = Factory(deque)
    """Of saves that have ended and are not counted yet, in order."""
    _buffers: threading.Lock = Factory(threading.Lock)

    @property
    def beside(self) -> bool:
        return True

    @property
    def busy(self) -> bool:
        return self.queue.busy

    def await_copy(self) -> None:
        """Nothing to wait for: copies are complete when `save` returns."""

    def settle(self, *, raises: bool = True) -> None:
        self.queue.drain()
        self._count(raises=raises)

    def drain(self, seconds: float) -> None:
        self.queue.drain(seconds)

    def _prepare(self, *, must: bool) -> None:
        """A save is due now: what only mattered as the newest does not any more, unless it is of this very step."""
        if must:
            waiting = self.queue.unfinished()
            if waiting and waiting[-1].job.step != self.progress.step:
                self._drop_newest()
            self.settle(raises=False)
        else:
            self._count(raises=True)

    def _begin(self, job: SaveJob, tensors: dict[str, Any]) -> None:
        required = self.overlap == "wait" or self._may_be_best(job)
        self._drop_newest()
        if required:
            self.queue.await_room()
        with self._buffers:
            copy = self.snapshots.take(tensors)
        job.blocked = time.perf_counter() - job.began
        self.queue.put(_Queued(job, copy), required=required)

    def _drop_newest(self) -> None:
        dropped = self.queue.make_way()
        if dropped is not None:
            self._give_back(dropped)

    def _carry_out(self, queued: _Queued) -> None:
        """What the thread does."""
        outcome: StorageFailed | BaseException | None
        try:
            outcome = self._write(queued.job, queued.copy)
        except BaseException as error:  # raised where somebody can hear it
            outcome = error
        self._outcomes.append(outcome)
        self._give_back(queued)

    def _give_back(self, queued: _Queued) -> None:
        with self._buffers:
            self.snapshots.give_back(queued.copy)

    def _count(self, *, raises: bool) -> None:
        while self._outcomes:
            outcome = self._outcomes.popleft()
            if outcome is not None and not isinstance(outcome, StorageFailed):
                raise outcome
            self._take(outcome, raises=raises)

    def _may_be_best(self, job: SaveJob) -> bool:
        """Whether nothing that is saved or waits to be has measured better."""
        value = job.state["metrics"].get(self.best)
        waiting = (queued.job.state["metrics"].get(self.best) for queued in self.queue.unfinished())
        known = [other for other in (self._best_before(job.final), *waiting) if other is not None]
        return value is not None and all(self.better(value, other) for other in known)

    def _room(self) -> int:
        """How many saves that must be kept may wait: for each a copy, besides those under way and the newest."""
        return max(1, self.snapshots.most - (2 if self.overlap == "latest" else 1))
