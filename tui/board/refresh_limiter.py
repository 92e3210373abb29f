"""Keeps what is costly, as thousands of ranks are, from taking more than its share of a core."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, thread_time

# Share of the time that updates of one screen may take; and seconds that are not counted.
SHARE = 0.05
FREE = 0.02


class RefreshLimiter:
    """Limiter of screen updates by their share of processor time. clock, spent: return elapsed seconds, and processor
    seconds of this thread."""

    def __init__(self, clock: Callable[[], float] = monotonic, spent: Callable[[], float] = thread_time) -> None:
        self._clock, self._spent = clock, spent
        self._next = float("-inf")

    @property
    def due(self) -> bool:
        return self._clock() >= self._next

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Time the enclosed work; the next update is due once this time is a small share of elapsed time."""
        began = self._spent()
        yield
        spent = self._spent() - began
        self._next = self._clock() + (spent / SHARE if spent > FREE else 0.0)
