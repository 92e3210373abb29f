"""What comes when: the phases of the run, and what happens next between its steps."""

import math
from typing import TYPE_CHECKING

from attrs import frozen

from ..words import duration, plural, printable
from .head import steps_of

if TYPE_CHECKING:
    from ..model.board import Board
    from ..model.planned import PlannedTick


@frozen
class Next:
    """What happens next of one tick. in_steps: how many steps from now; None where the clock decides."""

    what: str
    in_steps: int | None
    every_seconds: float | None = None


def upcoming(board: "Board") -> list[Next]:
    """The next time of each tick, the nearest first; those of the clock come last."""
    planned, step, steps = board.planned, board.step, steps_of(board)
    if planned is None or board.life.over:
        return []
    found = [Next(_names(tick), _in_steps(tick, step, planned.tokens_per_step), tick.seconds) for tick in planned.ticks]
    known = [each for each in found if each.in_steps is None or steps is None or step + each.in_steps <= steps]
    if steps and steps > step and (end := next((r for r in planned.reactions if r.event == "finish"), None)):
        known.append(Next(f"the end: {_of_nodes(end.nodes)}" if end.nodes else "the end", steps - step))
    return sorted(known, key=lambda each: math.inf if each.in_steps is None else each.in_steps)


def _in_steps(tick: "PlannedTick", step: int, tokens_per_step: int | None) -> int | None:
    if tick.steps:
        return tick.steps - step % tick.steps
    if tick.tokens and tokens_per_step:
        passed = step * tokens_per_step // tick.tokens + 1
        return max(1, math.ceil(passed * tick.tokens / tokens_per_step) - step)
    return None


def _names(tick: "PlannedTick") -> str:
    return _of_nodes(tick.nodes) + (", then stop" if tick.stop else "")


def _of_nodes(nodes: tuple[str, ...]) -> str:
    names = [node.removeprefix("tick.").removeprefix("event.finish.").replace(".", " ") for node in nodes]
    return printable(", ".join(names))


def when(each: Next, seconds_per_step: float | None) -> str:
    """`in 15 steps (8s)`, `every 10m00s`."""
    if each.in_steps is None:
        return f"every {duration(each.every_seconds)}"
    about = "" if seconds_per_step is None else f" ({duration(each.in_steps * seconds_per_step)})"
    return f"in {plural(each.in_steps, 'step')}{about}"


@frozen
class Stretch:
    """A phase: its name and its share of the run, from `begin` to `end`, both from 0 to 1. now: the run is in it."""

    name: str
    begin: float
    end: float
    now: bool


def stretches(board: "Board") -> list[Stretch]:
    """The phases of the run in their order; empty while nobody knows how long it is."""
    planned, steps = board.planned, steps_of(board)
    if planned is None or not steps:
        return []
    begins = [min(1.0, _begin(phase, steps)) for phase in planned.phases]
    done = board.step / steps
    ends = [*begins[1:], 1.0]
    return [
        Stretch(phase.name, begin, end, begin <= done < end or (done >= 1 and end == 1))
        for phase, begin, end in zip(planned.phases, begins, ends, strict=True)
    ]


def _begin(phase, steps: int) -> float:
    if phase.first is not None:
        return phase.first / steps
    return phase.fraction or 0.0
