"""A plan once the run has counted its data: what was planned in epochs, or in shares of them, as steps and tokens."""

from attrs import evolve

from ...records.start_events import HorizonEvent, HorizonTick
from .planned import Planned
from .planned_parts import PlannedPhase, PlannedTick


def counted(plan: Planned, horizon: HorizonEvent) -> Planned:
    """The plan with what the event `horizon` says of it; what it does not say, or says otherwise, stays as planned."""
    found = horizon.ticks
    waiting = [tick for tick in plan.ticks if tick.epochs is not None or tick.fraction is not None]
    known = dict(zip(map(id, waiting), found, strict=False)) if len(found) == len(waiting) else {}
    return evolve(
        plan,
        steps=_either(horizon.steps, plan.steps),
        phases=tuple(_phase(phase, horizon.phases.get(phase.name)) for phase in plan.phases),
        ticks=tuple(_tick(tick, known.get(id(tick), HorizonTick())) for tick in plan.ticks),
        stop_at=_either(horizon.stop_at, plan.stop_at),
        stop_after=_either(horizon.stop_after, plan.stop_after),
    )


def _either(found: int | None, planned: int | None) -> int | None:
    return planned if found is None else found


def _phase(phase: PlannedPhase, first: int | None) -> PlannedPhase:
    return phase if phase.first is not None or first is None else evolve(phase, first=first)


def _tick(tick: PlannedTick, found: HorizonTick) -> PlannedTick:
    steps, tokens = found.steps, found.tokens
    if tick.steps is not None or tick.tokens is not None or (steps is None and tokens is None):
        return tick
    return evolve(tick, steps=steps, tokens=None if tokens is None else int(tokens) if tokens.is_integer() else tokens)
