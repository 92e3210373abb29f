"""A thread that carries off what it is given, in order, so that nobody waits for a disk or a network.

What waits is bounded: where it does not get on, what comes is refused, and whoever gives it counts that.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

# Values that may wait, about 40 MB: thousands of records of a dense model, dozens of one with very many experts.
ROOM: Final = 1_000_000


class Outlet:
    """Calls `carry` with each thing that was put, in a thread that begins with the first one.

    carry: must not raise. rest: called when nothing waits, and before `settle` returns; it may make durable what a
    library holds back. room: how many values may wait, as `put` is told.
    """

    def __init__(
        self,
        name: str,
        carry: Callable[[Any], None],
        *,
        rest: Callable[[], None] | None = None,
        room: int = ROOM,
    ) -> None:
        self.name, self.room = name, room
        self._carry, self._rest = carry, rest
        # Reentrant: a signal may be handled while the main thread is in here.
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[tuple[Any, int]] = deque()
        self._size = 0
        self._put = self._done = 0
        self._thread: threading.Thread | None = None

    def put(self, thing: Any, size: int = 1, *, must: bool = False) -> int | None:
        """Hand it on without waiting; its number, or None where there is no room. must: there is always room."""
        with self._changed:
            if self._size + size > self.room and self._waiting and not must:
                return None
            self._waiting.append((thing, size))
            self._size += size
            self._put += 1
            if self._thread is None:
                self._begin()
            self._changed.notify_all()
            return self._put

    def wait(self, number: int, seconds: float | None) -> bool:
        """Whether what has this number, and all before it, was carried off in so many seconds; None: however long."""
        until = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while self._done < number:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def settle(self, seconds: float | None) -> bool:
        """The same for all that was put so far."""
        return self._put == self._done or self.wait(self._put, seconds)

    def close(self, seconds: float) -> bool:
        """Settle, and end the thread; False if it hangs and is left behind. What is put later begins another."""
        with self._changed:
            if not self.settle(seconds):
                return False
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None:
            thread.join(seconds)
        return True

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        own = threading.current_thread()
        while True:
            with self._changed:
                while not self._waiting and self._thread is own:
                    self._changed.wait()
                if self._thread is not own:
                    return
                thing, size = self._waiting.popleft()
            self._carry(thing)
            with self._changed:
                self._size -= size
                last = not self._waiting
            if last and self._rest is not None:
                self._rest()
            with self._changed:
                self._done += 1
                self._changed.notify_all()
