"""Rules on `sweep`: its dimensions, its objective, and the plans of its points."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Final

from attrs import evolve

from xtrain.dsl.checking.overrides import PATH
from xtrain.dsl.diagnostics.diagnostic import Diagnostic, Diagnostics
from xtrain.dsl.load import Loaded, load_spec
from xtrain.dsl.schema.sweep import Halving, Sweep
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import Dimension
from xtrain.plan.findings import Findings, origin_of
from xtrain.plan.plan import Plan

_MOST = 8  # values of a dimension that are checked; a point with another value has no plan and reports why


def check_dimensions(loaded: Loaded, sets: Sequence[str] = ()) -> Diagnostics:
    """Load the spec with the values at the ends of all dimensions, and report the errors that each of them causes.

    sets: the `--set` texts that the spec was loaded with.
    """
    found = Diagnostics()
    spec = loaded.spec
    if spec is None or spec.sweep is None:
        return found
    over: dict[str, Dimension] = spec.sweep.over
    ends = {name: dimension.ends() for name, dimension in over.items()}
    texts = {source.path: source.text for source in loaded.sources}
    seen: set[tuple[str, str, str]] = set()
    for place in range(min(max(map(len, ends.values()), default=0), _MOST)):
        point = [f"{name}={values[min(place, len(values) - 1)]}" for name, values in ends.items()]
        for each in load_spec(loaded.sources[0].path, (*sets, *point), texts).diagnostics.errors:
            name = dimension_of(each, over)
            if name is None or (name, each.code, each.message) in seen:
                continue
            seen.add((name, each.code, each.message))
            origin = origin_of(spec, f"sweep.{name}")
            found.add(evolve(each, span=origin.span if origin else None, fix=None))
    return found


def dimension_of(diagnostic: Diagnostic, over: Iterable[str]) -> str | None:
    """Return the dimension whose `--set` text a diagnostic is about."""
    place = diagnostic.span
    if place is None or not place.text or place.source.path != PATH:
        return None
    text = place.source.text
    line = text[text.rfind("\n", 0, place.start) + 1 :].partition("\n")[0]
    return next((name for name in over if line.startswith(f"{name}=")), None)


CODE = "X640"
MOST_TRIALS: Final = 10_000


def check_sweep(spec: Spec, sweep: Sweep, found: Findings) -> None:
    """Check everything that can be checked before any point is compiled."""
    if spec.serve is not None:
        refuse(found, "sweep", "a server has no trials", "remove `sweep`, or `serve`")
        return
    if not sweep.over:
        hint = "add, for example, `optimizer.lr in log(1e-4, 1e-2)`"
        refuse(found, "sweep", "no setting has several values", hint)
    for name, dimension in sweep.over.items():
        if name.split(".")[0] in ("workspace", "launch", "launcher", "sweep") and name != "launch.ranks_per_node":
            hint = "remove it: the sweep sets the folders and lengths of trials"
            refuse(found, f"sweep.{name}", f"trials cannot differ in `{name}`", hint)
        elif sweep.method.everything and dimension.size is None:
            hint = f"add the number of points: `{name} in {str(dimension)[:-1]}, 5)`"
            refuse(found, f"sweep.{name}", "a grid needs the number of values", hint)
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
            message = "a stopped trial resumes from its checkpoint, and none is saved"
            refuse(found, f"checkpoint.{name}", message, f"remove `{name}`")
    _check_objective(spec, sweep, found)


def _check_objective(spec: Spec, sweep: Sweep, found: Findings) -> None:
    """Check that trials measure the objective: at the points of comparison, during training."""
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
    """Report an error at a path of the sweep."""
    found.fail(path, CODE, path, message, hint)


def check_plans(sweep: Sweep, plans: Sequence[Plan], found: Findings) -> None:
    """Check everything that follows from the lengths of trials."""
    halving = sweep.method.halving
    problems = () if halving is None else (_of_rungs(plan, sweep, halving) for plan in plans)
    if problem := next((each for each in problems if each is not None), None):
        refuse(found, "sweep.method.first", *problem)


def _of_rungs(plan: Plan, sweep: Sweep, halving: Halving) -> tuple[str, str] | None:
    """Return (message, hint) if the first rung of a trial is invalid."""
    time = plan.timeline
    if time.steps is None or time.tokens is None:
        return "trials are compared at a number of steps or tokens, and the total is unknown so far", (
            "give the budget in steps or tokens, or prepare the data with `xtrain data build`"
        )
    first, unit = int(halving.first.value), halving.first.unit
    whole = time.steps if unit == "steps" else time.tokens
    if first >= whole:
        return f"the first rung, {first:,} {unit}, is not before the end, {whole:,} {unit}", (
            f"write, for example, `first = {max(whole // halving.factor**2, 1)} {unit}`"
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
