"""`Dimension`: the values that a sweep gives to one setting, as the texts that `--set` takes."""

import math
from typing import Final

from attrs import frozen

_UNIT_WORDS: Final = {"seconds": "s", "bytes": "B"}
DIGITS: Final = 6
"""Significant digits of a real number that a search has drawn."""


class Dimension:
    """What all kinds of dimensions have."""

    def at(self, share: float) -> str:
        """The value at a share, 0 to 1 and never 1 itself: equal shares are equally likely to be drawn."""
        raise NotImplementedError

    def grid(self) -> tuple[str, ...] | None:
        """The values that a grid tries; None where nothing says how many."""
        raise NotImplementedError

    @property
    def size(self) -> int | None:
        """How many these are, without making them."""
        raise NotImplementedError

    def ends(self) -> tuple[str, ...]:
        """The values that a mistake would show at: all of a list, both ends of a range."""
        raise NotImplementedError


@frozen
class Listed(Dimension):
    """`[256, 512]`: these values, none more likely than another."""

    values: tuple[str, ...]

    def at(self, share: float) -> str:
        return self.values[int(share * len(self.values))]

    def grid(self) -> tuple[str, ...]:
        return self.values

    @property
    def size(self) -> int:
        return len(self.values)

    def ends(self) -> tuple[str, ...]:
        return self.values

    def __str__(self) -> str:
        return f"[{', '.join(self.values)}]"


@frozen(kw_only=True)
class Between(Dimension):
    """`uniform(low, high)`, `log(low, high)`, or `2..4`: numbers between two ends, both included.

    log: equally likely in the logarithm. whole: whole numbers. unit: of an amount, else empty. points: how many of
    them a grid tries, evenly spaced.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False
    unit: str = ""
    points: int | None = None

    def at(self, share: float) -> str:
        if not self.whole:
            return self.text(self._between(share, self.low, self.high))
        # Each whole number is as likely as the stretch around it is wide.
        number = round(self._between(share, self.low - 0.5, self.high + 0.5))
        return self.text(min(max(number, self.low), self.high))

    def grid(self) -> tuple[str, ...] | None:
        if self.points is None:
            return tuple(self.text(n) for n in range(int(self.low), int(self.high) + 1)) if self._is_counted else None
        last = self.points - 1
        values = (self._between(place / last, self.low, self.high) for place in range(self.points))
        return tuple(dict.fromkeys(map(self.text, values)))

    @property
    def size(self) -> int | None:
        return int(self.high) - int(self.low) + 1 if self.points is None and self._is_counted else self.points

    def ends(self) -> tuple[str, ...]:
        return self.text(self.low), self.text(self.high)

    def text(self, number: float) -> str:
        """A number of this dimension as a spec writes it."""
        shown = str(round(number)) if self.whole else repr(float(f"{number:.{DIGITS}g}"))
        return shown + (
            self.unit if self.unit == "%" else f" {_UNIT_WORDS.get(self.unit, self.unit)}" * bool(self.unit)
        )

    def number(self, text: str) -> float:
        """The number of such a text."""
        return float(text.partition(" ")[0].rstrip("%"))

    @property
    def _is_counted(self) -> bool:
        """Whether it is `2..4`, which is a list of all its numbers."""
        return self.whole and not self.log

    def _between(self, share: float, low: float, high: float) -> float:
        if not self.log:
            return low + share * (high - low)
        return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))

    def __str__(self) -> str:
        ends = ", ".join((*self.ends(), *([str(self.points)] if self.points else [])))
        if self._is_counted and self.points is None and not self.unit:
            return f"{self.ends()[0]}..{self.ends()[1]}"
        return f"{'log(' if self.log else 'uniform('}{ends})"
