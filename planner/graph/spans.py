"""Actions that go on with the steps behind them, as profiles: rules for where they stand."""

from collections.abc import Iterator
from itertools import combinations
from math import lcm

from attrs import frozen

from ...dsl.schema.actions import ENDINGS, Tick
from ...dsl.spec import Spec
from ..findings import Findings
from ..schedule.arithmetic import Arithmetic
from ..schedule.stops import counted
from ..units import plural


@frozen
class ProfiledSteps:
    """A tick whose action goes on with the steps behind it. period: the fewest steps between two of its starts."""

    path: str
    every: str
    action: str
    period: int
    length: int


def check_profiles(spec: Spec, batch: Arithmetic, found: Findings) -> None:
    """Who looks at the steps that follow needs steps that follow, and is alone with them."""
    places = [(f"every.{number}", "a tick", tick.actions) for number, tick in enumerate(spec.ticks)]
    places += [(f"on.{number}", f"on {each.event}", each.actions) for number, each in enumerate(spec.events)]
    for path, what, actions in places:
        ends = any(action.stops for action in actions) or what.removeprefix("on ") in ENDINGS
        for action in actions:
            if ends and (needed := action.needs_steps()) is not None:
                name, hint = needed
                message = f"{what} has a {name} of the next steps, and the run ends there"
                found.fail(f"schedule.{path}.ends", "X614", path, message, f"{hint}, or use a tick of its own")
    spans = list(_spans(spec, batch))
    for span in spans:
        rule = f"schedule.{span.path}.length"
        if span.period < span.length:
            message = f"every {span.every} {span.action}: it takes {plural(span.length, 'step')}, and the next one is "
            message += f"due after {span.period}"
            found.fail(rule, "X615", span.path, message, f"use a period of {span.length} steps or more")
        else:
            found.passed(rule, f"{span.action} takes {span.length} of every {plural(span.period, 'step')}")
    possible = [span for span in spans if span.period >= span.length]
    reported: set[str] = set()
    for one, other in combinations(possible, 2):
        step = meeting(one, other, batch.steps) if one.action == other.action else None
        if step is not None and other.path not in reported:
            reported.add(other.path)
            message = f"every {other.every} {other.action}: that of every {one.every} is still recording then"
            message += f", after step {step:,} for the first time"
            found.fail(f"schedule.{other.path}.alone", "X615", other.path, message, "keep one of them")


def _spans(spec: Spec, batch: Arithmetic) -> Iterator[ProfiledSteps]:
    """Those whose period can be counted; of a clock the run sees what it does."""
    for number, tick in enumerate(spec.ticks):
        period = _steps_between(tick, batch)
        if any(action.stops for action in tick.actions):
            continue
        for action in tick.actions:
            if (length := action.length(spec)) and period:
                yield ProfiledSteps(f"every.{number}", str(tick.every), action.kind, period, length)


def _steps_between(tick: Tick, batch: Arithmetic) -> int:
    every = counted(tick.every, batch)
    if every is None or every.unit == "seconds":
        return 0
    return int(every.value) if every.unit == "steps" else max(int(every.value) // batch.tokens_per_step, 1)


def meeting(one: ProfiledSteps, other: ProfiledSteps, steps: int | None) -> int | None:
    """The first step after which one begins while the other is under way; None: never."""
    often, rare = sorted((one, other), key=lambda span: span.period)
    whole = lcm(often.period, rare.period)  # from there on it is all the same again
    last = whole if steps is None else min(whole, steps)
    for at in range(rare.period, last + 1, rare.period):
        behind = at % often.period
        following = at + often.period - behind
        if behind < often.length and at > behind:
            return at
        if following < at + rare.length and (steps is None or following <= steps):
            return following
    return None
