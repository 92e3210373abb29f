"""Sets of instants as sorted, disjoint intervals: arrays of n rows (begin, end)."""

from collections.abc import Iterable

import numpy as np

Intervals = np.ndarray

NOTHING: Intervals = np.empty((0, 2))


def union(pairs: Iterable[tuple[float, float]] | Intervals) -> Intervals:
    """The instants that lie in any of the pairs, which may overlap and come in any order."""
    found = np.asarray(pairs if isinstance(pairs, np.ndarray) else list(pairs), dtype=np.float64).reshape(-1, 2)
    found = found[found[:, 1] > found[:, 0]]
    if not len(found):
        return NOTHING
    found = found[np.argsort(found[:, 0], kind="stable")]
    until = np.maximum.accumulate(found[:, 1])
    first = np.concatenate(([True], found[1:, 0] > until[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((found[first, 0], until[last]), axis=1)


def minus(one: Intervals, other: Intervals) -> Intervals:
    """The instants of the one that are not in the other."""
    if not len(one) or not len(other):
        return one
    # A sweep over all ends: how many of each set cover the stretch behind each of them.
    at = np.concatenate((one[:, 0], one[:, 1], other[:, 0], other[:, 1]))
    inside = np.repeat((1, -1, 0, 0), (len(one), len(one), len(other), len(other)))
    outside = np.repeat((0, 0, 1, -1), (len(one), len(one), len(other), len(other)))
    order = np.argsort(at, kind="stable")
    at, inside, outside = at[order], inside[order].cumsum(), outside[order].cumsum()
    only_inside = (inside[:-1] > 0) & (outside[:-1] == 0)
    return union(np.stack((at[:-1][only_inside], at[1:][only_inside]), axis=1))


def clipped(found: Intervals, begin: float, end: float) -> Intervals:
    """The part between two instants."""
    within = np.clip(found, begin, end)
    return within[within[:, 1] > within[:, 0]]


def length(found: Intervals) -> float:
    return float((found[:, 1] - found[:, 0]).sum())
