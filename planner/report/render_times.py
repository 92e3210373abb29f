"""The part of the page about computing: operations, how long a step takes and why, how fast that is."""

from typing import Final

from xtrain.planner.costs.headroom import no_times
from xtrain.planner.plan import Plan, Times
from xtrain.planner.report.text import Detail, Page
from xtrain.planner.units import count_text, flops_text, rate_text, seconds_text

# With these each step has forwards beside its own: by a teacher, or of what a loss compares with.
OTHER_MODELS: Final = frozenset({"setup.teacher_model", "step.reference_point", "rollout.reference"})


def show_compute(page: Page, plan: Plan, detail: Detail) -> None:
    """From what has to be computed to how long it takes; a range where devices are known by their data sheet only."""
    estimates, sequence = plan.estimates, plan.node("setup.loader").args["sequence"]
    world = plan.mesh.world_size
    attention = estimates.work.pair * estimates.work.pairs(sequence) // sequence / estimates.flops_per_token
    slowest = max(estimates.classes, key=lambda each: each.hardware_flops)
    page.heading("COMPUTE")
    each_rank = f"{flops_text(estimates.flops_per_step / world)} a rank"
    if again := slowest.hardware_flops - slowest.optimizer_flops - slowest.flops:
        each_rank += f"; {again / slowest.flops:.0%} more is computed a second time"
        each_rank += ", or of other models" if any(node.op in OTHER_MODELS for node in plan.nodes) else ""
    if slowest.optimizer_flops:
        each_rank += f"; {slowest.optimizer_flops / slowest.flops:.1%} more by the optimizer"
    rows = [
        ("a token", flops_text(estimates.flops_per_token), f"{attention:.0%} of it attention"),
        ("a step", flops_text(estimates.flops_per_step), each_rank),
    ]
    if plan.cluster.flops:
        fp8 = estimates.work.position_fp8 * estimates.tokens_per_step
        bound = plan.cluster.at_usual_speed(estimates.flops_per_step, fp8) / (plan.cluster.flops * world)
        peak = rate_text(plan.cluster.flops, "FLOP/s")
        text = f"a step, if every device reached {peak} and never waited"
        if fp8 and plan.cluster.fp8_flops:
            share, faster = f"{fp8 / estimates.flops_per_step:.0%}", rate_text(plan.cluster.fp8_flops, "FLOP/s")
            text = f"a step at {peak}, the {share} in fp8 at {faster}, and no waiting"
        rows.append(("at best", seconds_text(bound), text))
    if estimates.times is None:
        rows.append(("a step takes", "unknown", no_times(plan)))
        if plan.mesh.size("pp") > 1:
            rows.append(("bubble", f"{estimates.bubble:.0%}", "of a step: pipeline bubble on the busiest rank"))
    else:
        rows += _times(plan, estimates.times)
    page.table(rows, align="<>", styles=("", "", "dim"))
    if detail.full:
        page.described([(name, text) for name, text in estimates.sources.items()])


def _times(plan: Plan, times: Times) -> list[tuple[str, str, str]]:
    low, high = plan.cluster.efficiency[0], plan.cluster.efficiency[-1]
    reached = f"{low:.0%}" if low == high else f"{low:.0%} to {high:.0%}"
    source = "as cluster.efficiency says" if low == high else "an assumption"
    parts = [f"computing {seconds_text(times.computing)}", f"exposed communication {seconds_text(times.exposed)}"]
    if plan.mesh.size("pp") > 1:
        parts.append(f"bubble {plan.estimates.bubble:.0%} of the step")
    world = plan.mesh.world_size
    rows = [("a step takes", seconds_text(times.step), " + ".join(parts))]
    if times.fast != times.slow:
        span = f"{seconds_text(times.fast)} to {seconds_text(times.slow)}"
        rows.append(("", "", f"{span}, devices at {reached} of their peak, {source}"))
    else:
        rows.append(("", "", f"devices at {reached} of their peak, {source}"))
    rows.append(
        (
            "tokens/s",
            count_text(times.tokens_per_second),
            f"{count_text(times.tokens_per_second / world)} a device; {_mfu(times)}",
        )
    )
    return rows


def _mfu(times: Times) -> str:
    low, high = times.mfu * times.step / times.slow, times.mfu * times.step / times.fast
    return f"MFU {times.mfu:.0%}" + (f", {low:.0%} to {high:.0%}" if times.fast != times.slow else "")
