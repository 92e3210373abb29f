"""When things happen besides training: ticks with how often they fire, triggers to events, and their defaults."""

from math import ceil

from attrs import evolve, frozen

from ...dsl.quantity import Quantity
from ...dsl.schema.actions import (
    Action,
    CheckpointAction,
    EventName,
    LogAction,
    NotifyAction,
    ProfileAction,
    SkipAction,
    StopAction,
)
from ...dsl.schema.actions import Tick as TickSpec
from ...dsl.schema.experiment import Launch
from ...dsl.spec import Spec
from ..findings import Findings
from ..plan import PlanPhase, PlanTick, Timeline, Trigger
from ..schedule.arithmetic import Arithmetic
from ..schedule.counts import next_due, times_due, with_counts
from ..schedule.order import in_order
from ..schedule.stops import LIMITS, SIGNALS, actions_on, counted, limit_args, occurs, only_tells, uncounted
from .actions import ActionNodes
from .alerts import ALERTS


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
    bad_steps: dict[int | None, tuple[NotifyAction, ...]]


def fill_schedule(spec: Spec, steps: int | None) -> Schedule:
    """A run logs and saves, even if nobody says so: every hundredth and every twentieth of its steps, of `steps` where
    the budget says how many these are.

    A run also saves when it ends, and when it is to stop saves and stops.
    """
    ticks, paths = list(spec.ticks), [f"every.{i}.every" for i in range(len(spec.ticks))]
    reasons: dict[str, tuple[str, str]] = {}

    def default(name: str, action: Action, parts: int) -> None:
        if any(isinstance(a, type(action)) for tick in spec.ticks for a in tick.actions):
            return
        every = Quantity(100 // parts, "%") if steps is None else Quantity(max(ceil(steps / parts), 1), "steps")
        why = f"the steps / {parts}, rounded up" if steps is None else f"{steps:,} steps / {parts}, rounded up"
        ticks.append(TickSpec(every=every, actions=(action,)))
        paths.append("")
        reasons[f"every.{name}"] = (str(every), why)

    default("log", LogAction(), 100)
    default("checkpoint", CheckpointAction(), 20)
    names: tuple[EventName, ...] = ("finish", *SIGNALS, *(name for name in LIMITS if occurs(name, spec.launch)))
    events: dict[EventName, tuple[Action, ...]] = {name: actions_on(spec.events, name) for name in names}
    if not any(isinstance(action, CheckpointAction) for action in events["finish"]):
        events["finish"] = (CheckpointAction(), *events["finish"])
        reasons["on.finish"] = ("checkpoint", "a finished run can be used and extended")
    for name in names[1:]:
        if only_tells(events[name]):
            events[name] = (*events[name], CheckpointAction(), StopAction())
            reasons[f"on.{name}"] = ("checkpoint then stop", "a run that is stopped can be resumed")
    events["nan"] = tuple(a for a in actions_on(spec.events, "nan") if not isinstance(a, NotifyAction))
    if not events["nan"]:
        events["nan"] = (StopAction(),)
        reasons["on.nan"] = ("stop", "NaN or infinity must not reach the weights")
    events |= {name: actions for name in ALERTS if (actions := actions_on(spec.events, name))}
    told = _told_of_bad_steps(spec)
    if not spec.checkpoint.enabled:
        return _without_saving(ticks, paths, events, reasons, told)
    return Schedule(ticks=tuple(ticks), paths=tuple(paths), events=events, reasons=reasons, bad_steps=told)


def _told_of_bad_steps(spec: Spec) -> dict[int | None, tuple[NotifyAction, ...]]:
    """The commands under `on nan`, by the number of steps in a row; None: of as many as something is done about."""
    found: dict[int | None, tuple[NotifyAction, ...]] = {}
    for event in spec.events:
        if event.event == "nan":
            alone = only_tells(event.actions) and event.count is None
            count = 1 if alone else event.count
            commands = tuple(action for action in event.actions if isinstance(action, NotifyAction))
            found[count] = (*found.get(count, ()), *commands)
    return {count: commands for count, commands in found.items() if commands}


def _without_saving(
    ticks: list[TickSpec],
    paths: list[str],
    events: dict[EventName, tuple[Action, ...]],
    reasons: dict[str, tuple[str, str]],
    told: dict[int | None, tuple[NotifyAction, ...]],
) -> Schedule:
    """The same run with every save left out; a tick that did nothing else is gone."""

    def rest(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        return tuple(action for action in actions if not isinstance(action, CheckpointAction))

    left = [(evolve(t, actions=rest(t.actions)), path) for t, path in zip(ticks, paths, strict=True) if rest(t.actions)]
    why = "checkpoint.enabled is false"
    return Schedule(
        ticks=tuple(tick for tick, _ in left),
        paths=tuple(path for _, path in left),
        events={name: rest(actions) for name, actions in events.items()},
        reasons={path: (value.replace("checkpoint then ", ""), f"nothing is saved: {why}") if "checkpoint" in value
                 else (value, reason) for path, (value, reason) in reasons.items()
                 if path not in ("every.checkpoint", "on.finish")},
        bad_steps=told,
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
    steps, each = batch.steps or 0, batch.tokens_per_step
    first, before = next_due(known, 0, each), _unrecorded(tick)
    if first > steps:
        message = f"every {tick.every} never happens: the run has {steps:,} steps, {batch.tokens:,} tokens"
        found.warn(rule, "W601", path, message, f"use {steps} steps or fewer, or `on finish`")
    elif before is not None and first + before >= steps:
        message = f"every {tick.every} profile records nothing: the run has {steps:,} steps, and the first one that "
        message += f"could be recorded is step {first + before + 1:,}"
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
        stop = any(isinstance(action, StopAction) for action in tick.actions)
        ids = tuple(nodes.add(action, last=stop) for action in tick.actions if not isinstance(action, StopAction))
        ticks.append(recurring(tick, batch, ids))
    triggers = tuple(
        Trigger(
            event=name,
            nodes=(
                *(_told(schedule, nodes, bad_steps, bad_steps) if name == "nan" else ()),
                *(
                    nodes.add(action, name, last=StopAction() in actions)
                    for action in actions
                    if not isinstance(action, StopAction | SkipAction)
                ),
                *([nodes.add_model(name)] if name == "finish" and publishes else []),
            ),
            stop=any(isinstance(action, StopAction | SkipAction) for action in actions),
            count=bad_steps if name == "nan" else None,
        )
        for name, actions in schedule.events.items()
    )
    for count in sorted({count or bad_steps for count in schedule.bad_steps} - {bad_steps}):
        triggers += (Trigger(event="nan", nodes=_told(schedule, nodes, count, bad_steps), stop=False, count=count),)
    timeline = Timeline(
        steps=batch.steps,
        tokens=batch.tokens,
        epochs=batch.epochs,
        phases=phases,
        ticks=tuple(ticks),
        reactions=triggers,
        **limit_args(launch, batch),
    )
    return with_counts(timeline, [_unrecorded(tick) for tick in in_turn], batch.tokens_per_step)


def _told(schedule: Schedule, nodes: ActionNodes, count: int, bad_steps: int) -> tuple[str, ...]:
    """The commands that are told of so many bad steps in a row."""
    told = (each for n, commands in schedule.bad_steps.items() if (n or bad_steps) == count for each in commands)
    return tuple(nodes.add(each, "nan") for each in told)


def recurring(tick: TickSpec, batch: Arithmetic, nodes: tuple[str, ...] = ()) -> PlanTick:
    """A tick as a plan has it, without how often it fires: its period, or what that is to be worked out of."""
    stop = any(isinstance(action, StopAction) for action in tick.actions)
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
    profiles = [action for action in tick.actions if isinstance(action, ProfileAction)]
    if not profiles or len(tick.actions) > len(profiles):
        return None
    return min(action.wait + action.warmup for action in profiles)
