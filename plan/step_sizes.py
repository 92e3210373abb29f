"""Sizes of steps in rows or tokens, constant or growing (a ramp), and the dataset of each row of a phase.

After a resume with another batch, the steps before it have other sizes (`ResumedSizes`).

Each dataset owns an arc of a circle, in proportion to its share. Row q of a phase comes from the dataset whose arc
contains the point u(q) = q · stride + offset (mod turn). The stride divides the circle as evenly as possible (as the
golden ratio does), so every stretch has its mix up to a few rows. The number of points below a bound is a sum of floors
with a closed form, so plan and run know at once how many rows each dataset has given up to any step.

For shares the turn is 2⁶⁴, more rows than any run takes. For weights in epochs it is the number of rows of an epoch,
and the stride is coprime to it: a turn meets every point once, so each dataset gives exactly its rows.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from hashlib import blake2b
from itertools import accumulate, pairwise
from math import ceil, floor, gcd, isqrt, lcm
from typing import Any, Final

from attrs import Factory, field

from xtrain.lazy_attrs import frozen

TURN: Final = 1 << 64
# Near 2⁶⁴ divided by the golden ratio: odd, and no partial quotient of STRIDE / TURN is above 4.
STRIDE: Final = 0x9E3779B97F24D04B
# Turns of epochs are at most this long, so that twice a point is below 2⁶⁴. A run takes fewer rows.
LONGEST: Final = 1 << 62


@frozen
class MixtureSampler:
    """Endless sequence of dataset numbers with given shares."""

    offset: int
    bounds: tuple[int, ...]
    """Ascending from 0 to the turn: dataset i owns the points from bounds[i] up to bounds[i + 1]."""
    stride: int = STRIDE

    @classmethod
    def of(cls, shares: Sequence[float], seed: int, phase: str) -> "MixtureSampler":
        """Return the sampler of shares, which need not add up to 1. At least one is positive; a share of 0 is never
        sampled."""
        exact = [Fraction(share) for share in shares]
        total = sum(exact)
        assert total > 0 and min(exact) >= 0, "a planned phase has a dataset to read"
        sums = accumulate(exact, initial=Fraction(0))
        digest = blake2b(f"{seed} {phase}".encode(), digest_size=8).digest()
        return cls(int.from_bytes(digest, "little"), tuple(int(part * TURN / total) for part in sums))

    @classmethod
    def of_epochs(cls, rows: Sequence[Fraction], seed: int) -> "MixtureSampler":
        """Return the sampler of epochs that take `rows[i]` rows of dataset i; at least one is positive.

        Each turn takes exactly these rows; if some are fractions, a turn is as many epochs as make them whole.
        """
        sums = [Fraction(0), *accumulate(rows)]
        assert sums[-1] > 0 and min(rows) >= 0, "a planned phase has a dataset to read"
        epochs = lcm(*(each.denominator for each in rows))
        # Fractions of many digits become whole only after more rows than a run takes; rounding is then exact enough.
        epochs = min(epochs, int(LONGEST / sums[-1]))
        bounds = tuple(int(each * epochs) for each in sums)
        digest = blake2b(f"{seed} epochs".encode(), digest_size=8).digest()
        return cls(int.from_bytes(digest, "little") % bounds[-1], bounds, even_stride(bounds[-1]))

    @property
    def turn(self) -> int:
        """Number of rows after which the sequence repeats."""
        return self.bounds[-1]

    def first_point(self, first: int) -> int:
        """Return u(first); the following points are `stride` apart."""
        return (first * self.stride + self.offset) % self.turn

    def counts(self, first: int, count: int) -> list[int]:
        """Return how many of the rows first … first + count - 1 come from each dataset."""
        before, after = self._below(first), self._below(first + count)
        below = [late - early for early, late in zip(before, after, strict=True)]
        return [end - begin for begin, end in pairwise(below)]

    def _below(self, count: int) -> list[int]:
        """Return how many of the first `count` points lie below each bound."""
        if count == 0:
            return [0] * len(self.bounds)
        # A point x mod turn lies below a bound if x and x - bound are in different turns.
        turn, known = self.turn, {0: 0, self.turn: count}
        if len(self.bounds) > 2:
            whole = floor_sum(count, turn, self.stride, self.offset + turn)
            for bound in set(self.bounds) - known.keys():
                known[bound] = whole - floor_sum(count, turn, self.stride, self.offset + turn - bound)
        return [known[bound] for bound in self.bounds]


def even_stride(turn: int) -> int:
    """Return a stride coprime to `turn`, near turn divided by the golden ratio.

    Among the nearest strides it is the one with the smallest largest partial quotient, which bounds how uneven a
    stretch can be.
    """
    near = (isqrt(5 * turn * turn) - turn) // 2
    strides = [near + away for pair in ((each, -each) for each in range(64)) for away in dict.fromkeys(pair)]
    return min((each for each in strides if 0 <= each < turn and gcd(each, turn) == 1), key=lambda s: _largest(s, turn))


def _largest(stride: int, turn: int) -> int:
    """Return the largest partial quotient of stride / turn."""
    largest = 0
    while stride:
        largest = max(largest, turn // stride)
        turn, stride = stride, turn % stride
    return largest


def floor_sum(count: int, divisor: int, factor: int, offset: int) -> int:
    """Return the sum of (factor · i + offset) // divisor over i = 0 … count - 1, with all numbers at least 0.

    Counts grid points below a line, exchanging the axes as in Euclid's algorithm: O(log divisor).
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


@frozen
class StepSizes:
    """Sizes of steps: `full` rows (or tokens) a step; with a ramp, `first` in the first step and `full` from step
    `ramp` on (from 0).

    Step s of the ramp takes first + g · ⌊s · n / ramp⌋ with g = gcd(first, full) and n = (full − first) / g: linear in
    the steps, in multiples of g, so that every divisor of `first` and `full` divides every step. A step depends only on
    its number.
    """

    full: int
    first: int = field(default=Factory(lambda self: self.full, takes_self=True))
    ramp: int = 0

    def __attrs_post_init__(self) -> None:
        assert self.first < self.full if self.ramp else self.first == self.full

    @classmethod
    def of(cls, sizes: "int | StepSizes") -> "StepSizes":
        """Return step sizes; a number is the size of every step."""
        return cls(sizes) if isinstance(sizes, int) else sizes

    def times(self, factor: int) -> "StepSizes":
        """Return the sizes in tokens for rows of `factor` tokens."""
        return StepSizes(self.full * factor, self.first * factor, self.ramp)

    @property
    def grows_by(self) -> int:
        """Number that divides every difference between steps of a ramp."""
        return gcd(self.first, self.full)

    @property
    def levels(self) -> int:
        """Number of increments from `first` to `full`."""
        return (self.full - self.first) // self.grows_by

    def at(self, step: int) -> int:
        """Return the size of step `step`, from 0."""
        if step >= self.ramp:
            return self.full
        return self.first + self.grows_by * (step * self.levels // self.ramp)

    def before(self, step: int) -> int:
        """Return the total of the steps 0 … step - 1."""
        if not self.ramp:
            return step * self.full
        of_ramp = min(step, self.ramp)
        grown = floor_sum(of_ramp, self.ramp, self.levels, 0)
        return of_ramp * self.first + self.grows_by * grown + (step - of_ramp) * self.full

    def between(self, begin: int, end: int) -> int:
        """Return the total of the steps begin … end - 1; negative if `end` lies before `begin`."""
        return (end - begin) * self.full if not self.ramp else self.before(end) - self.before(begin)

    def steps_of(self, amount: int | Fraction) -> int:
        """Return the smallest number of steps, from step 0 on, that take `amount` or more."""
        whole = ceil(amount)
        ramped = self.before(self.ramp)
        if whole > ramped:
            return self.ramp - (ramped - whole) // self.full
        low, high = 0, self.ramp  # before(high) is enough
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.before(middle) >= whole else (middle + 1, high)
        return high

    def position(self, amount: int | Fraction) -> Fraction:
        """Return the number of steps after which `amount` is taken, with a fraction if it is reached inside a step."""
        step = self.steps_of(amount)
        if step <= 0:
            return Fraction(0)
        return step - 1 + Fraction(amount - self.before(step - 1)) / self.at(step - 1)

    def amount_at(self, position: int | Fraction) -> int | Fraction:
        """Return the amount taken before `position`, the inverse of `position()`."""
        step = floor(position)
        return self.before(step) + (self.at(step) * (position - step) if step != position else 0)

    def pieces(self) -> "tuple[StepSizes, ...]":
        """Return the sizes of each batch that the run had, oldest first; each counts from step 0."""
        return (self,)

    def described(self) -> list[dict[str, int]]:
        """Return these sizes as JSON, the input of `sizes_of`."""
        return [{"full": self.full, "first": self.first, "ramp": self.ramp}]

    def resumed(self, past: "StepSizes", step: int, offset: int | None = None) -> "StepSizes":
        """Return the sizes of a run that took `past` up to `step` and takes these sizes from there on.

        offset: the step of these sizes that comes next, which matters in a ramp; None: `step`.
        """
        last = past.pieces()[-1]
        alike = (self.full, self.first, self.ramp) == (last.full, last.first, last.ramp)
        if alike and not isinstance(last, EvenSizes):
            return past
        if step == 0:
            return self
        return ResumedSizes(
            self.full, self.first, self.ramp, past=past, begin=step, offset=step if offset is None else offset
        )

    def reached(self, size: int | Fraction) -> int | None:
        """Return the first step that takes `size` or more; None if none does."""
        if self.full < size:
            return None
        if self.first >= size:
            return 0
        level = -((self.first - size) // self.grows_by)
        return -(-level * self.ramp // self.levels)

    def uses(self, step: int, taken: int) -> int:
        """Return the total uses of `taken` rows or tokens in the steps before `step`; repeated uses count again."""
        return taken

    def stretches(self) -> tuple[tuple[int, int], ...]:
        """Return (first step, size) of each stretch of equal steps; sizes grow from one stretch to the next."""
        begins = (-(-level * self.ramp // self.levels) for level in range(self.levels)) if self.ramp else ()
        firsts = range(self.ramp) if self.ramp < self.levels else begins
        return tuple((step, self.at(step)) for step in (*firsts, self.ramp))


@frozen(kw_only=True)
class RepeatedSizes(StepSizes):
    """Sizes without a ramp whose steps repeat: each group of `steps` steps is taken `turns` times, then new rows begin.
    The amount before a repeated step is the amount before the first step with the same rows."""

    steps: int
    turns: int

    def before(self, step: int) -> int:
        period, within = divmod(step, self.steps * self.turns)
        return self.full * (period * self.steps + within % self.steps)

    def between(self, begin: int, end: int) -> int:
        return self.before(end) - self.before(begin)

    def steps_of(self, amount: int | Fraction) -> int:
        """Return the steps up to the first step that takes the end of `amount`."""
        period, within = divmod(super().steps_of(amount) - 1, self.steps)
        return period * self.steps * self.turns + within + 1

    def uses(self, step: int, taken: int) -> int:
        within = step % (self.steps * self.turns)
        return self.turns * (taken - self.between(step - within, step)) + self.full * within


@frozen(kw_only=True)
class EvenSizes(StepSizes):
    """Sizes of `steps` steps that took `amount` together; each step is assumed to take an equal part."""

    steps: int
    amount: int

    def at(self, step: int) -> int:
        return self.before(step + 1) - self.before(step)

    def before(self, step: int) -> int:
        return self.amount * step // self.steps

    def between(self, begin: int, end: int) -> int:
        return self.before(end) - self.before(begin)

    def steps_of(self, amount: int | Fraction) -> int:
        return ceil(Fraction(amount) * self.steps / self.amount)

    def times(self, factor: int) -> StepSizes:
        return even_sizes(self.steps, self.amount * factor)

    def described(self) -> list[dict[str, int]]:
        return [{"steps": self.steps, "amount": self.amount}]


@frozen(kw_only=True)
class ResumedSizes(StepSizes):
    """Sizes from step `begin` on, which is step `offset` of them, following steps of the sizes `past`."""

    past: StepSizes
    begin: int
    offset: int

    @property
    def own(self) -> StepSizes:
        """Sizes from `begin` on, counted from step 0."""
        return StepSizes(self.full, self.first, self.ramp)

    def at(self, step: int) -> int:
        return self.past.at(step) if step < self.begin else self.own.at(step - self.begin + self.offset)

    def before(self, step: int) -> int:
        if step <= self.begin:
            return self.past.before(step)
        return self.past.before(self.begin) + self.own.between(self.offset, step - self.begin + self.offset)

    def between(self, begin: int, end: int) -> int:
        return self.before(end) - self.before(begin)

    def steps_of(self, amount: int | Fraction) -> int:
        done = self.past.before(self.begin)
        if amount <= done:
            return self.past.steps_of(amount)
        return self.begin - self.offset + self.own.steps_of(amount - done + self.own.before(self.offset))

    def reached(self, size: int | Fraction) -> int | None:
        earlier = self.past.reached(size)
        if earlier is not None and earlier < self.begin:
            return earlier
        later = self.own.reached(size)
        return None if later is None else max(self.begin, self.begin - self.offset + later)

    def times(self, factor: int) -> StepSizes:
        full, first = self.full * factor, self.first * factor
        past = self.past.times(factor)
        return ResumedSizes(full, first, self.ramp, past=past, begin=self.begin, offset=self.offset)

    def pieces(self) -> tuple[StepSizes, ...]:
        return (*self.past.pieces(), self)

    def stretches(self) -> tuple[tuple[int, int], ...]:
        earlier = tuple(each for each in self.past.stretches() if each[0] < self.begin)
        shift = self.begin - self.offset
        later = {max(self.begin, step + shift): size for step, size in self.own.stretches()}
        return (*earlier, *later.items())

    def described(self) -> list[dict[str, int]]:
        return [*self.past.described(), {**self.own.described()[0], "begin": self.begin, "offset": self.offset}]


def even_sizes(steps: int, amount: int) -> StepSizes:
    """Return the sizes of `steps` steps of which only the total `amount` is known."""
    if amount % steps == 0:
        return StepSizes(amount // steps)
    return EvenSizes(-(-amount // steps), steps=steps, amount=amount)


def sizes_of(described: Sequence[dict[str, Any]]) -> StepSizes:
    """Return the sizes from the JSON of `StepSizes.described`."""
    first, *others = described
    if "amount" in first:
        found = even_sizes(first["steps"], first["amount"])
    else:
        found = StepSizes(first["full"], first["first"], first["ramp"])
    for each in others:
        size = (each["full"], each["first"], each["ramp"])
        found = ResumedSizes(*size, past=found, begin=each["begin"], offset=each["offset"])
    return found


def past_of(state: Mapping[str, Any]) -> StepSizes | None:
    """Return the rows of the steps before a checkpoint, from its `state.json`; None if it does not have them.

    Older checkpoints do not record earlier batches: their steps are assumed to be equal.
    """
    if "batches" in state:
        return sizes_of(state["batches"])
    steps, tokens, loader = state.get("step"), state.get("tokens"), state.get("loader")
    if not steps or not tokens or not loader:
        return None
    return even_sizes(steps, tokens // loader["capacity"])
