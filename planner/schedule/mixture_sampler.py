"""Which dataset each row of a phase comes from: a sequence that has the declared shares in every stretch of it.

Row q of a phase is of the dataset in whose share of the circle the point u(q) = q · stride + offset (mod turn) lies.
The stride divides the circle as evenly as can be (as the golden ratio does), so every stretch has its mix up to a few
rows. How many points lie below a bound is a sum of floors with a closed form: what each dataset has given up to any
step is known at once, to the plan as to the run.

For shares the turn is 2⁶⁴, more rows than there are. For weights in epochs it is the rows of an epoch, and the stride
has no divisor in common with it: a turn meets every point once, so that each dataset gives exactly its rows in it.
"""

from collections.abc import Sequence
from fractions import Fraction
from hashlib import blake2b
from itertools import accumulate, pairwise
from math import gcd, isqrt, lcm
from typing import Final

from attrs import frozen

TURN: Final = 1 << 64
# Near 2⁶⁴ divided by the golden ratio: odd, and no partial quotient of STRIDE / TURN is above 4.
STRIDE: Final = 0x9E3779B97F24D04B
# Turns of epochs are not longer, so that twice a point is below 2⁶⁴. A run takes fewer rows.
LONGEST: Final = 1 << 62


@frozen
class MixtureSampler:
    """An endless sequence of dataset numbers with given shares."""

    offset: int
    bounds: tuple[int, ...]
    """Ascending from 0 to the turn: dataset i has the points from bounds[i] up to bounds[i + 1]."""
    stride: int = STRIDE

    @classmethod
    def of(cls, shares: Sequence[float], seed: int, phase: str) -> "MixtureSampler":
        """Shares need not add up to 1; at least one is positive, and one of 0 is never sampled."""
        exact = [Fraction(share) for share in shares]
        total = sum(exact)
        assert total > 0 and min(exact) >= 0, "a planned phase has a dataset to read"
        sums = accumulate(exact, initial=Fraction(0))
        digest = blake2b(f"{seed} {phase}".encode(), digest_size=8).digest()
        return cls(int.from_bytes(digest, "little"), tuple(int(part * TURN / total) for part in sums))

    @classmethod
    def of_epochs(cls, rows: Sequence[Fraction], seed: int) -> "MixtureSampler":
        """Of `rows`, those that one epoch takes of each dataset, of which some are more than none.

        Each turn takes exactly these; where they are fractions it is as many epochs as make them whole.
        """
        sums = [Fraction(0), *accumulate(rows)]
        assert sums[-1] > 0 and min(rows) >= 0, "a planned phase has a dataset to read"
        epochs = lcm(*(each.denominator for each in rows))
        # Fractions of many digits come out even only after more rows than a run takes: then nearly is exactly.
        epochs = min(epochs, int(LONGEST / sums[-1]))
        bounds = tuple(int(each * epochs) for each in sums)
        digest = blake2b(f"{seed} epochs".encode(), digest_size=8).digest()
        return cls(int.from_bytes(digest, "little") % bounds[-1], bounds, even_stride(bounds[-1]))

    @property
    def turn(self) -> int:
        """After so many rows the sequence begins anew."""
        return self.bounds[-1]

    def first_point(self, first: int) -> int:
        """u(first), from where the points go on by `stride`."""
        return (first * self.stride + self.offset) % self.turn

    def counts(self, first: int, count: int) -> list[int]:
        """How many of the rows first … first + count - 1 are of each dataset."""
        before, after = self._below(first), self._below(first + count)
        below = [late - early for early, late in zip(before, after, strict=True)]
        return [end - begin for begin, end in pairwise(below)]

    def _below(self, count: int) -> list[int]:
        """How many of the first `count` points lie below each bound."""
        if count == 0:
            return [0] * len(self.bounds)
        # A point x mod turn lies below a bound where x and x - bound are in different turns.
        turn, known = self.turn, {0: 0, self.turn: count}
        if len(self.bounds) > 2:
            whole = floor_sum(count, turn, self.stride, self.offset + turn)
            for bound in set(self.bounds) - known.keys():
                known[bound] = whole - floor_sum(count, turn, self.stride, self.offset + turn - bound)
        return [known[bound] for bound in self.bounds]


def even_stride(turn: int) -> int:
    """A stride without a common divisor with `turn`, near turn divided by the golden ratio.

    Of those nearest to it the one whose largest partial quotient is least: that bounds how uneven a stretch can be.
    """
    near = (isqrt(5 * turn * turn) - turn) // 2
    strides = [near + away for pair in ((each, -each) for each in range(64)) for away in dict.fromkeys(pair)]
    return min((each for each in strides if 0 <= each < turn and gcd(each, turn) == 1), key=lambda s: _largest(s, turn))


def _largest(stride: int, turn: int) -> int:
    """The largest partial quotient of stride / turn."""
    largest = 0
    while stride:
        largest = max(largest, turn // stride)
        turn, stride = stride, turn % stride
    return largest


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
