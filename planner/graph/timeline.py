"""When things happen besides training: ticks with how often they fire, triggers to events, and their defaults."""

from math import ceil
from typing import Final

from attrs import asdict, evolve, frozen

from xtrain.dsl.evaluation.values import quantity_text
from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.actions import LIMITS, SIGNALS, Action, EventName, by_default, saving, stopping
from xtrain.dsl.schema.actions import Tick as TickSpec
from xtrain.dsl.schema.experiment import Launch
from xtrain.dsl.spec import Spec
from xtrain.planner.findings import Findings
from xtrain.planner.graph.actions import ActionNodes
from xtrain.planner.graph.alerts import ALERTS
from xtrain.planner.plan import PlanPhase, PlanTick, Timeline, Trigger
from xtrain.planner.schedule.arithmetic import Arithmetic
from xtrain.planner.schedule.counts import next_due, times_due, with_counts
from xtrain.planner.schedule.horizon import stretches
from xtrain.planner.schedule.order import in_order
from xtrain.planner.schedule.stops import actions_on, counted, limit_args, occurs, only_informs, uncounted


@frozen(kw_only=True)
class Schedule:
    """Ticks and events with the defaults filled in.

    paths: of each tick in the spec, empty for a default. reasons: of each default, by the path it would have, what it
    is and why. bad_steps: of so many in a row the commands are told, beside what happens on nan.
    """

    ticks: tuple[TickSpec, ...]
    paths: tuple[str, ...]
    events: dict[EventName, tuple[Action, ...]]
    reasons: dict[str, tuple[str, str]]
    bad_steps: dict[int | None, tuple[Action, ...]]


NOTHING_SCHEDULED: Final = Schedule(ticks=(), paths=(), events={}, reasons={}, bad_steps={})


def fill_schedule(spec: Spec, steps: int | None) -> Schedule:
    """A run logs and saves, even if nobody says so: every hundredth and every twentieth of its steps, of `steps` where
    the budget says how many these are.

    A run also saves when it ends, and when it is to stop saves and stops.
    """
    ticks, paths = list(spec.ticks), [f"every.{i}.every" for i in range(len(spec.ticks))]
    reasons: dict[str, tuple[str, str]] = {}

    def default(kind: type[Action]) -> None:
        parts = kind.default_ticks
        if any(isinstance(action, kind) for tick in spec.ticks for action in tick.actions):
            return
        every = Quantity(100 // parts, "%") if steps is None else Quantity(max(ceil(steps / parts), 1), "steps")
        why = f"the steps / {parts}, rounded up" if steps is None else f"{steps:,} steps / {parts}, rounded up"
        ticks.append(TickSpec(every=every, actions=(kind(),)))
        paths.append("")
        reasons[f"every.{kind.kind}"] = (quantity_text(every), why)

    for kind in by_default():
        default(kind)
    save, stop = saving(), stopping()
    names: tuple[EventName, ...] = ("finish", *SIGNALS, *(name for name in LIMITS if occurs(name, spec.launch)))
    events: dict[EventName, tuple[Action, ...]] = {name: actions_on(spec.events, name) for name in names}
    if not any(action.saves for action in events["finish"]):
        events["finish"] = (save, *events["finish"])
        first = "before what else it does: " if len(events["finish"]) > 1 else ""
        reasons["on.finish"] = (save.kind, f"{first}a finished run can be used and extended")
    for name in names[1:]:
        if only_informs(events[name]):
            events[name] = (*events[name], save, stop)
            reasons[f"on.{name}"] = (f"{save.kind} then {stop.kind}", "a run that is stopped can be resumed")
    events["nan"] = tuple(a for a in actions_on(spec.events, "nan") if not a.informs)
    if not events["nan"]:
        events["nan"] = (stop,)
        reasons["on.nan"] = (stop.kind, "NaN or infinity must not reach the weights")
    events |= {name: actions for name in ALERTS if (actions := actions_on(spec.events, name))}
    bad_steps = _commands_of_bad_steps(spec)
    if not spec.checkpoint.enabled:
        return _without_saving(ticks, paths, events, reasons, bad_steps)
    return Schedule(ticks=tuple(ticks), paths=tuple(paths), events=events, reasons=reasons, bad_steps=bad_steps)


def _commands_of_bad_steps(spec: Spec) -> dict[int | None, tuple[Action, ...]]:
    """The commands under `on nan`, by the number of steps in a row; None: of as many as something is done about."""
    found: dict[int | None, tuple[Action, ...]] = {}
    for event in spec.events:
        if event.event == "nan":
            alone = only_informs(event.actions) and event.count is None
            count = 1 if alone else event.count
            commands = tuple(action for action in event.actions if action.informs)
            found[count] = (*found.get(count, ()), *commands)
    return {count: commands for count, commands in found.items() if commands}


def _without_saving(
    ticks: list[TickSpec],
    paths: list[str],
    events: dict[EventName, tuple[Action, ...]],
    reasons: dict[str, tuple[str, str]],
    bad_steps: dict[int | None, tuple[Action, ...]],
) -> Schedule:
    """The same run with every save left out; a tick that did nothing else is gone."""

    def rest(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        return tuple(action for action in actions if not action.saves)

    left = [(evolve(t, actions=rest(t.actions)), path) for t, path in zip(ticks, paths, strict=True) if rest(t.actions)]
    why, name = "checkpoint.enabled is false", saving().kind
    return Schedule(
        ticks=tuple(tick for tick, _ in left),
        paths=tuple(path for _, path in left),
        events={name: rest(actions) for name, actions in events.items()},
        reasons={path: (value.replace(f"{name} then ", ""), f"nothing is saved: {why}") if name in value
                 else (value, reason) for path, (value, reason) in reasons.items()
                 if path not in (f"every.{name}", "on.finish")},
        bad_steps=bad_steps,
    )  # fmt: skip


def check_ticks(schedule: Schedule, batch: Arithmetic, launch: Launch, found: Findings) -> None:
    """A tick should do something at least once."""
    for tick, path in zip(schedule.ticks, schedule.paths, strict=True):
        rule, known = f"schedule.{path or 'default'}", recurring(tick, batch)
        if known.seconds is not None:
            if path:
                found.passed(rule, f"every {tick.every} depends on the clock")
        elif batch.steps is None or not (known.steps or known.tokens):
            if path:
                found.unknown(
                    rule, f"every {tick.every}: how often it happens is known only when the data has been counted"
                )
        else:
            _check_fires(tick, known, batch, launch, rule, path, found)


def _check_fires(
    tick: TickSpec, known: PlanTick, batch: Arithmetic, launch: Launch, rule: str, path: str, found: Findings
) -> None:
    """A tick in steps or tokens should come before the budget is used up, a profile with steps left to record."""
    steps, each = batch.steps or 0, batch.sizes
    first, before = next_due(known, 0, each), _unrecorded(tick)
    if first > steps:
        message = f"every {tick.every} never happens: the run has {steps:,} steps, {batch.tokens:,} tokens"
        found.warn(rule, "W601", path, message, f"use {steps} steps or fewer, or `on finish`")
    elif before is not None and first + before >= steps:
        message = f"every {tick.every} {tick.actions[0].kind} records nothing: the run has {steps:,} steps, and the "
        message += f"first one that could be recorded is step {first + before + 1:,}"
        found.warn(rule, "W601", path, message, "let it begin earlier, or use less `wait` and `warmup`")
    elif path:
        count = times_due(known, min(steps, limit_args(launch, batch).get("stop_at", steps)), each)
        found.passed(rule, f"every {tick.every} fires {count:,} times")


def build_timeline(
    schedule: Schedule,
    batch: Arithmetic,
    phases: tuple[PlanPhase, ...],
    nodes: ActionNodes,
    launch: Launch,
    *,
    bad_steps: int,
    publishes: bool = False,
) -> Timeline:
    """Ticks in the order in which they run in a step that several are due in. `batch` is that of a spec whose data is
    not counted.

    bad_steps: so many in a row are what happens on nan. publishes: the run saves its weights alone when it has ended.
    """
    ticks, in_turn = [], list(in_order(schedule.ticks))
    for tick in in_turn:
        stop = any(action.stops for action in tick.actions)
        ids = tuple(nodes.add(action, stops=stop) for action in tick.actions if not action.stops)
        ticks.append(recurring(tick, batch, ids))
    ending = {name for name, actions in schedule.events.items() if any(action.stops for action in actions)}
    triggers = tuple(
        Trigger(
            event=name,
            nodes=(
                *(_commands(schedule, nodes, bad_steps, bad_steps) if name == "nan" else ()),
                *(
                    nodes.add(action, name, stops=name in ending)
                    for action in actions
                    if not (action.stops or action.skips)
                ),
                *([nodes.add_model(name)] if name == "finish" and publishes else []),
            ),
            stop=any(action.stops or action.skips for action in actions),
            count=bad_steps if name == "nan" else None,
        )
        for name, actions in schedule.events.items()
    )
    for count in sorted({count or bad_steps for count in schedule.bad_steps} - {bad_steps}):
        triggers += (Trigger(event="nan", nodes=_commands(schedule, nodes, count, bad_steps), stop=False, count=count),)
    timeline = Timeline(
        steps=batch.steps,
        tokens=batch.tokens,
        epochs=batch.epochs,
        phases=phases,
        ticks=tuple(ticks),
        triggers=triggers,
        stretches=stretches(batch),
        budget_tokens=batch.budget_tokens,
        **limit_args(launch, batch),
    )
    return with_counts(timeline, [_unrecorded(tick) for tick in in_turn], batch.sizes)


def _commands(schedule: Schedule, nodes: ActionNodes, count: int, bad_steps: int) -> tuple[str, ...]:
    """The commands that are told of so many bad steps in a row."""
    due = (each for n, commands in schedule.bad_steps.items() if (n or bad_steps) == count for each in commands)
    return tuple(nodes.add(each, "nan") for each in due)


def recurring(tick: TickSpec, batch: Arithmetic, nodes: tuple[str, ...] = ()) -> PlanTick:
    """A tick as a plan has it, without how often it fires: its period, or what that is to be worked out of."""
    stop = any(action.stops for action in tick.actions)
    every = counted(tick.every, batch)
    if every is None:
        amount = uncounted(tick.every)
        return PlanTick(nodes=nodes, stop=stop, epochs=amount.epochs, fraction=amount.fraction)
    return PlanTick(
        nodes=nodes,
        steps=int(every.value) if every.unit == "steps" else None,
        tokens=every.value if every.unit == "tokens" else None,
        seconds=float(every.value) if every.unit == "seconds" else None,
        stop=stop,
    )


def _unrecorded(tick: TickSpec) -> int | None:
    """Of a tick that does nothing but profile: the steps that pass before one is recorded."""
    before = [action.unrecorded(asdict(action, recurse=False)) for action in tick.actions]
    known = [steps for steps in before if steps is not None]
    return min(known) if known and len(known) == len(before) else None
