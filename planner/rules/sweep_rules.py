"""The rules of `sweep` that need no plan of a point."""

from math import prod
from typing import Final

from xtrain.dsl.schema.sweep import Sweep
from xtrain.dsl.spec import Spec
from xtrain.planner.findings import Findings

CODE = "X640"
MOST_TRIALS: Final = 10_000


def check_sweep(spec: Spec, sweep: Sweep, found: Findings) -> None:
    """What can be said before any point is compiled."""
    if spec.serve is not None:
        refuse(found, "sweep", "a server has no trials", "remove `sweep`, or `serve`")
        return
    if not sweep.over:
        hint = "add for instance `optimizer.lr in log(1e-4, 1e-2)`"
        refuse(found, "sweep", "no setting has several values", hint)
    for name, dimension in sweep.over.items():
        if name.split(".")[0] in ("workspace", "launch", "launcher", "sweep") and name != "launch.ranks_per_node":
            hint = "leave it to the sweep, which says where trials lie and how long they train"
            refuse(found, f"sweep.{name}", f"trials cannot differ in `{name}`", hint)
        elif sweep.method.everything and dimension.size is None:
            hint = f"add the number of points: `{name} in {str(dimension)[:-1]}, 5)`"
            refuse(found, f"sweep.{name}", "a grid needs to know how many values it tries", hint)
    sizes = [each.size or 1 for each in sweep.over.values()]
    trials, path = (prod(sizes), "sweep") if sweep.method.everything else (sweep.count, "sweep.trials")
    if trials > MOST_TRIALS:
        message = f"{trials:,} trials are too many: each is planned before the first begins"
        refuse(found, path, message, f"try at most {MOST_TRIALS:,}")
    if sweep.method.everything and sweep.trials is not None:
        path = "sweep.trials"
        found.warn(path, "W401", path, "a grid tries all its points", "remove it")
    for name in ("stop_at", "stop_after"):
        if getattr(spec.launch, name) is not None:
            hint = "remove it; `method asha` stops trials early"
            refuse(found, f"launch.{name}", f"trials are trained to their end, not to `{name}`", hint)
    for name in ("enabled", "resume"):
        if not getattr(spec.checkpoint, name):
            message = "a trial that is stopped goes on from its checkpoint, and there is none"
            refuse(found, f"checkpoint.{name}", message, f"remove `{name}`")
    _check_objective(spec, sweep, found)


def _check_objective(spec: Spec, sweep: Sweep, found: Findings) -> None:
    """Trials must measure it: where they are compared, while they train."""
    best, path = sweep.objective, "sweep.objective"
    measures = any(action.held_out() == best.dataset for tick in spec.ticks for action in tick.actions)
    at_end = [action for event in spec.events if event.event == "finish" for action in event.actions]
    ends = any(action.held_out() == best.dataset for action in at_end)
    if best.dataset not in spec.datasets:
        refuse(found, path, f"there is no dataset {best.dataset}", f"datasets: {', '.join(spec.datasets)}")
    elif not measures and (sweep.method.halving is not None or not ends):
        hint = f"add `every 500 steps eval {best.dataset}`"
        refuse(found, path, f"nothing measures {best} while a trial trains", hint)


def refuse(found: Findings, path: str, message: str, hint: str) -> None:
    """Report what is wrong at a path of the sweep."""
    found.fail(path, CODE, path, message, hint)
