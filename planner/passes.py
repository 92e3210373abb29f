"""Epochs of a run: how many rows one has, and how many steps so many of them are. Known once rows are counted."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil

from .plan_timeline import Phase


def exact(number: float) -> Fraction:
    """A number as it was written, not as the nearest binary one: 0.1 of 10 rows is one row."""
    return Fraction(str(number))


def rows_of_epoch(phases: Sequence[Phase], rows: Mapping[str, int]) -> Fraction:
    """Rows of one epoch of a run whose phases, in order, are `phases`; `rows`: of each dataset for training, by name.

    It has as many rows as the datasets that any phase trains on have together.
    """
    return Fraction(sum(rows[name] for name in phases[0].shares if any(phase.shares[name] > 0 for phase in phases)))


def steps_of_epochs(epochs: float, rows: Fraction | int, rows_per_step: int, taken: int = 0) -> int:
    """Steps that take `epochs` epochs of `rows` rows each, of which `taken` rows were taken before; rounded up, as
    every step takes all its rows."""
    left = exact(epochs) * rows - taken
    return max(0, ceil(left / rows_per_step))
