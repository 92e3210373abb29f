"""In which order things are done in a step in which several are due: what is measured, what is logged, what is saved.

A state is saved with what was measured of it, so that it can be the best; and a run that dies right behind a save has
lost no record of the steps that the checkpoint holds.
"""

from collections.abc import Iterable

from attrs import evolve

from xtrain.dsl.schema.actions import Action, Tick


def in_order(ticks: Iterable[Tick]) -> list[Tick]:
    """Evaluations first, so that the log has their losses, then logs, then checkpoints; else in the order of the spec.

    Where several ticks save, the first save in a step is the one that counts: what they do before it is then a tick of
    its own, with the same period.
    """
    found = [evolve(tick, actions=_records_first(tick.actions)) for tick in ticks]
    if sum(map(_saves, found)) > 1:
        found = [part for tick in found for part in (_parts(tick) if _saves(tick) else (tick,))]
    return sorted(found, key=_turn)


def _records_first(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """The actions with those that leave records of the state moved from behind the first save to right before it."""
    at = next((place for place, action in enumerate(actions) if action.saves), len(actions))
    behind = actions[at:]
    late = tuple(action for action in behind if action.records)
    return (*actions[:at], *late, *(action for action in behind if not action.records))


def _parts(tick: Tick) -> tuple[Tick, ...]:
    """A tick that saves as two: what it does before, if anything, and the rest; the run stops behind the rest."""
    at = next(place for place, action in enumerate(tick.actions) if action.saves)
    before = tuple(action for action in tick.actions[:at] if not action.stops)
    stops = tuple(action for action in tick.actions[:at] if action.stops)
    rest = (*tick.actions[at:], *stops)
    return (evolve(tick, actions=before), evolve(tick, actions=rest)) if before else (tick,)


def _saves(tick: Tick) -> bool:
    return any(action.saves for action in tick.actions)


def _turn(tick: Tick) -> int:
    return max(action.turn for action in tick.actions)
