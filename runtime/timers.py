"""Clocks of ticks that recur in seconds. The first rank's clock counts; all ranks hear of it in `step.agree`.

Other questions that the first rank alone can answer are asked along with them.
"""

import time
from collections.abc import Callable

from attrs import define, field


@define
class Clocks:
    """One clock a period, infinite where a question is asked instead. `due` says which of them ran out, or which
    question was answered by yes, at the last agreement."""

    periods: list[float] = field(factory=list)
    due: list[bool] = field(factory=list)
    _last: list[float] = field(factory=list)
    _questions: dict[int, Callable[[], bool]] = field(factory=dict)

    def add(self, seconds: float) -> int:
        """A new clock; returns its number."""
        self.periods.append(seconds)
        self.due.append(False)
        self._last.append(time.monotonic())
        return len(self.periods) - 1

    def ask_for(self, question: Callable[[], bool]) -> int:
        """A question whose answer on the first rank all ranks are to hear; returns its number in `due`."""
        number = self.add(float("inf"))
        self._questions[number] = question
        return number

    def ask(self) -> list[float]:
        """1 for each clock that has run out on this rank, and for each question whose answer is yes; else 0."""
        now = time.monotonic()
        found = [float(now - last >= period) for last, period in zip(self._last, self.periods, strict=True)]
        for number, question in self._questions.items():
            found[number] = float(question())
        return found

    def answer(self, due: list[bool]) -> None:
        """Take what was agreed; a clock that ran out starts again."""
        self.due = due
        for number, out in enumerate(due):
            if out:
                self._last[number] = time.monotonic()
