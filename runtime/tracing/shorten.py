"""Microbatches that are like others need not run."""

from attrs import evolve

from ...planner.plan import Plan

# The first, two that are alike, and the last, in which gradients are exchanged.
ENOUGH = 4


def shortened(plan: Plan) -> tuple[Plan, int]:
    """The plan with at most ENOUGH microbatches in a step, and how many of those between were left out.

    Without a pipeline one follows the other, and between the first and the last each finds what the one before it
    found. A pipeline runs all of them.
    """
    count = plan.node("setup.loader").args["accumulate"]
    if plan.mesh.size("pp") > 1 or count <= ENOUGH:
        return plan, 0
    nodes = [evolve(n, args={**n.args, "accumulate": ENOUGH}) if "accumulate" in n.args else n for n in plan.nodes]
    return evolve(plan, nodes=tuple(nodes)), count - ENOUGH
