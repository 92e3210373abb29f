"""A thread that carries off what it is given, in order, so that nobody waits for a disk or a network.

What waits is bounded: where it does not get on, what comes is refused, and whoever gives it counts that. To give costs
no more than to append to a list: the thread is not woken for it, it looks by itself.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

# Values that may wait, about 40 MB: thousands of records of a dense model, dozens of one with very many experts.
ROOM: Final = 1_000_000
# Seconds between two looks.
LOOK: Final = 0.05


class BackgroundQueue:
    """Calls `carry` with each thing that was put, in a thread that begins with the first one.

    carry: must not raise. rest: called when nothing waits any more; it may make lasting what a library holds back.
    room: how many values may wait, as `put` is told.
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
        # (thing, values, what to set when it was carried off)
        self._waiting: deque[tuple[Any, int, threading.Event | None]] = deque()
        # Each is changed by one thread alone, so that no lock is needed.
        self._given = self._taken = 0
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()
        self._beginning, self._carrying = threading.Lock(), threading.Lock()

    def put(self, thing: Any, size: int) -> bool:
        """Hand it on without waiting; False where there is no room. size: how many values it has.

        Always by the same thread; others, and whatever must not be refused, use `send`.
        """
        if self._given - self._taken + size > self.room and self._waiting:
            return False
        self._given += size
        self._waiting.append((thing, size, None))
        if self._thread is None:
            self._begin()
        return True

    def send(self, thing: Any) -> None:
        """Hand on what comes seldom and always finds room."""
        self._waiting.append((thing, 0, None))
        if self._thread is None:
            self._begin()

    def deliver(self, thing: Any | None, seconds: float | None) -> bool:
        """Hand it on, and say whether it and all before it was carried off within so many seconds; None: however long
        that takes. thing: None where only what came before matters."""
        carried = threading.Event()
        self._waiting.append((thing, 0, carried))
        if self._thread is None:
            self._begin()
        self._wanted.set()
        return carried.wait(seconds)

    def close(self, seconds: float) -> bool:
        """Wait for all that waits, and end the thread; False if it hangs and is left behind. What is put later begins
        another."""
        if self._thread is None and not self._waiting:
            return True
        if not self.deliver(None, seconds):
            return False
        with self._beginning:
            thread, self._thread = self._thread, None
        self._wanted.set()
        if thread is not None:
            thread.join(seconds)
        return True

    def _begin(self) -> None:
        with self._beginning:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread = thread
                thread.start()

    def _run(self) -> None:
        own = threading.current_thread()
        while True:
            last = self._thread is not own
            with self._carrying:  # another one may not have ended yet
                self._carry_all()
            if last:
                return
            self._wanted.wait(LOOK)
            self._wanted.clear()

    def _carry_all(self) -> None:
        while self._waiting:
            thing, size, carried = self._waiting.popleft()
            if thing is not None:
                self._carry(thing)
            self._taken += size
            if carried is not None:
                carried.set()
        if self._rest is not None:
            self._rest()
