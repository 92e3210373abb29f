"""Timeline of a plan: how often ticks fire, reactions to events, alerts, and the order of actions within a step.

Within a step, records are written before a state is saved: a saved state can then be the best, and a run that dies
right after a save has lost no record of the steps in the checkpoint.
"""

from collections import Counter
from collections.abc import Iterable
from math import ceil
from typing import Any, Final

from attrs import asdict, evolve

from xtrain.contracts.actions import PlannedAction
from xtrain.dsl.evaluation.values import quantity_text
from xtrain.dsl.schema.actions import (
    FAILURE,
    LIMITS,
    SIGNALS,
    START,
    Action,
    EventName,
    Tick,
    by_default,
    saving,
    stopping,
)
from xtrain.dsl.schema.actions import Tick as TickSpec
from xtrain.dsl.schema.component import planned
from xtrain.dsl.schema.run import Launch
from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.plan.amounts import actions_on, counted, limit_args, misplaced, occurs, only_informs, uncounted
from xtrain.plan.arithmetic import Arithmetic
from xtrain.plan.canonical import DATA, text, whole_numbers
from xtrain.plan.estimates import Estimates
from xtrain.plan.findings import Findings, checks
from xtrain.plan.graph import ALERTS, ActionPlace, Builder
from xtrain.plan.mesh import device_kind
from xtrain.plan.parameters import weight_bytes
from xtrain.plan.plan import NodeKind, PlanPhase, PlanTick, Timeline, Trigger
from xtrain.plan.resolved import Resolved
from xtrain.plan.timeline import next_due, stretches, times_due, with_counts
from xtrain.text.units import bytes_text, plural, seconds_text


class ActionNodes:
    """Builder of action nodes: adds a node for the first use of an action, and returns its id for each further one."""

    def __init__(self, graph: Builder, resolved: Resolved, after: str) -> None:
        self._graph = graph
        self._run = resolved
        self._after = after
        self._known: dict[tuple[str, str], str] = {}  # name without number, and arguments → id
        self._numbers = Counter[str]()
        self._ids: set[str] = set()

    def add(self, action: Action, event: str = "", *, stops: bool = False) -> str:
        """Return the id of an action's node: `tick.eval.web`, or `event.finish.eval.web` for an event.

        stops: the run stops after it.
        """
        node = planned(action, PlannedAction).node(self._run, ActionPlace(event=event, stops=stops))
        name = node.name or node.op
        if event:
            name = f"event.{event}.{name.partition('.')[2]}"
        same = (name, text(whole_numbers(node.args), DATA))
        if same not in self._known:
            id = name
            while id in self._ids:
                self._numbers[name] += 1
                id = f"{name}.{self._numbers[name] + 1}"
            self._ids.add(id)
            self._known[same] = id
            kind: NodeKind = "event" if event else "tick"
            self._graph.add(kind, node.op, node.does, id=id, args=node.args, after=(self._after, *node.after))
        return self._known[same]

    def add_own(self, name: str, event: str, does: str) -> str:
        """Add a node that has no action in the language."""
        id = f"event.{event}.{name}"
        return self._graph.add("event", f"event.{name}", does, id=id, after=(self._after,))

    def add_model(self, event: str) -> str:
        """Add the node that saves only the weights."""
        run, ema = self._run, self._run.spec.ema
        averaged = ema is not None and ema.publish
        form = run.formats.averages if averaged else run.formats.params
        size = weight_bytes(run.inventory, form, run.formats.frozen, run.cuts.base)
        does = f"save only the {'averaged ' if averaged else ''}weights, for publishing: {bytes_text(size)}"
        return self._graph.add("event", "tick.model", does, id=f"event.{event}.model", after=(self._after,))


# Number of steps whose median a step's loss and time are compared with.
WINDOW: Final = 100
# A share of a file system warns only below space for this many checkpoints, or this many bytes if that is more: 5 % of
# a petabyte is plenty.
CHECKPOINTS: Final = 10
AMPLE_BYTES: Final = 100 * 2**30
# Seconds without progress after which ranks are named, unless the run gives them up earlier.
STALLED: Final = 60.0


def stalled_seconds(spec: Spec) -> float | None:
    """Return the seconds without progress after which ranks are named; None: never."""
    chosen, stuck = spec.alerts.stalled, spec.fault_tolerance.stuck
    if isinstance(chosen, Auto):
        return STALLED if stuck is None else min(STALLED, float(stuck.value) / 2)
    return None if chosen is None else float(chosen.value)


def alert_reasons(spec: Spec) -> dict[str, tuple[Any, str]]:
    """Return path → (derived value, reason)."""
    if not isinstance(spec.alerts.stalled, Auto):
        return {}
    seconds = stalled_seconds(spec)
    assert seconds is not None
    why = "before `stuck` ends the run" if seconds == STALLED else "half of fault_tolerance.stuck"
    return {"alerts.stalled": (Quantity(seconds, "seconds"), why)}


def alert_args(spec: Spec, estimates: Estimates) -> dict[str, Any]:
    """Return thresholds: shares from 0 to 1, bytes, seconds, steps; None: no alert."""
    alerts = spec.alerts
    disk = alerts.disk
    by_share = disk is not None and disk.unit == "%"
    room = CHECKPOINTS * estimates.checkpoint_bytes if spec.checkpoint.enabled else 0
    return {
        "window": WINDOW,
        "loss_spike": alerts.loss_spike,
        **({} if alerts.loss_above is None else {"loss_above": alerts.loss_above, "loss_steps": alerts.loss_patience}),
        "slow": alerts.slow,
        "starvation": None if alerts.starvation is None else alerts.starvation.fraction,
        "memory": None if alerts.memory is None or device_kind(spec) == "cpu" else alerts.memory.fraction,
        "disk_share": disk.fraction if disk is not None and by_share else None,
        "disk_most_bytes": max(room, AMPLE_BYTES) if by_share else None,
        "disk_bytes": int(disk.value) if disk is not None and disk.unit == "bytes" else None,
        "checkpoint_bytes": estimates.checkpoint_bytes if disk is not None and spec.checkpoint.enabled else None,
        "stalled_seconds": stalled_seconds(spec),
    }


def alert_text(spec: Spec, args: dict[str, Any]) -> str:
    """Return text on the conditions that raise alerts."""
    window = f"the median of {args['window']} steps"
    found = ["a loss or norm that is not finite"]
    if args["loss_spike"] is not None:
        found.append(f"a loss {args['loss_spike']:g} deviations above {window}")
    if "loss_above" in args:
        found.append(f"{plural(args['loss_steps'], 'step')} in a row with a loss above {args['loss_above']:g}")
    if args["slow"] is not None:
        found.append(f"5 steps that take {args['slow']:g} times {window}")
    if args["starvation"] is not None:
        found.append(f"{args['starvation']:.0%} of steps spent waiting for rows")
    if args["memory"] is not None:
        on_gpu = "" if device_kind(spec) == "cuda" else " on a GPU"
        found.append(f"{args['memory']:.0%} of the planned memory{on_gpu}")
    if args["disk_share"] is not None:
        most = bytes_text(args["disk_most_bytes"])
        found.append(f"less than {args['disk_share']:.0%} of the disk free, or {most} if that is less")
    if args["disk_bytes"] is not None:
        found.append(f"less than {bytes_text(args['disk_bytes'])} of the disk free")
    if args["checkpoint_bytes"] is not None:
        found.append(f"no room for a checkpoint of {bytes_text(args['checkpoint_bytes'])}")
    if args["stalled_seconds"] is not None:
        found.append(f"no progress for {seconds_text(args['stalled_seconds'])}")
    return f"alert on {', '.join(found)}"


def acts_together(spec: Spec) -> bool:
    """Return True if ranks act together on an alert, so that all of them must know of it."""
    actions = (action for event in spec.events if event.event in ALERTS for action in event.actions)
    return not all(action.informs for action in actions)


@checks("schedule.alert.*", reads="on.*.event on.*.actions alerts.* launch.device cluster.preset")
@checks("alerts.stalled", reads="alerts.stalled fault_tolerance.stuck")
def check_alerts(spec: Spec, found: Findings) -> None:
    """Check that an alert with actions can occur, and that ranks can still do these actions together."""
    declared = {name: actions_on(spec.events, name) for name in ALERTS}
    informing = {name for name, actions in declared.items() if only_informs(actions)}
    misplacements = {name: misplaced(name, actions) for name, actions in declared.items()}
    for number, event in enumerate(spec.events):
        name, path, rule = event.event, f"on.{number}", f"schedule.alert.{number}"
        if name not in ALERTS:
            continue
        if getattr(spec.alerts, name) is None:
            message = f"on {name} can never occur: alerts.{name} is none"
            found.fail(rule, "X610", path, message, "remove that setting, or remove the trigger")
        elif name == "memory" and device_kind(spec) == "cpu":
            message = "on memory can never occur: on a CPU there is no planned memory to compare with"
            found.fail(rule, "X610", path, message, "remove the trigger")
        elif name == "stalled" and name not in informing:
            message = "on stalled has other actions than notify, which need all ranks, and stalled ranks do not respond"
            hint = 'write `on stalled notify("…")`; fault_tolerance.stuck ends such a run'
            found.fail(rule, "X617", path, message, hint)
        elif (wrong := misplacements[name]) is not None:
            found.fail(rule, "X611", path, *wrong)
        else:
            found.passed(rule, f"{name} can occur, and all of its actions are possible")
    chosen, stuck = spec.alerts.stalled, spec.fault_tolerance.stuck
    if not isinstance(chosen, Quantity) or stuck is None:
        return
    if chosen.value < stuck.value:
        found.passed("alerts.stalled", f"raised {seconds_text(stuck.value - chosen.value)} before the run is ended")
        return
    message = f"stalled {chosen} is never raised: after {seconds_text(stuck.value)} without progress the run is ended"
    hint = "use less than fault_tolerance.stuck, or remove the setting"
    found.warn("alerts.stalled", "W607", "alerts.stalled", message, hint)


def in_order(ticks: Iterable[Tick]) -> list[Tick]:
    """Sort ticks: evaluations first, so that the log has their losses, then logs, then checkpoints; otherwise in the
    order of the spec.

    If several ticks save, the first save of a step counts, so the actions before a save become a tick of their own with
    the same period.
    """
    found = [evolve(tick, actions=_records_first(tick.actions)) for tick in ticks]
    if sum(map(_saves, found)) > 1:
        found = [part for tick in found for part in (_parts(tick) if _saves(tick) else (tick,))]
    return sorted(found, key=lambda tick: max(action.turn for action in tick.actions))


def _records_first(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """Move actions that record the state from after the first save to directly before it."""
    at = next((place for place, action in enumerate(actions) if action.saves), len(actions))
    behind = actions[at:]
    late = tuple(action for action in behind if action.records)
    return (*actions[:at], *late, *(action for action in behind if not action.records))


def _parts(tick: Tick) -> tuple[Tick, ...]:
    """Split a tick that saves into the actions before the save, if any, and the rest; the run stops after the rest."""
    at = next(place for place, action in enumerate(tick.actions) if action.saves)
    before = tuple(action for action in tick.actions[:at] if not action.stops)
    stops = tuple(action for action in tick.actions[:at] if action.stops)
    rest = (*tick.actions[at:], *stops)
    return (evolve(tick, actions=before), evolve(tick, actions=rest)) if before else (tick,)


def _saves(tick: Tick) -> bool:
    return any(action.saves for action in tick.actions)


@frozen(kw_only=True)
class Schedule:
    """Ticks and events, with defaults.

    paths: of each tick in the spec, empty for a default. reasons: path that a default would have → its value and
    reason. bad_steps: number of bad steps in a row → commands that are notified, in addition to the reaction to nan.
    """

    ticks: tuple[TickSpec, ...]
    paths: tuple[str, ...]
    events: dict[EventName, tuple[Action, ...]]
    reasons: dict[str, tuple[str, str]]
    bad_steps: dict[int | None, tuple[Action, ...]]


NOTHING_SCHEDULED: Final = Schedule(ticks=(), paths=(), events={}, reasons={}, bad_steps={})


def fill_schedule(spec: Spec, steps: int | None) -> Schedule:
    """Add the ticks that a spec leaves out: a run logs 100 times and saves 20 times; one of fewer than 2,000 steps
    saves every 100 steps, one of fewer than 400 every quarter of its steps, rounded up. steps: of the budget; None if
    unknown, where each tick is a share of the budget. A run of several epochs also saves after each.

    A run also saves at its end; a stop request saves, then stops.
    """
    ticks, paths = list(spec.ticks), [f"every.{i}.every" for i in range(len(spec.ticks))]
    reasons: dict[str, tuple[str, str]] = {}

    def default(kind: type[Action]) -> None:
        if any(isinstance(action, kind) for tick in spec.ticks for action in tick.actions):
            return
        parts = kind.default_ticks
        if steps is None:
            every, why = Quantity(100 // parts, "%"), f"the steps / {parts}, rounded up"
        else:
            share, quarter = ceil(steps / parts), ceil(steps / 4)
            apart = max(share, min(kind.default_apart, quarter), 1)
            why = f"{steps:,} steps / {parts if apart == share else 4}, rounded up"
            if apart not in (share, quarter):
                why = f"not more often than every {apart} steps"
            every = Quantity(apart, "steps")
        periods, budget = {every: why}, spec.experiment.budget
        if kind.saves and budget.unit == "epochs" and budget.value > 1:
            often = periods if budget.value < parts else {}
            periods = {Quantity(1, "epochs"): "the end of an epoch is a usual point to compare runs", **often}
        for every in periods:
            ticks.append(TickSpec(every=every, actions=(kind(),)))
            paths.append("")
        reasons[f"every.{kind.kind}"] = (" and ".join(map(quantity_text, periods)), "; ".join(periods.values()))

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
    events |= {name: actions for name in (*ALERTS, START, FAILURE) if (actions := actions_on(spec.events, name))}
    bad_steps = _commands_of_bad_steps(spec)
    if not spec.checkpoint.enabled:
        return _without_saving(ticks, paths, events, reasons, bad_steps)
    return Schedule(ticks=tuple(ticks), paths=tuple(paths), events=events, reasons=reasons, bad_steps=bad_steps)


def _commands_of_bad_steps(spec: Spec) -> dict[int | None, tuple[Action, ...]]:
    """Return number of bad steps in a row → commands under `on nan`; None: the number that triggers the reaction."""
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
    """Return the schedule without saves; a tick that only saved is removed."""

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


@checks("schedule.every.*.every", reads="every.{}.every {steps} {tokens}")
def check_ticks(schedule: Schedule, batch: Arithmetic, launch: Launch, found: Findings) -> None:
    """Check that every tick acts at least once."""
    for tick, path in zip(schedule.ticks, schedule.paths, strict=True):
        rule, known = f"schedule.{path or 'default'}", recurring(tick, batch)
        if known.seconds is not None:
            if path:
                found.passed(rule, f"every {tick.every} depends on the clock")
        elif batch.steps is None or not (known.steps or known.tokens):
            if path:
                found.unknown(rule, f"every {tick.every}: how often it happens is unknown until the data is counted")
        else:
            _check_fires(tick, known, batch, launch, rule, path, found)


def _check_fires(
    tick: TickSpec, known: PlanTick, batch: Arithmetic, launch: Launch, rule: str, path: str, found: Findings
) -> None:
    """Check that a tick in steps or tokens fires within the budget, and that a profile has steps left to record."""
    steps, each = batch.steps or 0, batch.sizes
    first, before = next_due(known, 0, each), _unrecorded(tick)
    if first > steps:
        message = f"every {tick.every} never happens: the run has {steps:,} steps, {batch.tokens:,} tokens"
        found.warn(rule, "W601", path, message, f"use {steps} steps or fewer, or `on finish`")
    elif before is not None and first + before >= steps:
        message = f"every {tick.every} {tick.actions[0].kind} records nothing: the run has {steps:,} steps, and the "
        message += f"first one that could be recorded is step {first + before + 1:,}"
        found.warn(rule, "W601", path, message, "start it earlier, or use less `wait` and `warmup`")
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
    """Return the timeline with ticks in the order in which they run within a step. batch: of a spec whose data is not
    counted.

    bad_steps: number in a row that triggers the reaction to nan. publishes: the run saves its weights alone at its end.
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
    """Return the commands that are notified of `count` bad steps in a row."""
    due = (each for n, commands in schedule.bad_steps.items() if (n or bad_steps) == count for each in commands)
    return tuple(nodes.add(each, "nan") for each in due)


def recurring(tick: TickSpec, batch: Arithmetic, nodes: tuple[str, ...] = ()) -> PlanTick:
    """Return a tick as in a plan, without its count: its period, or the amount that it is derived from."""
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
    """Return, for a tick that only profiles, the number of steps before the first recorded one."""
    before = [action.unrecorded(asdict(action, recurse=False)) for action in tick.actions]
    known = [steps for steps in before if steps is not None]
    return min(known) if known and len(known) == len(before) else None
