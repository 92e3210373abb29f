"""Saves of a single process in a thread, each from its own copy of the state."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from attrs import Factory, define, field
from torch import Tensor

from xtrain.runtime.base.errors import StorageFailed
from xtrain.runtime.store.saver import SaveJob, Saver
from xtrain.runtime.store.writing import alone

T = TypeVar("T")


@define(eq=False)
class SaveQueue(Generic[T]):
    """Queue of jobs that one thread carries out in order.

    A job that is not required is dropped when a newer one arrives, unless it has begun. So at most one such job waits,
    and nothing older is written after something newer.

    limit: required jobs that may wait; the caller waits for room. carry_out must not raise.
    """

    carry_out: Callable[[T], None]
    limit: int
    _waiting: deque[tuple[T, bool]] = field(factory=deque, init=False)
    """(job, required) pairs."""
    _current: T | None = field(default=None, init=False)
    _changed: threading.Condition = field(factory=threading.Condition, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    @property
    def busy(self) -> bool:
        with self._changed:
            return self._busy()

    def unfinished(self) -> list[T]:
        """Return the running job and those that wait."""
        with self._changed:
            current = [] if self._current is None else [self._current]
            return [*current, *(job for job, _ in self._waiting)]

    def make_way(self) -> T | None:
        """Remove and return the waiting job that is not required, if any; called when there is a newer one."""
        with self._changed:
            if not self._waiting or self._waiting[-1][1]:
                return None
            return self._waiting.pop()[0]

    def await_room(self) -> None:
        """Wait until another required job may be put. Only one thread puts jobs, so the room remains."""
        with self._changed:
            self._changed.wait_for(lambda: sum(required for _, required in self._waiting) < self.limit)

    def put(self, job: T, *, required: bool) -> None:
        """Append a job; call `make_way` first, and `await_room` if the job is required."""
        with self._changed:
            self._waiting.append((job, required))
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def drain(self, seconds: float | None = None) -> bool:
        """Wait at most so long until no job runs or waits; return True if that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy(), seconds)

    def _busy(self) -> bool:
        return self._current is not None or bool(self._waiting)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                self._current = self._waiting.popleft()[0]
                self._changed.notify_all()
            self.carry_out(self._current)
            with self._changed:
                self._current = None
                self._changed.notify_all()


@define(kw_only=True, eq=False)
class Snapshots:
    """Copies of the state in host memory. most: copies in use at once. pinned: page-locked memory, which a GPU copies
    into faster."""

    most: int
    pinned: bool
    _free: list[dict[str, Tensor]] = field(factory=list, init=False)
    _taken: int = field(default=0, init=False)

    def take(self, tensors: dict[str, Any]) -> dict[str, Tensor]:
        """Copy the state, which may change as soon as this returns. Raises RuntimeError if `most` copies are in use."""
        if self._taken == self.most:
            raise RuntimeError(f"{self.most} copies of the state are in use, and no more are planned")
        buffers = self._free.pop() if self._free else {}
        if not buffers or not _fits(buffers, tensors):
            buffers = {name: self._like(alone(tensor)) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            buffers[name].copy_(alone(tensor), non_blocking=self.pinned)
        if self.pinned:
            torch.cuda.current_stream().synchronize()
        self._taken += 1
        return buffers

    def give_back(self, copy: dict[str, Tensor]) -> None:
        """Return a copy's buffers for reuse."""
        self._free.append(copy)
        self._taken -= 1

    def _like(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self.pinned)


def _fits(buffers: dict[str, Tensor], tensors: dict[str, Any]) -> bool:
    return buffers.keys() == tensors.keys() and all(
        buffers[name].shape == tensor.shape and buffers[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )


@define(eq=False)
class _Queued:
    job: SaveJob
    copy: dict[str, Tensor]


@define(kw_only=True, eq=False)
class FileSaver(Saver):
    """Saver that blocks training only for a copy, and for room if too many required saves wait.

    With `overlap = wait` every save is required; with `overlap = latest` only those that may be the best so far, and
    otherwise the newest is kept. The final save follows all kept ones and is written from the state itself.
    """

    snapshots: Snapshots
    queue: SaveQueue[_Queued] = Factory(lambda self: SaveQueue(self._carry_out, self._room()), takes_self=True)
    _outcomes: deque[StorageFailed | BaseException | None] = Factory(deque)
    """Outcomes of finished saves that are not counted yet, in order."""
    _buffers: threading.Lock = Factory(threading.Lock)

    @property
    def beside(self) -> bool:
        return True

    @property
    def busy(self) -> bool:
        return self.queue.busy

    def await_copy(self) -> None:
        """Return at once: copies are complete when `save` returns."""

    def settle(self, *, raises: bool = True) -> None:
        self.queue.drain()
        self._count(raises=raises)

    def drain(self, seconds: float) -> None:
        self.queue.drain(seconds)

    def _prepare(self, *, must: bool) -> None:
        """Prepare a save: a waiting save of an earlier step that only mattered as the newest is dropped."""
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
        """Write a queued save; runs in the thread."""
        outcome: StorageFailed | BaseException | None
        try:
            outcome = self._write(queued.job, queued.copy)
        except BaseException as error:  # raised again in `_count`
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
        """Return True if no save that is written or waiting has measured better."""
        value = job.state["metrics"].get(self.best)
        waiting = (queued.job.state["metrics"].get(self.best) for queued in self.queue.unfinished())
        known = [other for other in (self._best_before(job.final), *waiting) if other is not None]
        return value is not None and all(self.better(value, other) for other in known)

    def _room(self) -> int:
        """Return how many required saves may wait: each needs a copy, in addition to the running and the newest
        save."""
        return max(1, self.snapshots.most - (2 if self.overlap == "latest" else 1))
