"""What stops a run before its end: signals, limits of time and of steps; the rules for what is declared for them."""

from fractions import Fraction
from math import ceil
from pathlib import PurePath
from typing import Any, Literal

from attrs import frozen

from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.actions import ENDINGS, LIMITS, Action, EventName, OnEvent
from xtrain.dsl.schema.experiment import Launch
from xtrain.dsl.spec import Spec
from xtrain.planner.canonical import portable
from xtrain.planner.findings import Findings
from xtrain.planner.plan import Uncounted
from xtrain.planner.schedule.arithmetic import Arithmetic
from xtrain.planner.schedule.epochs import exact
from xtrain.planner.units import plural


def occurs(event: EventName, launch: Launch) -> bool:
    """Whether anything can cause an event."""
    return event not in LIMITS or any(getattr(launch, setting) is not None for setting in LIMITS[event])


def agree_args(spec: Spec) -> dict[str, Any]:
    """What the first rank alone looks for, as arguments of `step.agree`: time that is over, a file that is there."""
    launch, args = spec.launch, {}
    if launch.time_limit is not None:
        args["time_limit_seconds"] = launch.time_limit.value
    if launch.stop_file is not None:
        args["stop_file"] = portable(launch.stop_file)
    return args


def actions_on(events: tuple[OnEvent, ...], name: EventName) -> tuple[Action, ...]:
    """All that is declared for an event, in the order in which it is."""
    return tuple(action for event in events if event.event == name for action in event.actions)


def check_events(spec: Spec, found: Findings) -> None:
    """What stops a run ends it: whoever sent it, a scheduler or a person, ends the ranks if they do not."""
    lines: dict[EventName, list[int]] = {}
    for number, event in enumerate(spec.events):
        lines.setdefault(event.event, []).append(number)
    for name, numbers in lines.items():
        if (problem := _problem(name, actions_on(spec.events, name), spec.launch)) is not None:
            for number in numbers:
                code, message, hint = problem
                found.fail(f"schedule.on.{name}", code, f"on.{number}", message, hint)
    for number, tick in enumerate(spec.ticks):
        if (wrong := misplaced("", tick.actions)) is not None:
            found.fail(f"schedule.every.{number}.place", "X611", f"every.{number}", *wrong)


def _problem(event: EventName, actions: tuple[Action, ...], launch: Launch) -> tuple[str, str, str] | None:
    """Return (code, message, hint) for what is declared for an event that ends the run, if it is wrong."""
    if event not in ENDINGS:
        return None  # what does not come from outside has rules of its own
    if not occurs(event, launch):
        names, example = " or ".join(LIMITS[event]), next(iter(LIMITS[event].values()))
        message = f"on {event} can never occur: launch.{names} is not set"
        return "X610", message, f"add `launch {{ {example} }}`, or leave the trigger out"
    if all(action.only_nan for action in actions):
        return None  # they belong under `on nan`, which is said elsewhere
    if event != "finish" and not (only_informs(actions) or any(action.stops for action in actions)):
        return "X605", f"on {event} does not stop the run, which will be ended soon in any case", "add `then stop`"
    wrong = misplaced(event, actions)
    return None if wrong is None else ("X611", *wrong)


def only_informs(actions: tuple[Action, ...]) -> bool:
    """Whether nothing is declared for an event that takes the place of what happens by default."""
    return all(action.informs for action in actions)


def misplaced(event: str, actions: tuple[Action, ...]) -> tuple[str, str] | None:
    """(message, hint) of the first action that cannot stand there, if there is one. event: "" of a tick."""
    found = (action.misplaced(event, actions[place + 1 :]) for place, action in enumerate(actions))
    return next((wrong for wrong in found if wrong is not None), None)


def check_stops(launch: Launch, batch: Arithmetic, found: Findings) -> None:
    """Where the run is to stop must be known in steps, and should lie before its end; a file needs a name."""
    if launch.stop_file is not None and PurePath(launch.stop_file).name in ("", ".."):
        message = f'stop_file "{launch.stop_file}" names no file'
        found.fail("schedule.stop_file", "X304", "launch.stop_file", message, 'name one, such as `stop_file = "STOP"`')
    for name, amount in (("stop_at", launch.stop_at), ("stop_after", launch.stop_after)):
        if amount is None:
            continue
        rule, path = f"schedule.{name}", f"launch.{name}"
        steps = _limit_of(name, amount, batch)
        if steps is None:
            found.unknown(rule, f"{name} {amount}: the number of steps is known only when the data has been counted")
        elif batch.steps is not None and steps >= batch.steps:
            message = f"{name} {amount} is not before the end of the run, which has {batch.steps:,} steps"
            found.warn(rule, "W603", path, message, f"use fewer than {batch.steps:,} steps, or remove it")
        else:
            when = f"after step {steps:,}" if name == "stop_at" else f"each start after {plural(steps, 'step')}"
            found.passed(rule, f"the run stops {when}")


def _limit_of(name: str, amount: Quantity, batch: Arithmetic) -> int | None:
    """`stop_at`: the step; `stop_after`: a number of steps. None where that is known only once the data is counted."""
    if amount.unit == "epochs":
        epochs = float(amount.value)
        return batch.step_behind(epochs) if name == "stop_at" else batch.steps_in(epochs)
    tokens = batch.in_tokens(amount)
    if tokens is not None and (name == "stop_at" or amount.unit == "tokens"):
        return batch.sizes.steps_of(tokens)
    known = counted(amount, batch)
    return None if known is None else int(known.value)


def limit_args(launch: Launch, batch: Arithmetic) -> dict[str, Any]:
    """`stop_at` and `stop_after` as a timeline has them: in steps, or in what is not counted yet."""
    found: dict[str, Any] = {}
    for name, amount in (("stop_at", launch.stop_at), ("stop_after", launch.stop_after)):
        if amount is not None and (steps := _limit_of(name, amount, batch)) is not None:
            found[name] = steps
        elif amount is not None:
            found[f"{name}_amount"] = uncounted(amount)
    if launch.stop_at is not None:
        found["stop_at_tokens"] = batch.in_tokens(launch.stop_at)
    if launch.stop_after is not None and launch.stop_after.unit == "tokens":
        found["stop_after_tokens"] = batch.in_tokens(launch.stop_after)
    return found


@frozen
class Period:
    """How often something recurs: so many `steps`, `tokens` or `seconds`. Tokens of a part of an epoch need not be a
    whole number."""

    value: int | Fraction
    unit: Literal["steps", "tokens", "seconds"]


def counted(amount: Quantity, batch: Arithmetic) -> Period | None:
    """The period of an amount; None for epochs, or a share of a budget in them, of data that is not counted.

    An epoch has as many tokens as there are positions in its rows.
    """
    match amount.unit:
        case "steps" | "tokens":
            return Period(max(ceil(amount.value), 1), amount.unit)
        case "seconds":
            return Period(Fraction(amount.value), "seconds")
        case "%" if batch.steps is not None:
            return Period(share_of(amount.fraction, batch.steps), "steps")
        case "epochs" if batch.epoch_rows is not None:
            return Period(tokens_of(float(amount.value), batch.epoch_rows, batch.sequence), "tokens")
    return None


def share_of(fraction: float, steps: int) -> int:
    """A share of so many steps, rounded up; at least 1."""
    return max(ceil(exact(fraction) * steps), 1)


def tokens_of(epochs: float, epoch_rows: Fraction, sequence: int) -> int | Fraction:
    """The positions in the rows of so many epochs."""
    tokens = exact(epochs) * epoch_rows * sequence
    return int(tokens) if tokens.denominator == 1 else tokens


def uncounted(amount: Quantity) -> Uncounted:
    """The same as a plan has it until the data is counted."""
    if amount.unit == "%":
        return Uncounted(fraction=amount.fraction)
    assert amount.unit == "epochs"
    return Uncounted(epochs=float(amount.value))
