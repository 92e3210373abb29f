"""How much every step of a run takes, in rows or in tokens: always the same, or growing at first (a ramp)."""

from fractions import Fraction
from math import ceil, gcd

from attrs import Factory, field, frozen

from .mixture_sampler import floor_sum


@frozen
class StepSizes:
    """`full` rows (or tokens) a step; with a ramp `first` in the first step, and `full` from step `ramp` on (from 0).

    Step s of the ramp takes first + g · ⌊s · n / ramp⌋ with g = gcd(first, full) and n = (full − first) / g: linear in
    the steps, in multiples of g, so that whatever divides `first` and `full` divides every step. A step depends on its
    number alone.
    """

    full: int
    first: int = field(default=Factory(lambda self: self.full, takes_self=True))
    ramp: int = 0

    def __attrs_post_init__(self) -> None:
        assert self.first < self.full if self.ramp else self.first == self.full

    @classmethod
    def of(cls, sizes: "int | StepSizes") -> "StepSizes":
        """A number is the size of every step."""
        return cls(sizes) if isinstance(sizes, int) else sizes

    def times(self, factor: int) -> "StepSizes":
        """Of rows of `factor` tokens the tokens."""
        return StepSizes(self.full * factor, self.first * factor, self.ramp)

    @property
    def grows_by(self) -> int:
        """The steps of a ramp differ by a multiple of this."""
        return gcd(self.first, self.full)

    @property
    def levels(self) -> int:
        """How many times it grows on the way from `first` to `full`."""
        return (self.full - self.first) // self.grows_by

    def at(self, step: int) -> int:
        """What step `step` takes, from 0."""
        if step >= self.ramp:
            return self.full
        return self.first + self.grows_by * (step * self.levels // self.ramp)

    def before(self, step: int) -> int:
        """What the steps 0 … step - 1 take together."""
        if not self.ramp:
            return step * self.full
        of_ramp = min(step, self.ramp)
        grown = floor_sum(of_ramp, self.ramp, self.levels, 0)
        return of_ramp * self.first + self.grows_by * grown + (step - of_ramp) * self.full

    def between(self, begin: int, end: int) -> int:
        """What the steps begin … end - 1 take together; below 0 where `end` lies before `begin`."""
        return (end - begin) * self.full if not self.ramp else self.before(end) - self.before(begin)

    def steps_of(self, amount: int | Fraction) -> int:
        """The least number of steps, from step 0 on, that take `amount` or more."""
        whole = ceil(amount)
        ramped = self.before(self.ramp)
        if whole > ramped:
            return self.ramp - (ramped - whole) // self.full
        low, high = 0, self.ramp  # before(high) is enough
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.before(middle) >= whole else (middle + 1, high)
        return high

    def reached(self, size: int | Fraction) -> int | None:
        """The first step that takes `size` or more; None if none does."""
        if self.full < size:
            return None
        if self.first >= size:
            return 0
        level = -((self.first - size) // self.grows_by)
        return -(-level * self.ramp // self.levels)

    def uses(self, step: int, taken: int) -> int:
        """How much the steps before `step` take together if they take `taken`, each time that something is taken."""
        return taken

    def stretches(self) -> tuple[tuple[int, int], ...]:
        """(first step, size) of the steps that are alike: they grow from one stretch to the next."""
        begins = (-(-level * self.ramp // self.levels) for level in range(self.levels)) if self.ramp else ()
        firsts = range(self.ramp) if self.ramp < self.levels else begins
        return tuple((step, self.at(step)) for step in (*firsts, self.ramp))


@frozen(kw_only=True)
class RepeatedSizes(StepSizes):
    """Steps without a ramp, of which those from `steps` on take what the `steps` before them have taken, until that is
    taken `turns` times; then new ones begin. What is before a step is what is before the first that takes the same."""

    steps: int
    turns: int

    def before(self, step: int) -> int:
        period, within = divmod(step, self.steps * self.turns)
        return self.full * (period * self.steps + within % self.steps)

    def between(self, begin: int, end: int) -> int:
        return self.before(end) - self.before(begin)

    def steps_of(self, amount: int | Fraction) -> int:
        """Up to the first of the steps that take the last of it."""
        period, within = divmod(super().steps_of(amount) - 1, self.steps)
        return period * self.steps * self.turns + within + 1

    def uses(self, step: int, taken: int) -> int:
        within = step % (self.steps * self.turns)
        return self.turns * (taken - self.between(step - within, step)) + self.full * within
