"""What comes when: the phases of the run, and what happens next between its steps."""

import math
from typing import TYPE_CHECKING

from attrs import frozen

from xtrain.tui.board.head import steps_of
from xtrain.tui.model.ahead import last_step, next_step
from xtrain.tui.words import duration, plural, printable

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board
    from xtrain.tui.model.planned import Planned, PlannedTick, StepTokens


@frozen
class Next:
    """Next event of a tick. in_steps: steps from now; None where the clock decides."""

    what: str
    in_steps: int | None
    every_seconds: float | None = None


def upcoming(board: "Board") -> list[Next]:
    """Return the next event of each tick, nearest first; ticks by the clock come last."""
    planned, step, last = board.planned, board.step, last_step(board)
    if planned is None or board.life.over:
        return []
    found = [Next(_names(tick), _in_steps(tick, step, planned.step_tokens), tick.seconds) for tick in planned.ticks]
    known = [each for each in found if each.in_steps is None or last is None or step + each.in_steps <= last]
    if last is not None and last > step:
        known += _at_last(planned, last, last - step, stops=last != steps_of(board))
    return sorted(known, key=lambda each: math.inf if each.in_steps is None else each.in_steps)


def _at_last(planned: "Planned", last: int, in_steps: int, *, stops: bool) -> list[Next]:
    """Return the events after the last step of this start. stops: the run stops before its end."""
    event = "stop_at" if stops else "finish"
    if stops and any(tick.stop and next_step(tick, planned.step_tokens, last - 1) == last for tick in planned.ticks):
        return []  # a tick that stops the run says so itself
    found = next((trigger for trigger in planned.triggers if trigger.event == event), None)
    if found is None and not stops:
        return []
    nodes = _of_nodes(found.nodes) if found else ""
    return [Next(("the stop" if stops else "the end") + (f": {nodes}" if nodes else ""), in_steps)]


def _in_steps(tick: "PlannedTick", step: int, tokens: "StepTokens | None") -> int | None:
    at = next_step(tick, tokens, step)
    return None if at is None else at - step


def _names(tick: "PlannedTick") -> str:
    return _of_nodes(tick.nodes) + (", then stop" if tick.stop else "")


def _of_nodes(nodes: tuple[str, ...]) -> str:
    names = [node.removeprefix("tick.").removeprefix("event.finish.").removeprefix("event.stop_at.") for node in nodes]
    return printable(", ".join(names).replace(".", " "))


def when(each: Next, seconds_per_step: float | None) -> str:
    """Return `in 15 steps (8s)`, `every 10m00s`."""
    if each.in_steps is None:
        return f"every {duration(each.every_seconds)}"
    about = "" if seconds_per_step is None else f" ({duration(each.in_steps * seconds_per_step)})"
    return f"in {plural(each.in_steps, 'step')}{about}"


@frozen
class ScheduleSpan:
    """Phase with its share of the run, from `begin` to `end`, both from 0 to 1. now: the run is in it."""

    name: str
    begin: float
    end: float
    now: bool


def stretches(board: "Board") -> list[ScheduleSpan]:
    """Return the phases of the run in order; empty while its length is unknown."""
    planned, steps = board.planned, steps_of(board)
    if planned is None or not steps:
        return []
    begins = [min(1.0, _begin(phase, steps)) for phase in planned.phases]
    done = board.step / steps
    ends = [*begins[1:], 1.0]
    return [
        ScheduleSpan(phase.name, begin, end, begin <= done < end or (done >= 1 and end == 1))
        for phase, begin, end in zip(planned.phases, begins, ends, strict=True)
    ]


def _begin(phase, steps: int) -> float:
    if phase.first is not None:
        return phase.first / steps
    return phase.fraction or 0.0
