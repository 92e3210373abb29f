"""The rules of `sweep`."""

from collections.abc import Sequence

from ...dsl.dimension import Between
from ...dsl.schema.sweep import Halving, Sweep
from ...dsl.spec import Spec
from ..findings import Findings
from ..plan import Plan

CODE = "X640"


def check_sweep(spec: Spec, sweep: Sweep, found: Findings) -> None:
    """What can be said before any point is compiled."""
    if spec.serve is not None:
        _refuse(found, "sweep", "a server has no trials", "remove `sweep`, or `serve`")
        return
    if not sweep.over:
        hint = "add for instance `optimizer.lr in log(1e-4, 1e-2)`"
        _refuse(found, "sweep", "no setting has several values", hint)
    for name, dimension in sweep.over.items():
        if name.split(".")[0] in ("workspace", "launch", "launcher", "sweep") and name != "launch.ranks_per_node":
            hint = "leave it to the sweep, which says where trials lie and how long they train"
            _refuse(found, f"sweep.{name}", f"trials cannot differ in `{name}`", hint)
        elif sweep.method.everything and isinstance(dimension, Between) and dimension.grid() is None:
            hint = f"add the number of points: `{name} in {str(dimension)[:-1]}, 5)`"
            _refuse(found, f"sweep.{name}", "a grid needs to know how many values it tries", hint)
    if sweep.method.everything and sweep.trials is not None:
        path = "sweep.trials"
        found.warn(path, "W401", path, "a grid tries all its points", "remove it")
    for name in ("stop_at", "stop_after"):
        if getattr(spec.launch, name) is not None:
            hint = "remove it; `method asha` stops trials early"
            _refuse(found, f"launch.{name}", f"trials are trained to their end, not to `{name}`", hint)
    for name in ("enabled", "resume"):
        if not getattr(spec.checkpoint, name):
            message = "a trial that is stopped goes on from its checkpoint, and there is none"
            _refuse(found, f"checkpoint.{name}", message, f"remove `{name}`")
    _check_objective(spec, sweep, found)


def _check_objective(spec: Spec, sweep: Sweep, found: Findings) -> None:
    """Trials must measure it: where they are compared, while they train."""
    best, path = sweep.objective, "sweep.objective"
    measures = any(action.held_out() == best.dataset for tick in spec.ticks for action in tick.actions)
    at_end = [action for event in spec.events if event.event == "finish" for action in event.actions]
    ends = any(action.held_out() == best.dataset for action in at_end)
    if best.dataset not in spec.datasets:
        _refuse(found, path, f"there is no dataset {best.dataset}", f"datasets: {', '.join(spec.datasets)}")
    elif not measures and (sweep.method.halving is not None or not ends):
        hint = f"add `every 500 steps eval {best.dataset}`"
        _refuse(found, path, f"nothing measures {best} while a trial trains", hint)


def check_plans(sweep: Sweep, plans: Sequence[Plan], found: Findings) -> None:
    """What follows from the lengths of trials."""
    halving = sweep.method.halving
    problems = () if halving is None else (_of_rungs(plan, sweep, halving) for plan in plans)
    if problem := next((each for each in problems if each is not None), None):
        _refuse(found, "sweep.method.first", *problem)


def _refuse(found: Findings, path: str, message: str, hint: str) -> None:
    found.fail(path, CODE, path, message, hint)


def _of_rungs(plan: Plan, sweep: Sweep, halving: Halving) -> tuple[str, str] | None:
    """What is wrong with the first rung of a trial, and what to write instead."""
    time = plan.timeline
    if time.steps is None or time.tokens is None:
        return "trials are compared at a number of steps or tokens, and how many there are is not known yet", (
            "give the budget in steps or tokens, or prepare the data with `xtrain data build`"
        )
    first, unit = int(halving.first.value), halving.first.unit
    whole = time.steps if unit == "steps" else time.tokens
    if first >= whole:
        return f"the first rung, {first:,} {unit}, is not before the end, {whole:,} {unit}", (
            f"write for instance `first = {max(whole // halving.factor**2, 1)} {unit}`"
        )
    name = f"eval.{sweep.objective.dataset}"
    ticks = [tick for tick in time.ticks if any(node.removeprefix("tick.") == name for node in tick.nodes)]
    firsts = []
    for tick in ticks:
        if tick.steps is not None:
            firsts.append(tick.steps if unit == "steps" else tick.steps * time.tokens / time.steps)
        elif tick.tokens is not None:
            firsts.append(tick.tokens if unit == "tokens" else float(tick.tokens) * time.steps / time.tokens)
    if ticks and firsts and min(firsts) > first:
        return f"the first rung, {first:,} {unit}, comes before the first {name}, at {round(min(firsts)):,} {unit}", (
            f"evaluate more often, or write `first = {round(min(firsts))} {unit}`"
        )
    return None
