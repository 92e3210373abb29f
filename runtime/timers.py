"""What ranks ask each other once a step: clocks of ticks that recur in seconds, and questions of other parts.

The first rank's clock counts, and most questions only it can answer; some are asked on every rank, and their answers
are added up. All ranks hear of the same numbers in `step.agree`.
"""

import time
from collections.abc import Callable

from attrs import define, field


@define
class Clocks:
    """One clock a period, infinite where a question is asked instead."""

    _periods: list[float] = field(factory=list)
    _heard: list[float] = field(factory=list)
    _last: list[float] = field(factory=list)
    _questions: dict[int, Callable[[], float]] = field(factory=dict)
    _everywhere: list[tuple[int, Callable[[], float]]] = field(factory=list)

    def add(self, seconds: float) -> int:
        """A clock, which all that recur with its period share, so that they fall into the same steps; its number."""
        return self._periods.index(seconds) if seconds in self._periods else self._new(seconds)

    def _new(self, seconds: float) -> int:
        self._periods.append(seconds)
        self._heard.append(0.0)
        self._last.append(time.monotonic())
        return len(self._periods) - 1

    def ask_for(self, question: Callable[[], float], *, everywhere: bool = False) -> int:
        """A question whose answer, 0 for no, all ranks are to hear; returns its number.

        It is answered by the first rank, or with `everywhere` by all of them: then their sum is heard.
        """
        number = self._new(float("inf"))
        if everywhere:
            self._everywhere.append((number, question))
        else:
            self._questions[number] = question
        return number

    def ask(self, *, first: bool, waiting: bool = False) -> list[float]:
        """What this rank has to say: 1 for each clock that has run out, and the answers to questions.

        waiting: of clocks nothing is said; they go on.
        """
        found = [0.0] * len(self._periods)
        if first and not waiting:
            now = time.monotonic()
            found = [float(now - last >= period) for last, period in zip(self._last, self._periods, strict=True)]
        if first:
            for number, question in self._questions.items():
                found[number] = float(question())
        for number, question in self._everywhere:
            found[number] = float(question())
        return found

    def answer(self, heard: list[float]) -> None:
        """Take what was agreed; a clock that ran out starts again."""
        self._heard = heard
        for number, value in enumerate(heard):
            if value:
                self._last[number] = time.monotonic()

    def put_back(self) -> None:
        """What was due by the last agreement has not been done: those clocks run out again at the next one."""
        for number, value in enumerate(self._heard):
            if value and self._periods[number] != float("inf"):
                self._last[number] = float("-inf")

    def due(self, number: int) -> bool:
        """Whether a clock ran out, or a question was answered by anything but 0, at the last agreement."""
        return self._heard[number] != 0

    def value(self, number: int) -> int:
        """What was answered at the last agreement."""
        return int(self._heard[number])
