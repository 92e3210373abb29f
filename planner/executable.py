"""Which plans the runtime can carry out. Others are planned, estimated and drawn all the same."""

from ..dsl.schema.model import DENSE
from .findings import Findings
from .plan import Check, Plan
from .resolved import Resolved

# What the runtime executes. A plan that uses more is refused by `xtrain run`.
EXECUTABLE_AXES = frozenset({"replicate", "fsdp"})
EXECUTABLE_FAMILIES = frozenset(DENSE)

RULE = "executable"


def check_executable(run: Resolved, found: Findings) -> None:
    """Note, as check `executable`, whether the runtime has everything this plan needs."""
    needs = [f"{axis} {run.size(axis)}" for axis in ("pp", "ring", "ulysses", "tp") if axis not in EXECUTABLE_AXES]
    needs = [need for need in needs if not need.endswith(" 1")]
    if run.layout.ep > 1:
        needs.append(f"ep {run.layout.ep}")
    if run.architecture.family not in EXECUTABLE_FAMILIES:
        needs.append(f"model {run.architecture.family}")
    if needs:
        evidence = f"needs what this version only plans: {', '.join(needs)}"
        found.checks.append(Check(id=RULE, status="warn", evidence=evidence, code="X701"))
    else:
        found.passed(RULE, "every operation of the plan can be executed")


def refusal(plan: Plan) -> str:
    """Why the runtime must refuse this plan; empty if it can carry it out."""
    return next((check.evidence for check in plan.checks if check.id == RULE and check.status != "pass"), "")
