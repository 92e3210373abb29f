"""Keeps what is costly, as thousands of ranks are, from taking more than its share of a core."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, thread_time

# Of the time, what one screen may spend on being brought up to date; and seconds that are not counted.
SHARE = 0.05
FREE = 0.02


class RefreshLimiter:
    """Whether it is time again. clock, spent: seconds that have passed, and that this thread has computed."""

    def __init__(self, clock: Callable[[], float] = monotonic, spent: Callable[[], float] = thread_time) -> None:
        self._clock, self._spent = clock, spent
        self._next = float("-inf")

    @property
    def due(self) -> bool:
        return self._clock() >= self._next

    @contextmanager
    def spending(self) -> Iterator[None]:
        """What is done here is not due again before it has become a small share of the time."""
        began = self._spent()
        yield
        spent = self._spent() - began
        self._next = self._clock() + (spent / SHARE if spent > FREE else 0.0)
