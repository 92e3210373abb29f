"""The learning rate of a step by the arguments of its node: that of the schedule, times the factor of the phase."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...dsl.schema.schedules import SCHEDULERS, Rate
from ..plan import PlanPhase
from .phases import phase_at


def learning_rate(args: Mapping[str, Any], total: int, phases: Sequence[PlanPhase] = ()) -> Rate:
    """Step index (from 0) → learning rate, by the arguments of `setup.scheduler`, over `total` steps.

    Of a schedule whose rates are `computed`. phases: of the timeline; the rate is multiplied by the `lr_scale` of the
    phase that a step lies in.
    """
    rate = SCHEDULERS.of(args).rate(args, total)
    return scaled(rate, total, phases)


def computed(args: Mapping[str, Any]) -> bool:
    """Whether the rates of a schedule can be computed without a run."""
    return SCHEDULERS.of(args).computed


def scaled(rate: Rate, total: int, phases: Sequence[PlanPhase]) -> Rate:
    """The rate of each step times the `lr_scale` of its phase."""
    if all(phase.lr_scale == 1 for phase in phases):
        return rate
    return lambda index: rate(index) * phase_at(phases, index, total).lr_scale
