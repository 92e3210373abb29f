"""Smaller worlds that a run may continue in: fewer ranks after devices were lost or a machine failed repeatedly."""

import subprocess
import sys

from attrs import evolve

from xtrain.plan.plan import ElasticWorld, Plan
from xtrain.planner.load import plan_from_text
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.text.units import plural

_COUNT = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else -1)"


def fewer_ranks(plan: Plan, *, again: bool) -> Plan | None:
    """Return the plan of a smaller world if one is needed and allowed; None to stay.

    again: the same rank has failed twice without progress. Raises EnvironmentFault if too few devices are left for
    every world of the plan, or if a recorded plan can no longer be reproduced.
    """
    if not plan.elastic:
        return None
    most, now = _devices(plan), plan.mesh.world_size
    if most is not None and most < now:
        smaller = largest_world(plan, most)
        if smaller is None:
            message = (
                f"this run needs {plural(now, 'CUDA device')}; {most or 'none'} {'is' if most == 1 else 'are'} left, "
                "and this plan has no world size that small"
            )
            raise EnvironmentFault("X702", message)
        return plan_of_world(plan, smaller)
    smaller = largest_world(plan, now - 1) if again else None
    return plan_of_world(plan, smaller) if smaller is not None else None


def plan_of_started(plan: Plan, started: int) -> Plan:
    """Return the plan for the ranks that another launcher has started: this one, or that of an allowed world."""
    allowed = next((other for other in plan.elastic if other.world == started), None)
    if allowed is None or started == plan.mesh.world_size:
        return plan
    return plan_of_world(plan, allowed)


def largest_world(plan: Plan, most: int) -> ElasticWorld | None:
    """Return the largest world of a plan with at most so many ranks."""
    return max((other for other in plan.elastic if other.world <= most), key=lambda other: other.world, default=None)


def plan_of_world(plan: Plan, elastic_world: ElasticWorld) -> Plan:
    """Compile the plan of another world from the text in this plan.

    Raises EnvironmentFault if it differs from the plan recorded in this one.
    """
    compiled = plan_from_text(plan.spec_text, f"{plan.spec} (as planned)", world=elastic_world.world)
    if compiled.plan is None or compiled.plan.id != elastic_world.id:
        came = (
            "the spec has no plan for this number of ranks now"
            if compiled.plan is None
            else f"its id is {compiled.plan.id} now"
        )
        recorded = f"the plan for {elastic_world.world} ranks was recorded as {elastic_world.id}"
        message = f"{recorded}, and {came}: its spec or xtrain has changed"
        raise EnvironmentFault("X711", message)
    return evolve(compiled.plan, spec=plan.spec, origin=plan.origin)


def _devices(plan: Plan) -> int | None:
    """Count the CUDA devices in a new process: this one would still count lost devices.

    None if ranks need none, or if the count is unknown.
    """
    import torch

    asked = plan.launch["device"]
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return None
    try:
        done = subprocess.run([sys.executable, "-P", "-c", _COUNT], capture_output=True, text=True, timeout=120)
        count = int(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return max(count, 0)
