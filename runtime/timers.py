"""Clocks of ticks that recur in seconds. The first rank's clock counts; all ranks hear of it in `step.agree`."""

import time

from attrs import define, field


@define
class Clocks:
    """One clock a period. `due` says which of them ran out at the last agreement."""

    periods: list[float] = field(factory=list)
    due: list[bool] = field(factory=list)
    _last: list[float] = field(factory=list)

    def add(self, seconds: float) -> int:
        """A new clock; returns its number."""
        self.periods.append(seconds)
        self.due.append(False)
        self._last.append(time.monotonic())
        return len(self.periods) - 1

    def ask(self) -> list[float]:
        """1 for each clock that has run out on this rank, else 0."""
        now = time.monotonic()
        return [float(now - last >= period) for last, period in zip(self._last, self.periods, strict=True)]

    def answer(self, due: list[bool]) -> None:
        """Take what was agreed; a clock that ran out starts again."""
        self.due = due
        for number, out in enumerate(due):
            if out:
                self._last[number] = time.monotonic()
