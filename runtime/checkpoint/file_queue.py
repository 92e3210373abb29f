"""Saves that wait their turn while one is being written: in order, each that must be kept; of the others the newest."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from attrs import define, field

T = TypeVar("T")


@define(eq=False)
class SaveQueue(Generic[T]):
    """Carries out jobs in a thread of its own, one at a time and in order.

    A job that need not be kept makes way for whatever comes behind it, as long as nobody has begun with it. So there is
    never more than one of these, and nothing is ever written behind what is newer.

    limit: how many jobs that must be kept may wait; who has another one waits for room. carry_out must not raise.
    """

    carry_out: Callable[[T], None]
    limit: int
    _waiting: deque[tuple[T, bool]] = field(factory=deque, init=False)
    """Each with whether it must be kept."""
    _current: T | None = field(default=None, init=False)
    _changed: threading.Condition = field(factory=threading.Condition, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    @property
    def busy(self) -> bool:
        with self._changed:
            return self._busy()

    def unfinished(self) -> list[T]:
        """The job under way and those that wait."""
        with self._changed:
            current = [] if self._current is None else [self._current]
            return [*current, *(job for job, _ in self._waiting)]

    def make_way(self) -> T | None:
        """Take out the job that need not be kept, if one waits; for who has a newer one."""
        with self._changed:
            if not self._waiting or self._waiting[-1][1]:
                return None
            return self._waiting.pop()[0]

    def await_room(self) -> None:
        """Return when another job that must be kept may be put. One thread puts, so that there is room then."""
        with self._changed:
            self._changed.wait_for(lambda: sum(required for _, required in self._waiting) < self.limit)

    def put(self, job: T, *, required: bool) -> None:
        """Let a job wait its turn; to be called behind `make_way`, and `await_room` if it must be kept."""
        with self._changed:
            self._waiting.append((job, required))
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until nothing is under way and nothing waits, at most so long; whether that is so."""
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
