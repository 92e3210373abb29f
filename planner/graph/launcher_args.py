"""`launcher` of a spec as JSON in its plan, and back."""

from typing import Any

from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.launchers import LAUNCHERS, Launcher
from xtrain.dsl.schema.setting import AUTO, Auto, settings_of
from xtrain.planner.graph.replica_groups import groups_node
from xtrain.planner.plan import Plan


def launcher_args(launcher: Launcher) -> dict[str, Any]:
    """Every setting by name; quantities as number and unit, `auto` as that word."""
    values = ((name, getattr(launcher, name)) for name in settings_of(type(launcher)))
    return {"kind": launcher.kind, **{name: _plain(value) for name, value in values}}


def _plain(value: Any) -> Any:
    if isinstance(value, Auto):
        return "auto"
    if isinstance(value, Quantity):
        return [value.value, value.unit]
    return list(value) if isinstance(value, tuple) else value


class UnknownLauncher(Exception):
    """A launcher that is not here, as that of a package, or that has other settings here: another xtrain has written
    it. The message is a clause about its settings."""


def launcher_of(plan: Plan) -> Launcher | None:
    """That of the spec; None where it has none. Raises UnknownLauncher."""
    args = plan.launch.get("launcher")
    return None if args is None else launcher_from(args)


def restarts_of(plan: Plan) -> tuple[str, int]:
    """What says how often all ranks are started again after a failure, and how often that is; empty: nothing does.

    A single machine is started again by xtrain itself, and so are replica groups; several machines by their launcher.
    """
    try:
        launcher = launcher_of(plan)
    except UnknownLauncher:
        launcher = None
    if plan.launch["nodes"] == 1 or groups_node(plan) is not None or (launcher is not None and launcher.obeys_restarts):
        return "fault_tolerance.restarts", plan.launch["restarts"]
    return (launcher.own_restarts() if launcher is not None else None) or ("", 0)


def obeying_launchers() -> str:
    """Those that start several machines again as often as `fault_tolerance.restarts` says."""
    return " or ".join(name for name, each in LAUNCHERS.items() if each.obeys_restarts)


def launcher_from(args: dict[str, Any]) -> Launcher:
    """From what `launcher_args` has made. Raises UnknownLauncher."""
    try:
        kind = LAUNCHERS[args["kind"]]
        settings = settings_of(kind)
        values = {name: _typed(value, settings[name][1].units) for name, value in args.items() if name != "kind"}
        return kind(**values)
    except (LookupError, TypeError, ValueError) as error:
        raise UnknownLauncher(f"settings that no launcher {args.get('kind')} has here") from error


def _typed(value: Any, units: tuple[str, ...]) -> Any:
    if value == "auto":
        return AUTO
    if isinstance(value, list):
        return Quantity(*value) if units else tuple(value)
    return value
