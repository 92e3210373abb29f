"""Which plans the runtime can carry out. Others are planned, estimated and drawn all the same."""

from ..dsl.schema.model import DENSE
from .architecture import Architecture
from .findings import Findings
from .plan import Check, Mesh, Plan

# What the runtime executes. A plan that uses more is refused by `xtrain run`.
EXECUTABLE_AXES = frozenset({"replicate", "fsdp"})
EXECUTABLE_FAMILIES = frozenset(DENSE)

RULE = "executable"


def check_executable(mesh: Mesh, architecture: Architecture, found: Findings) -> None:
    """Note, as check `executable`, whether the runtime has everything a plan over these needs."""
    needs = _needs(mesh, architecture)
    if needs:
        found.checks.append(Check(id=RULE, status="warn", evidence=needs, code="X701"))
    else:
        found.passed(RULE, "every operation of the plan can be executed")


def refusal(plan: Plan) -> str:
    """Why this version's runtime must refuse the plan, whoever made it; empty if it can carry it out."""
    return _needs(plan.mesh, plan.architecture)


def _needs(mesh: Mesh, architecture: Architecture) -> str:
    sizes = {axis.name: axis.size for axis in mesh.axes}
    sizes["ep"] = next((axis.size for axis in mesh.expert_axes if axis.name == "ep"), 1)
    needs = [f"{name} {size}" for name, size in sizes.items() if size > 1 and name not in EXECUTABLE_AXES]
    if architecture.family not in EXECUTABLE_FAMILIES:
        needs.append(f"model {architecture.family}")
    return f"needs what this version only plans: {', '.join(needs)}" if needs else ""
