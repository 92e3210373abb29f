"""What a plan says of a setting: the value that was derived and why, and what a step costs with it."""

from collections.abc import Callable
from typing import Final

from xtrain.dsl.schema.actions import Tick
from xtrain.planner.costs.headroom import headroom
from xtrain.planner.plan import Plan, Provenance
from xtrain.planner.units import amount_in_epochs, bytes_text, count_text, flops_text, plural, seconds_text, times_text

Figure = Callable[[Plan], str]


def _tokens(plan: Plan) -> str:
    return f"{count_text(plan.estimates.tokens_per_step)} tokens a step"


def _memory(plan: Plan) -> str:
    return f"{bytes_text(headroom(plan).worst.memory.total_bytes)} a rank"


def _step(plan: Plan) -> str:
    times = plan.estimates.times
    return f"{seconds_text(times.step)} a step" if times is not None else ""


def _parameters(plan: Plan) -> str:
    return f"{count_text(plan.parameters.total)} parameters"


def _flops(plan: Plan) -> str:
    return f"{flops_text(plan.estimates.flops_per_token)} a token"


def _states(plan: Plan) -> str:
    return f"{bytes_text(headroom(plan).worst.memory.optimizer)} of optimizer state a rank"


def _ranks(plan: Plan) -> str:
    return plural(plan.mesh.world_size, "rank")


def _traffic(plan: Plan) -> str:
    sent = sum(each.bytes for each in headroom(plan).worst.traffic)
    return f"{bytes_text(sent)} sent a step and rank" if sent else ""


def _steps(plan: Plan) -> str:
    timeline = plan.timeline
    if timeline.steps is None:
        return amount_in_epochs(timeline.epochs) if timeline.epochs is not None else ""
    return plural(timeline.steps, "step") + (f", {count_text(timeline.tokens)} tokens" if timeline.tokens else "")


def _duration(plan: Plan) -> str:
    times, steps = plan.estimates.times, plan.timeline.full_steps
    return seconds_text(times.step * steps) if times is not None and steps is not None else ""


def _checkpoint(plan: Plan) -> str:
    return f"{bytes_text(plan.estimates.checkpoint_bytes)} a checkpoint"


# Block → figures that its settings change.
FIGURES: Final[dict[str, tuple[Figure, ...]]] = {
    "experiment": (_steps, _duration),
    "launch": (_ranks, _step),
    "cluster": (_memory, _step),
    "model": (_parameters, _flops, _memory, _step),
    "adapter": (_parameters, _memory, _step),
    "batch": (_tokens, _memory, _step),
    "optimizer": (_states, _memory),
    "loss": (_memory, _step),
    "ema": (_memory,),
    "precision": (_memory, _step),
    "parallel": (_ranks, _memory, _traffic, _step),
    "activation": (_memory, _flops, _step),
    "scheduler": (_steps,),
    "phase": (_steps,),
    "checkpoint": (_checkpoint,),
}


def cost(plan: Plan, block: str) -> str:
    """Return the plan's figures that this kind of block affects; empty for other blocks and for a server."""
    if plan.serves:
        return ""
    return " · ".join(text for figure in FIGURES.get(block, ()) if (text := figure(plan)))


def times(plan: Plan, tick: Tick) -> str:
    """Return how often a tick with a period in steps or tokens runs in the whole run; empty for other periods."""
    every, ops = tick.every, {node.id: node.op for node in plan.nodes}
    for each in plan.timeline.ticks:
        amount = each.steps if every.unit == "steps" else each.tokens if every.unit == "tokens" else None
        ran = {ops[node] for node in each.nodes}
        if amount == every.value and each.count is not None and any(f"tick.{a.kind}" in ran for a in tick.actions):
            return times_text(each.count)
    return ""


def provenance(plan: Plan) -> dict[str, Provenance]:
    """Return the provenance of every value of a plan by its path."""
    return {entry.path: entry for entry in plan.provenance}
