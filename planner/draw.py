"""Which dataset each row of a phase comes from: a sequence that has the declared shares in every stretch of it.

Row q of a phase is of the dataset in whose share of the circle the point u(q) = q · STRIDE + offset (mod 2⁶⁴) lies.
The stride divides the circle as evenly as can be (as the golden ratio does), so every stretch has its mix up to a few
rows. How many points lie below a bound is a sum of floors with a closed form: what each dataset has given up to any
step is known at once, to the plan as to the run.
"""

from collections.abc import Sequence
from fractions import Fraction
from hashlib import blake2b
from itertools import pairwise
from typing import Final

from attrs import frozen

TURN: Final = 1 << 64
# Near 2⁶⁴ divided by the golden ratio: odd, and no partial quotient of STRIDE / TURN is above 4.
STRIDE: Final = 0x9E3779B97F24D04B


@frozen
class Draw:
    """An endless sequence of dataset numbers with given shares."""

    offset: int
    bounds: tuple[int, ...]
    """Ascending from 0 to TURN: dataset i has the points from bounds[i] up to bounds[i + 1]."""

    @classmethod
    def of(cls, shares: Sequence[float], seed: int, phase: str) -> "Draw":
        """Shares need not add up to 1; at least one is positive, and one of 0 is never drawn."""
        exact = [Fraction(share) for share in shares]
        total = sum(exact)
        assert total > 0 and min(exact) >= 0, "a planned phase has a dataset to read"
        sums = [sum(exact[:number], Fraction(0)) for number in range(len(exact) + 1)]
        digest = blake2b(f"{seed} {phase}".encode(), digest_size=8).digest()
        return cls(int.from_bytes(digest, "little"), tuple(int(part * TURN / total) for part in sums))

    def first_point(self, first: int) -> int:
        """u(first), from where the points go on by STRIDE."""
        return (first * STRIDE + self.offset) % TURN

    def counts(self, first: int, count: int) -> list[int]:
        """How many of the draws first … first + count - 1 are of each dataset."""
        before, after = self._below(first), self._below(first + count)
        below = [late - early for early, late in zip(before, after, strict=True)]
        return [end - begin for begin, end in pairwise(below)]

    def _below(self, count: int) -> list[int]:
        """How many of the first `count` points lie below each bound."""
        if count == 0:
            return [0] * len(self.bounds)
        # A point x mod TURN lies below a bound where x and x - bound are in different turns.
        known = {0: 0, TURN: count}
        if len(self.bounds) > 2:
            whole = floor_sum(count, TURN, STRIDE, self.offset + TURN)
            for bound in set(self.bounds) - known.keys():
                known[bound] = whole - floor_sum(count, TURN, STRIDE, self.offset + TURN - bound)
        return [known[bound] for bound in self.bounds]


def floor_sum(count: int, divisor: int, factor: int, offset: int) -> int:
    """The sum of (factor · i + offset) // divisor over i = 0 … count - 1, all of them at least 0.

    Counts points of a grid below a line, turning it on its side as Euclid's algorithm does: O(log divisor).
    """
    total = 0
    while True:
        whole, factor = divmod(factor, divisor)
        total += count * (count - 1) // 2 * whole
        whole, offset = divmod(offset, divisor)
        total += count * whole
        top = factor * count + offset
        if top < divisor:
            return total
        count, offset = divmod(top, divisor)
        divisor, factor = factor, divisor
