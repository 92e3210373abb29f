"""Where phases begin and which one a step lies in: for the planner, and for the run once its steps are counted."""

from collections.abc import Sequence

from xtrain.planner.plan import PlanPhase


def first_step(phase: PlanPhase, total: int) -> int:
    """The index of the first step of a phase in a run of `total` steps."""
    if phase.first is not None:
        return phase.first
    assert phase.fraction is not None, "a start in epochs is known once the data is counted"
    return round(phase.fraction * total)


def in_order(phases: Sequence[PlanPhase], total: int) -> list[tuple[int, PlanPhase]]:
    """(first step, phase) by first step. Of phases that begin together only the last one has steps: it alone is there.

    Starts in steps and in shares of a budget that had not been counted come into their order here.
    """
    begins = {first_step(phase, total): phase for phase in phases}
    return sorted(begins.items(), key=lambda pair: pair[0])


def phase_at(phases: Sequence[PlanPhase], step: int, total: int) -> PlanPhase:
    """The phase that a step (from 0) lies in: the last one that has begun. Behind the last step it is the last one."""
    if len(phases) == 1:
        return phases[0]
    return [phase for first, phase in in_order(phases, total) if first <= step][-1]
