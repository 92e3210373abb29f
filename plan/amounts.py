"""Mixture weights as shares of rows or epochs, phases, and the limits that stop a run early, with their rules.

Amounts of a spec are counted in steps, tokens or seconds. Amounts that depend on data that is not counted yet stay
uncounted.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil
from pathlib import PurePath
from typing import Any, Literal

from attrs import evolve

from xtrain.dsl.schema.actions import ENDINGS, FAILURE, LIMITS, START, Action, EventName, OnEvent
from xtrain.dsl.schema.data import Dataset, Weight
from xtrain.dsl.schema.data import Phase as PhaseSpec
from xtrain.dsl.schema.run import Launch
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.plan.arithmetic import Arithmetic, exact
from xtrain.plan.canonical import plain_sum, portable
from xtrain.plan.findings import Findings, checks
from xtrain.plan.plan import PlanPhase, Uncounted
from xtrain.text.units import amount_in_epochs, plural

FIRST = "train"  # name of the stretch before the first declared phase


def trains(dataset: Dataset) -> bool:
    """Return True if part of the dataset is left to train on."""
    return dataset.holdout.fraction < 1


def trainable(spec: Spec) -> list[Dataset]:
    """Return the datasets that are not held out whole."""
    return [dataset for dataset in spec.datasets.values() if trains(dataset)]


def weights(spec: Spec, phase: PhaseSpec | None = None) -> dict[str, Weight]:
    """Return dataset → weight, 0 without one, of a phase or of the stretch before all phases.

    Without a mixture, the only trainable dataset has all the weight.
    """
    given = spec.mixture.weights
    if not given:
        sole = trainable(spec)
        given = {sole[0].name: 1.0} if len(sole) == 1 else {}
    given = {**given, **(phase.mix if phase is not None else {})}
    return {name: given.get(name, 0.0) for name in spec.datasets}


def amount(weight: Weight) -> float:
    """Return the number of a weight, whatever it counts."""
    return float(weight.value) if isinstance(weight, Quantity) else weight


def weight_text(weight: Weight) -> str:
    """Return a weight as text: `0.8`, `3 epochs`."""
    return amount_in_epochs(weight.value) if isinstance(weight, Quantity) else f"{weight:g}"


def in_epochs(weights: Mapping[str, Weight]) -> bool:
    """Return True if weights are epochs; a weight of 0 has no unit."""
    return any(isinstance(weight, Quantity) and weight.value for weight in weights.values())


def amounts(spec: Spec, phase: PhaseSpec | None = None) -> dict[str, float]:
    """Return dataset → epochs or share of the rows, of a phase or of the stretch before all phases."""
    given = weights(spec, phase)
    numbers = {name: amount(weight) for name, weight in given.items()}
    return numbers if in_epochs(given) else shares(numbers, spec.mixture.temperature)


def shares(weights: Mapping[str, float], temperature: float) -> dict[str, float]:
    """Return p ∝ w^(1 / temperature), where 0 stays 0; all 0 if every weight is 0."""
    largest = max(weights.values(), default=0.0)
    if largest <= 0:
        return dict.fromkeys(weights, 0.0)
    # Dividing by the largest weight first keeps the powers from overflowing.
    powers = {name: (w / largest) ** (1 / temperature) if w > 0 else 0.0 for name, w in weights.items()}
    total = plain_sum(powers.values())
    return {name: power / total for name, power in powers.items()}


def build_phases(spec: Spec, batch: Arithmetic) -> tuple[PlanPhase, ...]:
    """Return the phases of a run in order, with shares of the datasets that any phase trains on."""
    declared = [_phase(spec, phase, start_of(phase.from_, batch)) for phase in spec.phases.values()]
    found = sorted(declared, key=lambda phase: (phase.first or 0, phase.fraction or 0.0, phase.epochs or 0.0))
    if not found or found[0].first or found[0].fraction or found[0].epochs:
        found.insert(0, _phase(spec, None, 0))
    names = trained_on(found)
    return tuple(
        evolve(
            phase,
            shares=_only(phase.shares, names),
            exact_rows=batch.rows if spec.mixture.exact and len(names) > 1 else None,
            passes=None if phase.passes is None else _only(phase.passes, names),
        )
        for phase in found
    )


def _only(found: dict[str, float], names: Sequence[str]) -> dict[str, float]:
    return {name: found[name] for name in names if name in found}


def _phase(spec: Spec, phase: PhaseSpec | None, first: int | None) -> PlanPhase:
    in_tokens = spec.experiment.budget.unit == "tokens"
    start = phase.from_ if phase is not None else None
    waits = first is None
    in_passes, found = in_epochs(weights(spec, phase)), amounts(spec, phase)
    return PlanPhase(
        name=phase.name if phase is not None else _free_name(spec),
        first=first,
        fraction=start.fraction if start is not None and start.unit == "%" and (waits or in_tokens) else None,
        shares={} if in_passes else found,
        lr_scale=phase.lr_scale if phase is not None else 1.0,
        passes=found if in_passes else None,
        epochs=float(start.value) if start is not None and start.unit == "epochs" and waits else None,
        mtp_weight=phase.mtp_weight if phase is not None else None,
        router=phase.router if phase is not None else {},
        tokens=ceil(start.value) if start is not None and start.unit == "tokens" else None,
    )


def _free_name(spec: Spec) -> str:
    """Return `train`, or a name that no phase of the spec has: rows are sampled by phase names."""
    name = FIRST
    while name in spec.phases:
        name = f"{name}_0"
    return name


def start_of(start: Quantity, batch: Arithmetic) -> int | None:
    """Return the index of a phase's first step: in tokens and epochs, the first step before which so many are trained
    on.

    None while it depends on data that is not counted.
    """
    match start.unit:
        case "steps":
            return ceil(start.value)
        case "tokens":
            return batch.sizes.steps_of(ceil(start.value))
        case "epochs":
            return batch.step_behind(float(start.value))
    return batch.nearest_step(start.fraction)


def trained_on(phases: Sequence[PlanPhase]) -> tuple[str, ...]:
    """Return the datasets that any phase takes rows of, in the order of the spec."""
    return tuple(name for name in phases[0].amounts if any(phase.amounts[name] > 0 for phase in phases))


def occurs(event: EventName, launch: Launch) -> bool:
    """Return True if anything can cause the event."""
    return event not in LIMITS or any(getattr(launch, setting) is not None for setting in LIMITS[event])


def agree_args(spec: Spec) -> dict[str, Any]:
    """Return what only the first rank watches, as arguments of `step.agree`: the time limit and the stop file."""
    launch, args = spec.launch, {}
    if launch.time_limit is not None:
        args["time_limit_seconds"] = launch.time_limit.value
    if launch.stop_file is not None:
        args["stop_file"] = portable(launch.stop_file)
    return args


def actions_on(events: tuple[OnEvent, ...], name: EventName) -> tuple[Action, ...]:
    """Return all actions declared for an event, in order of declaration."""
    return tuple(action for event in events if event.event == name for action in event.actions)


@checks("schedule.on.*", reads="on on.*.event on.*.actions {stops}")
@checks("schedule.every.*.place", reads="every.{}.actions")
def check_events(spec: Spec, found: Findings) -> None:
    """Check the actions of events. An event that stops a run ends it: whoever sent it, a scheduler or a person, ends
    the ranks if they do not end themselves."""
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
    """Return (code, message, hint) if the actions of an event that starts or ends the run are invalid."""
    if event in (START, FAILURE):
        return _problem_at_edge(event, actions)
    if event not in ENDINGS:
        return None  # events that do not come from outside have rules of their own
    if not occurs(event, launch):
        names, example = " or ".join(LIMITS[event]), next(iter(LIMITS[event].values()))
        message = f"on {event} can never occur: launch.{names} is not set"
        return "X610", message, f"add `launch {{ {example} }}`, or remove the trigger"
    if all(action.only_nan for action in actions):
        return None  # they belong under `on nan`; another rule reports that
    if event != "finish" and not (only_informs(actions) or any(action.stops for action in actions)):
        return "X605", f"on {event} does not stop the run, which will be ended soon in any case", "add `then stop`"
    wrong = misplaced(event, actions)
    return None if wrong is None else ("X611", *wrong)


def _problem_at_edge(event: EventName, actions: tuple[Action, ...]) -> tuple[str, str, str] | None:
    """Return (code, message, hint) if an action is invalid before the first step, or on ranks that fail."""
    for action in actions:
        if action.only_nan or action.stops:
            when = "before the first step" if event == START else "of a run that fails"
            message = f"on {event} {action.kind}: there is nothing to {action.kind} {when}"
            return "X611", message, f"remove `{action.kind}`"
        if event == START and action.saves:
            message = f"on start {action.kind}: nothing has been trained since the state that the run starts from"
            return "X611", message, f"remove `{action.kind}`"
        if event == FAILURE and not action.alone:
            message = f"{action.kind} needs all ranks, and of a run that fails some may be gone"
            hint = "use `dump`, `notify` or an action of your own; checkpoints are saved by `every … checkpoint`"
            return "X611", message, hint
    wrong = misplaced(event, actions)
    return None if wrong is None else ("X611", *wrong)


def only_informs(actions: tuple[Action, ...]) -> bool:
    """Return True if no declared action replaces the default reaction to an event."""
    return all(action.informs for action in actions)


def misplaced(event: str, actions: tuple[Action, ...]) -> tuple[str, str] | None:
    """Return (message, hint) for the first action that is invalid in its place; None if all are valid. event: "" for a
    tick."""
    found = (action.misplaced(event, actions[place + 1 :]) for place, action in enumerate(actions))
    return next((wrong for wrong in found if wrong is not None), None)


@checks("schedule.stop_file", reads="launch.stop_file")
@checks("schedule.stop_at", reads="launch.stop_at {steps} {tokens}")
@checks("schedule.stop_after", reads="launch.stop_after {steps} {tokens}")
def check_stops(launch: Launch, batch: Arithmetic, found: Findings) -> None:
    """Check that the stops of a run are known in steps and lie before its end, and that the stop file has a name."""
    if launch.stop_file is not None and PurePath(launch.stop_file).name in ("", ".."):
        message = f'stop_file "{launch.stop_file}" names no file'
        found.fail("schedule.stop_file", "X304", "launch.stop_file", message, 'name one, such as `stop_file = "STOP"`')
    for name, amount in (("stop_at", launch.stop_at), ("stop_after", launch.stop_after)):
        if amount is None:
            continue
        rule, path = f"schedule.{name}", f"launch.{name}"
        steps = _limit_of(name, amount, batch)
        if steps is None:
            found.unknown(rule, f"{name} {amount}: the number of steps is unknown until the data is counted")
        elif batch.steps is not None and steps >= batch.steps:
            message = f"{name} {amount} is not before the end of the run, which has {batch.steps:,} steps"
            found.warn(rule, "W603", path, message, f"use fewer than {batch.steps:,} steps, or remove it")
        else:
            when = f"after step {steps:,}" if name == "stop_at" else f"each start after {plural(steps, 'step')}"
            found.passed(rule, f"the run stops {when}")


def _limit_of(name: str, amount: Quantity, batch: Arithmetic) -> int | None:
    """Return the step for `stop_at` and the number of steps for `stop_after`. None while it depends on data that is not
    counted."""
    in_shares = amount.unit == "%"
    if amount.unit == "epochs" or (in_shares and batch.epochs is not None):
        epochs = exact(amount.fraction) * exact(batch.epochs or 0) if in_shares else exact(float(amount.value))
        return batch.step_behind(epochs) if name == "stop_at" else batch.steps_in(epochs)
    tokens = batch.in_tokens(amount)
    if tokens is not None and (name == "stop_at" or amount.unit == "tokens"):
        return batch.sizes.steps_of(tokens)
    if in_shares:
        return None if batch.steps is None else share_of(amount.fraction, batch.steps)
    return max(ceil(amount.value), 1)


def limit_args(launch: Launch, batch: Arithmetic) -> dict[str, Any]:
    """Return `stop_at` and `stop_after` in the form of a timeline: in steps, or as an uncounted amount."""
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
    """Interval of a tick in `steps`, `tokens` or `seconds`. Tokens of a part of an epoch may be fractional."""

    value: int | Fraction
    unit: Literal["steps", "tokens", "seconds"]


def counted(amount: Quantity, batch: Arithmetic) -> Period | None:
    """Return the period of an amount; None for epochs, or a share of a budget in epochs, of data that is not counted.

    An epoch has as many tokens as there are positions in its rows.
    """
    match amount.unit:
        case "steps" | "tokens":
            return Period(max(ceil(amount.value), 1), amount.unit)
        case "seconds":
            return Period(Fraction(amount.value), "seconds")
        case "%" if (tokens := batch.in_tokens(amount)) is not None:
            return Period(max(tokens, 1), "tokens")
        case "%" if batch.epochs is None and batch.steps is not None:
            return Period(share_of(amount.fraction, batch.steps), "steps")
        case "%" if batch.epochs is not None and batch.epoch_rows is not None:
            epochs = exact(amount.fraction) * exact(batch.epochs)
            return Period(tokens_of(epochs, batch.epoch_rows, batch.sequence), "tokens")
        case "epochs" if batch.epoch_rows is not None:
            return Period(tokens_of(float(amount.value), batch.epoch_rows, batch.sequence), "tokens")
    return None


def share_of(fraction: float, steps: int) -> int:
    """Return a share of `steps`, rounded up; at least 1."""
    return max(ceil(exact(fraction) * steps), 1)


def tokens_of(epochs: float | Fraction, epoch_rows: Fraction, sequence: int) -> int | Fraction:
    """Return the positions in the rows of `epochs` epochs."""
    tokens = exact(epochs) * epoch_rows * sequence
    return int(tokens) if tokens.denominator == 1 else tokens


def uncounted(amount: Quantity) -> Uncounted:
    """Return an amount in the form that a plan stores until the data is counted."""
    if amount.unit == "%":
        return Uncounted(fraction=amount.fraction)
    assert amount.unit == "epochs"
    return Uncounted(epochs=float(amount.value))
