"""Actions that go on with the steps behind them, as profiles: rules for where they stand."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations
from math import ceil, floor, lcm
from typing import Final

from attrs import frozen

from xtrain.dsl.schema.actions import ENDINGS, Tick
from xtrain.dsl.spec import Spec
from xtrain.planner.findings import Findings
from xtrain.planner.schedule.arithmetic import Arithmetic
from xtrain.planner.schedule.stops import counted
from xtrain.planner.units import plural

MOST_STARTS: Final = 100_000  # of an action, that are compared with those of another one


@frozen
class ProfiledSteps:
    """A tick whose action goes on with the steps behind it. period: in steps, of which the whole number of tokens or
    epochs is rarely one; at least 1."""

    path: str
    every: str
    action: str
    period: Fraction
    length: int

    def start(self, number: int) -> int:
        """The step after which it begins for the n-th time, from 1."""
        return ceil(number * self.period)

    def first_overlap(self) -> tuple[int, int] | None:
        """Two starts, one behind the other, the first between which it has too few steps; None if there are none."""
        if self.length <= floor(self.period):
            return None
        # Of a period with a fraction some gaps have a step less than the others: the first of these ends where what
        # each start is rounded up by has added up to a whole step.
        short = ceil(self.period) - self.period
        second = 2 if self.length > ceil(self.period) else ceil(1 / short)
        return self.start(second - 1), self.start(second)


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
    possible = []
    for span in spans:
        rule, overlap = f"schedule.{span.path}.length", span.first_overlap()
        if overlap is not None and (batch.steps is None or overlap[1] <= batch.steps):
            first, second = overlap
            message = f"every {span.every} {span.action}: it takes {plural(span.length, 'step')}, and the next one is "
            message += f"due after {second - first}"
            found.fail(rule, "X615", span.path, message, f"use a period of {span.length} steps or more")
        else:
            possible.append(span)
            shown = plural(int(span.period), "step")
            found.passed(rule, f"{span.action} takes {span.length} of every {shown}")
    reported: set[str] = set()
    for one, other in combinations(possible, 2):
        if one.action != other.action or one.path in reported or other.path in reported:
            continue
        if (step := meeting(one, other, batch.steps)) is not None:
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


def _steps_between(tick: Tick, batch: Arithmetic) -> Fraction | None:
    every = counted(tick.every, batch)
    if every is None or every.unit == "seconds":
        return None
    # Steps of a ramp have fewer tokens, so that more of them lie between.
    return max(Fraction(every.value) / (1 if every.unit == "steps" else batch.tokens_per_step), Fraction(1))


def meeting(one: ProfiledSteps, other: ProfiledSteps, steps: int | None) -> int | None:
    """The first step after which one begins while the other is under way; None: never, as far as is looked."""
    often, rare = sorted((one, other), key=lambda span: span.period)
    whole = lcm(often.period.numerator, rare.period.numerator)  # from there on it is all the same again
    last = whole if steps is None else min(whole, steps)
    for number in range(1, MOST_STARTS + 1):
        at = rare.start(number)
        if at > last:
            return None
        before = floor(at / often.period)
        following = often.start(before + 1)
        if before and at - often.start(before) < often.length:
            return at
        if following < at + rare.length and (steps is None or following <= steps):
            return following
    return None
