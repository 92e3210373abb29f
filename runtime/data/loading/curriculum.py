"""Which rows of which dataset every step takes: a closed form of its number, phase by phase.

`planner/schedule/mixture_sampler.py` says whose turn it is. A dataset gives its own rows in its own order, epoch after
epoch: its cursor counts them.
"""

from bisect import bisect_right
from collections.abc import Mapping
from functools import cached_property

import numpy as np
from attrs import define, field, frozen

from xtrain.planner.plan import PlanPhase
from xtrain.planner.schedule.epochs import sampler_of
from xtrain.planner.schedule.mixture_sampler import TURN, MixtureSampler
from xtrain.planner.schedule.phases import in_order
from xtrain.planner.schedule.step_sizes import StepSizes


def sampled_datasets(sampler: MixtureSampler, first: int, count: int) -> np.ndarray:
    """Dataset numbers of the rows first … first + count - 1, int64 [count]."""
    # A bound at the end of the circle has no point behind it.
    inner = np.array([bound for bound in sampler.bounds[1:-1] if bound < sampler.turn], dtype=np.uint64)
    return np.searchsorted(inner, _points(sampler, first, count), side="right").astype(np.int64)


def _points(sampler: MixtureSampler, first: int, count: int) -> np.ndarray:
    """The points of some rows, uint64 [count]."""
    if sampler.turn == TURN:  # uint64 goes round by itself
        return np.uint64(sampler.first_point(first)) + np.arange(count, dtype=np.uint64) * np.uint64(sampler.stride)
    points = np.full(count, sampler.first_point(first), dtype=np.uint64)
    known, turn = 1, np.uint64(sampler.turn)
    while known < count:  # from so many to twice as many: no product to overflow
        more = points[known : 2 * known]
        more[:] = points[: len(more)] + np.uint64(known * sampler.stride % sampler.turn)
        more[more >= turn] -= turn
        known *= 2
    return points


# Each dataset that is sampled with how often an epoch takes it, in the order of sampling.
Passes = tuple[tuple[str, float], ...] | None


@frozen(kw_only=True)
class Position:
    """How far a run has come before `step`. The default is its beginning."""

    step: int = 0
    rows: int = 0
    """Rows that were taken, of all datasets."""
    cursors: dict[str, int] = field(factory=dict)
    """Rows that were taken of each dataset; none of those that are not named."""
    phase: str = ""
    """The phase of the last row that was taken, empty where there is none yet."""
    sampled: int = 0
    """Rows that were taken in that phase; of weights in epochs, since these were the weights."""
    passes: Passes = None
    """By which weights in epochs that row was sampled; None if by shares."""


@frozen
class _PhaseSpan:
    """The steps from `first` on, up to the next stretch; what was taken before them."""

    first: int
    phase: str
    passes: Passes
    sampler: MixtureSampler
    sampled: int
    cursors: tuple[int, ...]


@define(kw_only=True, frozen=True)
class Curriculum:
    """The rows of every step from `start` on. Nothing here moves: the step is the whole position.

    What came before `start` is taken as it was, whatever phases and rows per step it had. A phase in which the run
    stopped goes on with the row that is due; later ones begin with their first. Weights in epochs are sampled on from
    phase to phase, as long as they stay the same: their epochs come out even.
    """

    datasets: tuple[str, ...]
    phases: tuple[PlanPhase, ...]
    """Their shares are of `datasets`; one that a phase does not name has none in it."""
    steps: int
    """Of the whole run, for phases that begin at a share of it."""
    rows_per_step: StepSizes = field(converter=StepSizes.of)
    seed: int
    num_rows: Mapping[str, int] = field(factory=dict)
    """Rows that each dataset has, for phases whose weights are in epochs."""
    start: Position = field(factory=Position)
    _next: list[tuple[int, list[int]]] = field(factory=lambda: [(-1, [])], init=False, eq=False, repr=False)
    """A step, and the cursors before it: those of the step that was asked for last, at its end."""

    def rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each row of a step its dataset's number, and which row in the order of that dataset it is.

        Both are int64 [rows per step]. `step` is not before `start`.
        """
        if len(self.datasets) == 1:
            first = self._cursor(step)
            own = np.arange(first, first + self.rows_per_step.at(step), dtype=np.int64)
            return np.zeros_like(own), own
        stretch, sampled = self._at(step)
        datasets = sampled_datasets(stretch.sampler, sampled, self.rows_per_step.at(step))
        cursors = np.empty(len(datasets), dtype=np.int64)
        # Steps are mostly asked for one after the other: the next one begins where this one ends.
        known, before = self._next[0]
        before = list(before) if known == step else self._cursors(stretch, sampled)
        for number, cursor in enumerate(before):
            (own,) = np.nonzero(datasets == number)
            before[number] = cursor + len(own)
            cursors[own] = np.arange(cursor, before[number])
        self._next[0] = (step + 1, before)
        return datasets, cursors

    def rows_before(self, step: int) -> int:
        """Rows that the run has taken before a step."""
        return self.start.rows + self.rows_per_step.between(self.start.step, step)

    def position(self, step: int) -> Position:
        """How far the run has come before a step."""
        if step == self.start.step:
            return self.start
        # The last step that was taken says which phase it was: whether it goes on, the plan of the next one says.
        stretch, _ = self._at(step - 1)
        sampled = stretch.sampled + self.rows_per_step.between(stretch.first, step)
        each = [self._cursor(step)] if len(self.datasets) == 1 else self._cursors(stretch, sampled)
        cursors = dict(zip(self.datasets, each, strict=True))
        return Position(
            step=step,
            rows=self.rows_before(step),
            cursors={**self.start.cursors, **cursors},
            phase=stretch.phase,
            sampled=max(0, sampled),
            passes=stretch.passes,
        )

    def uses(self, step: int) -> dict[str, int]:
        """How many rows of each dataset are trained on before a step, each time that one is."""
        cursors = self.position(step).cursors
        return {name: self.rows_per_step.uses(step, cursor) for name, cursor in cursors.items()}

    def _cursor(self, step: int) -> int:
        """Of a dataset that is alone. Steps whose rows come again may begin before the one that the run starts with,
        which has had larger ones."""
        return max(0, self.start.cursors.get(self.datasets[0], 0) + self.rows_per_step.between(self.start.step, step))

    @cached_property
    def _stretches(self) -> list[_PhaseSpan]:
        start = self.start
        cursors, passes, sampled = [start.cursors.get(name, 0) for name in self.datasets], start.passes, start.sampled
        plan = in_order(self.phases, self.steps)
        begins = [first for first, _ in plan]
        found: list[_PhaseSpan] = []
        for (first, phase), end in zip(plan, [*begins[1:], None], strict=True):
            if end is not None and end <= start.step:
                continue
            before, passes = passes, self._passes(phase)
            goes_on = passes == before if passes is not None else not found and phase.name == start.phase
            sampled = sampled if goes_on else 0
            sampler = sampler_of(phase, self.datasets, self.num_rows, self.seed)
            found.append(_PhaseSpan(max(first, start.step), phase.name, passes, sampler, sampled, tuple(cursors)))
            if end is not None:
                count = self.rows_per_step.between(found[-1].first, end)
                counts = sampler.counts(sampled, count)
                cursors = [cursor + own for cursor, own in zip(cursors, counts, strict=True)]
                sampled += count
        return found

    def _passes(self, phase: PlanPhase) -> Passes:
        if phase.passes is None:
            return None
        found = ((name, phase.passes.get(name, 0.0)) for name in self.datasets)
        return tuple((name, epochs) for name, epochs in found if epochs > 0)

    def _at(self, step: int) -> tuple[_PhaseSpan, int]:
        """The stretch of a step, and the rows of its phase before it."""
        assert step >= self.start.step, f"step {step} lies before the one that this run starts with"
        place = bisect_right(self._stretches, step, key=lambda stretch: stretch.first)
        stretch = self._stretches[place - 1]
        return stretch, stretch.sampled + self.rows_per_step.between(stretch.first, step)

    @staticmethod
    def _cursors(stretch: _PhaseSpan, sampled: int) -> list[int]:
        counts = stretch.sampler.counts(stretch.sampled, sampled - stretch.sampled)
        return [cursor + count for cursor, count in zip(stretch.cursors, counts, strict=True)]
