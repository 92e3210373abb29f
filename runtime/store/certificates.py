"""Certificates of plans: where they lie, and whether one still holds for a plan."""

from importlib.metadata import version
from pathlib import Path
from typing import Final

from attrs import evolve

from xtrain.plan.certificate import Certificate, CertificateError
from xtrain.plan.data import own_modules
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import plan_id, source_fingerprint
from xtrain.runtime.base.errors import EnvironmentFault

CODE: Final = "X740"
REMEDY: Final = "prove the plan again with `xtrain prove`"


def subject_of(plan: Plan) -> str:
    """Return the id of a plan whatever names its run, submits it, or demands a certificate."""
    launch = {name: value for name, value in plan.launch.items() if name not in ("launcher", "certificate")}
    return plan_id(evolve(plan, workspace={**plan.workspace, "run": None}, launch=launch))


def certificate_path(plan: Plan) -> Path:
    """Return the file in which `prove` writes the certificate of a plan unless told otherwise."""
    return Path(plan.workspace["root"], "certificates", f"{subject_of(plan)}.json")


def check_certificate(plan: Plan, path: Path | None) -> Certificate:
    """Return the certificate of a plan. path: its file; None: the usual one.

    Raises EnvironmentFault (X740) if there is none, or if it does not hold for this plan, this code or this torch.
    """
    named = path or certificate_path(plan)
    if not named.exists():
        raise EnvironmentFault(CODE, f"plan {plan.id} has no certificate: {named} does not exist; {_remedy(path)}")
    try:
        found = Certificate.read(named)
    except CertificateError as error:
        raise EnvironmentFault(CODE, f"{error}; {REMEDY}") from None
    if (why := _why_not(found, plan)) is not None:
        raise EnvironmentFault(CODE, f"{named} {why}")
    return found


def _remedy(path: Path | None) -> str:
    return "`xtrain prove` with the same spec and settings makes it" if path is None else "give the file of another"


def _why_not(found: Certificate, plan: Plan) -> str | None:
    """Return why a certificate does not hold for a plan, as a clause after its path."""
    own = own_modules(plan)
    changed = sorted(name for name in own.keys() | found.own.keys() if own.get(name) != found.own.get(name))
    if changed and found.name == plan.name:
        return f"was made before {', '.join(changed)} changed; {REMEDY}"
    if found.subject != subject_of(plan):
        return f"is the certificate of plan {found.plan} ({found.name}), not of plan {plan.id}; {REMEDY}"
    if found.code != source_fingerprint():
        return f"was made by xtrain {found.version} with other source files; {REMEDY}"
    if found.torch != version("torch"):
        return f"was made with torch {found.torch}, and this is torch {version('torch')}; {REMEDY}"
    if not found.holds:
        return f"says that the layout does not compute what one process computes: {found.faults[0]}"
    return None
