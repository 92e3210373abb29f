"""`ema { … }`: the nodes that keep an average of the weights, and who works with it."""

from typing import Any

from xtrain.dsl.spec import Spec
from xtrain.planner.findings import Findings
from xtrain.planner.graph.builder import Builder
from xtrain.planner.model.inventory import weight_bytes
from xtrain.planner.plan import Plan
from xtrain.planner.resolved import Resolved
from xtrain.planner.schedule.arithmetic import Arithmetic
from xtrain.planner.units import bytes_text, plural


def add_average(graph: Builder, run: Resolved, model: str) -> list[tuple[str, str]]:
    """The node that makes the averages, and what is taken from it; nothing where the spec keeps none."""
    ema = run.spec.ema
    if ema is None:
        return []
    args: dict[str, Any] = {
        "decay": ema.decay,
        "every": ema.every,
        "format": run.formats.averages,
        "eval": ema.eval,
        "publish": ema.publish,
    }
    size = bytes_text(weight_bytes(run.saved, run.formats.averages, run.formats.frozen, run.cuts.base))
    wider = "" if run.formats.averages == run.formats.params else f", as {run.formats.params} would round updates away"
    does = f"begin an average of the weights, cut over ranks as they are: {size} in {run.formats.averages}{wider}"
    if ema.publish:
        does += "; it is what is published"
    return [(graph.add("setup", "setup.ema", does, args=args, after=((model, "model"),)), "averages")]


def check_average(spec: Spec, batch: Arithmetic, found: Findings) -> None:
    """An average should take in something before the run ends."""
    if spec.ema is None or batch.steps is None:
        return
    every, steps = spec.ema.every, batch.steps
    if every > steps:
        message = (
            f"every {every:,} steps is never reached: the run has {steps:,} steps, and the average is never updated"
        )
        found.warn("ema.every", "W605", "ema.every", message, f"use {steps} or fewer")
    else:
        found.passed("ema.every", f"the average has {plural(steps // every, 'update')}")


def update_text(run: Resolved) -> str:
    """What `step.ema` does."""
    ema = run.spec.ema
    assert ema is not None
    often = "" if ema.every == 1 else f"after every {plural(ema.every, 'step')}, "
    return f"{often}move the averaged weights towards the new ones; {ema.decay:g} of the average stays"


def average_args(plan: Plan) -> dict[str, Any] | None:
    """The arguments of the average of a plan; None where it keeps none."""
    return next((node.args for node in plan.nodes if node.op == "setup.ema"), None)
