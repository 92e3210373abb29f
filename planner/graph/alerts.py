"""What a run raises alerts about: the arguments of `setup.alerts`, and the rules for what then happens."""

from typing import Any, Final

from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.actions import EventName
from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.planner.findings import Findings
from xtrain.planner.mesh.cluster import device_kind
from xtrain.planner.plan import Estimates
from xtrain.planner.schedule.stops import actions_on, misplaced, only_informs
from xtrain.planner.units import bytes_text, seconds_text

# The events that are alerts; each has the setting of `alerts` of its name.
ALERTS: Final[tuple[EventName, ...]] = ("loss_spike", "slow", "starvation", "memory", "disk", "stalled")
# Steps whose median the loss and the time of a step are held against.
WINDOW: Final = 100
# A share of a file system asks for no more than room for so many checkpoints, or for so many bytes if that is more: 5 %
# of a petabyte are no news.
CHECKPOINTS: Final = 10
AMPLE_BYTES: Final = 100 * 2**30
# Seconds without progress after which ranks are named, unless they are given up before.
STALLED: Final = 60.0


def stalled_seconds(spec: Spec) -> float | None:
    """After how long without progress ranks are named; None: never."""
    chosen, stuck = spec.alerts.stalled, spec.fault_tolerance.stuck
    if isinstance(chosen, Auto):
        return STALLED if stuck is None else min(STALLED, float(stuck.value) / 2)
    return None if chosen is None else float(chosen.value)


def alert_reasons(spec: Spec) -> dict[str, tuple[Any, str]]:
    """What was derived, and why, by path."""
    if not isinstance(spec.alerts.stalled, Auto):
        return {}
    seconds = stalled_seconds(spec)
    assert seconds is not None
    why = "before `stuck` ends the run" if seconds == STALLED else "half of fault_tolerance.stuck"
    return {"alerts.stalled": (Quantity(seconds, "seconds"), why)}


def alert_args(spec: Spec, estimates: Estimates) -> dict[str, Any]:
    """Thresholds: shares from 0 to 1, bytes, seconds, steps; None for what nothing is raised about."""
    alerts = spec.alerts
    disk = alerts.disk
    by_share = disk is not None and disk.unit == "%"
    room = CHECKPOINTS * estimates.checkpoint_bytes if spec.checkpoint.enabled else 0
    return {
        "window": WINDOW,
        "loss_spike": alerts.loss_spike,
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
    """What is raised an alert about, in a line."""
    window = f"the median of {args['window']} steps"
    found = ["a loss or norm that is no number"]
    if args["loss_spike"] is not None:
        found.append(f"a loss {args['loss_spike']:g} deviations above {window}")
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
    return f"raise an alert about {', '.join(found)}"


def acts_together(spec: Spec) -> bool:
    """Whether ranks do anything together because of an alert, and so have to hear of it."""
    actions = (action for event in spec.events if event.event in ALERTS for action in event.actions)
    return not all(action.informs for action in actions)


def check_alerts(spec: Spec, found: Findings) -> None:
    """What is declared for an alert must be able to occur, and be something that ranks can still do together."""
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
