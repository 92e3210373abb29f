"""Which trials go on behind a rung: the rule of asynchronous successive halving, with the order of the trials in place
of the order in time, so that how fast each of them was changes nothing.

Li et al. 2020 (arXiv 1810.05934), in the form that never pauses what is among the best: a trial goes on if it is
among the best 1 / factor, and one at least, of those that came to the rung up to itself.
"""

import math
from collections.abc import Mapping

from attrs import frozen

from xtrain.records.sweep_state import TrialState


@frozen
class Decision:
    """place: among `of` trials that came to the rung, from 1; those after it in number do not count."""

    trial: int
    rung: int
    goes_on: bool
    place: int
    of: int


def decisions(trials: Mapping[int, TrialState], factor: int) -> list[Decision]:
    """What can be decided now: of each trial that waits at a rung, once every earlier one has come there or ended."""
    found = []
    for number in sorted(trials):
        trial = trials[number]
        if not trial.undecided or trial.ended:
            continue
        rung = len(trial.decisions)
        earlier = [trials[each] for each in sorted(trials) if each < number and trials[each].same_as is None]
        if all(len(each.values) > rung or each.ended for each in earlier):
            values = [each.values[rung] for each in earlier if len(each.values) > rung]
            found.append(_decided(trial, rung, values, factor))
    return found


def _decided(trial: TrialState, rung: int, earlier: list[float | None], factor: int) -> Decision:
    """Equal values: the earlier trial is better. A value that is missing or not finite never goes on."""
    value = trial.values[rung]
    count = len(earlier) + 1
    if value is None:
        return Decision(trial.number, rung, False, count, count)
    better = sum(1 for each in earlier if each is not None and math.isfinite(each) and each <= value)
    return Decision(trial.number, rung, better < max(count // factor, 1), better + 1, count)
