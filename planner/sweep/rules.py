"""The rules of `sweep` about the plans of its points."""

from collections.abc import Sequence

from xtrain.dsl.schema.sweep import Halving, Sweep
from xtrain.planner.findings import Findings
from xtrain.planner.plan import Plan
from xtrain.planner.rules.sweep_rules import refuse


def check_plans(sweep: Sweep, plans: Sequence[Plan], found: Findings) -> None:
    """What follows from the lengths of trials."""
    halving = sweep.method.halving
    problems = () if halving is None else (_of_rungs(plan, sweep, halving) for plan in plans)
    if problem := next((each for each in problems if each is not None), None):
        refuse(found, "sweep.method.first", *problem)


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
