"""Epochs: how many rows one has, how many steps so many of them are, and what is sampled in each of them.

Known once the rows of the datasets are counted: the same numbers on every rank, wherever they are worked out.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from attrs import evolve

from xtrain.planner.plan import PlanPhase
from xtrain.planner.schedule.mixture_sampler import MixtureSampler


def exact(number: float) -> Fraction:
    """A number as it was written, not as the nearest binary one: 0.1 of 10 rows is one row."""
    return Fraction(str(number))


def rows_of_epoch(phases: Sequence[PlanPhase], rows: Mapping[str, int]) -> Fraction:
    """Rows of one epoch of a run whose phases, in order, are `phases`; `rows`: of each dataset for training, by name.

    Where the weights that a run begins with are in epochs, it takes each dataset so often. Else it has as many rows as
    the datasets that any phase trains on have together.
    """
    if phases[0].passes is not None:
        return sum(_rows_in_epoch(phases[0], tuple(phases[0].passes), rows), Fraction(0))
    names = {name for phase in phases for name, amount in phase.amounts.items() if amount > 0}
    return Fraction(sum(rows[name] for name in names))


def counted(phases: Sequence[PlanPhase], rows: Mapping[str, int]) -> tuple[PlanPhase, ...]:
    """The same phases with the shares that weights in epochs come to, where the datasets have so many rows."""
    return tuple(phase if phase.passes is None else evolve(phase, shares=_shares(phase, rows)) for phase in phases)


def _shares(phase: PlanPhase, rows: Mapping[str, int]) -> dict[str, float]:
    taken = _rows_in_epoch(phase, tuple(phase.amounts), rows)
    return {name: float(own / sum(taken)) for name, own in zip(phase.amounts, taken, strict=True)}


def sampler_of(phase: PlanPhase, datasets: Sequence[str], rows: Mapping[str, int], seed: int) -> MixtureSampler:
    """Which of `datasets` each row of a phase comes from; one that the phase does not name has no part in it.

    Weights in epochs are sampled alike in all phases, so that those with the same ones go on with one sequence.
    """
    if phase.exact_rows is not None:
        return MixtureSampler.of_epochs(rows_of_step(phase, datasets, phase.exact_rows), seed)
    if phase.passes is None:
        return MixtureSampler.of([phase.shares.get(name, 0.0) for name in datasets], seed, phase.name)
    return MixtureSampler.of_epochs(_rows_in_epoch(phase, datasets, rows), seed)


def rows_of_step(phase: PlanPhase, datasets: Sequence[str], rows: int) -> list[Fraction]:
    """Rows of each dataset in every step of so many, of a phase with exact shares; fractions where they are none."""
    found = [Fraction(phase.shares.get(name, 0.0) * rows) for name in datasets]
    # A third of a number is none in binary.
    return [Fraction(round(each)) if abs(each - round(each)) < 1e-6 else each for each in found]


def _rows_in_epoch(phase: PlanPhase, datasets: Sequence[str], rows: Mapping[str, int]) -> list[Fraction]:
    """Rows of each dataset in one epoch of a phase with weights in epochs."""
    assert phase.passes is not None
    taken = [(name, exact(phase.passes.get(name, 0.0))) for name in datasets]
    return [epochs * rows[name] if epochs else Fraction(0) for name, epochs in taken]
