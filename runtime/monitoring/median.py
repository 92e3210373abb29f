"""The median of the latest values of a series, and how far values usually lie from it."""

from bisect import bisect_left, insort
from collections import deque
from typing import Final

from attrs import define, field

# Of values that are normally distributed, the standard deviation is so many times the median absolute deviation
# (Hampel 1974, "The influence curve and its role in robust estimation"; 1 / Φ⁻¹(3/4)).
NORMAL: Final = 1.4826


@define
class RunningMedian:
    """The latest `size` values. Adding one moves some dozens of numbers; only the deviation looks at half of them."""

    size: int
    _order: deque[float] = field(factory=deque)
    _sorted: list[float] = field(factory=list)

    def __len__(self) -> int:
        return len(self._order)

    def add(self, value: float) -> None:
        """Take in a finite value; the oldest one goes where there are too many."""
        self._order.append(value)
        insort(self._sorted, value)
        if len(self._order) > self.size:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]

    def clear(self) -> None:
        self._order.clear()
        self._sorted.clear()

    @property
    def median(self) -> float:
        """Of an even number of values the mean of the two in the middle. There must be one."""
        middle = len(self._sorted) // 2
        if len(self._sorted) % 2:
            return self._sorted[middle]
        return (self._sorted[middle - 1] + self._sorted[middle]) / 2

    @property
    def above(self) -> float:
        """How far the upper quartile lies above the median, scaled in the same way: of a distribution with a longer
        tail above, which losses of small batches have, it is the larger of the two."""
        return NORMAL * (self._sorted[3 * len(self._sorted) // 4] - self.median)

    @property
    def deviation(self) -> float:
        """The median absolute deviation, scaled to be the standard deviation of values that are normally distributed.

        Of an even number of values the upper of the two in the middle. There must be one.
        """
        values, median = self._sorted, self.median
        right = bisect_left(values, median)
        left, away = right - 1, 0.0
        # The nearest values first, from both sides of the median outwards.
        for _ in range(len(values) // 2 + 1):
            below = median - values[left] if left >= 0 else float("inf")
            above = values[right] - median if right < len(values) else float("inf")
            if below < above:
                away, left = below, left - 1
            else:
                away, right = above, right + 1
        return NORMAL * away
