"""The logged steps of a run as columns: exact, and up to millions of them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy import ndarray

By = Literal["step", "tokens", "time"]


class Series:
    """The numbers of `metrics.jsonl`, one column a key, ordered by step.

    A step is there once: records of the same step (an evaluation that came after the step's own record) are merged,
    and where the run goes back, what it had logged behind that step is forgotten. Only its maker changes it, in
    place; `version` moves with every change.
    """

    version: int = 0

    def __len__(self) -> int:
        """How many steps are in it."""
        return 0

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys with numbers, in the order in which they were first seen, without `step`."""
        return ()

    @property
    def last(self) -> Mapping[str, Any]:
        """The newest record as it was written, lists and texts included; evaluations of the same step are in it."""
        return MappingProxyType({})

    def xy(self, key: str, by: By = "step") -> "tuple[ndarray, ndarray]":
        """Where, and what: two arrays of float64 of one length, ascending in the first, with finite values only.

        by: steps, tokens since the beginning, or seconds since 1970. Empty for a key nobody has seen. The arrays are
        not to be written to.
        """
        return np.empty(0), np.empty(0)

    def latest(self, key: str) -> float | None:
        """The newest finite value of a key, however long ago; None where there is none."""
        return None
