"""Approvals of plans: a person names a plan in the workspace, with an SSH signature if a key is given.

`ROOT/approvals/PLAN_ID/` holds `approved-plan.json`, `approval.json`, and `approval.json.sig` of `ssh-keygen -Y sign`.
The approval has the SHA-256 of the plan's file, so that a signature covers the whole plan.
"""

import json
import re
import subprocess
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Final

from attrs import asdict, frozen

from xtrain.plan.plan import Plan
from xtrain.plan.serialise import dumps, load_plan
from xtrain.regular_files import MOST_JSON, read_json, read_regular, reason_of
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import EnvironmentFault

FOLDER: Final = "approvals"
PLAN_FILE: Final = "approved-plan.json"  # another name than in a run directory
APPROVAL_FILE: Final = "approval.json"
NAMESPACE: Final = "xtrain-plan"
NOT_APPROVED: Final = "X742"
_ID: Final = re.compile(r"[0-9a-f]{8,64}")
_SECONDS: Final = 120  # a passphrase may be asked for


@frozen(kw_only=True)
class Approval:
    """Approval of a plan. by: the person, as in a file of allowed signers. time: UTC. sha256: of the plan's file."""

    plan_id: str
    name: str
    by: str
    time: str
    sha256: str


def approve(plan: Plan, by: str, key: Path | None = None) -> Path:
    """Write the approval of a plan below the root of its workspace, signed if a key is given; return its folder.

    Raises EnvironmentFault if the key cannot sign, and OSError.
    """
    folder = Path(plan.workspace["root"]) / FOLDER / plan.id
    text = dumps(plan)
    approval = Approval(
        plan_id=plan.id,
        name=plan.name,
        by=by,
        time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        sha256=sha256(text.encode()).hexdigest(),
    )
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / APPROVAL_FILE
    for old in (place, _signature(folder)):  # an approval is whole or absent
        old.unlink(missing_ok=True)
    durable.write(folder / PLAN_FILE, text)
    content = json.dumps(asdict(approval), indent=1) + "\n"
    if key is not None:
        done = _ssh_keygen(("sign", "-f", str(key)), content.encode())
        if done.returncode:
            raise EnvironmentFault(NOT_APPROVED, f"{key} cannot sign: {_first_line(done)}; the plan is not approved")
        durable.write(_signature(folder), done.stdout)
    durable.write(place, content)
    return folder


def check_approval(plan: Plan, signers: Path | None = None) -> None:
    """Raise EnvironmentFault (X742) unless exactly this plan is approved: plans with one id can differ in the path of
    the spec, whose folder holds its modules. signers: as in `approved`."""
    _, file = approved(Path(plan.workspace["root"]), plan.id, signers)
    if load_plan(file) != plan:
        message = f"the plan has the id of the approved one, but another spec path or other texts; launch {file}"
        raise EnvironmentFault(NOT_APPROVED, message)


def approved(root: Path, plan_id: str, signers: Path | None = None) -> tuple[Approval, Path]:
    """Return the approval of a plan and the file of the plan. signers: file of allowed signers, one of whom must have
    signed (`ALLOWED SIGNERS` of ssh-keygen(1)); None: no signature is needed.

    Raises EnvironmentFault (X742) if there is no valid approval, and PlanError for a changed plan.
    """
    if _ID.fullmatch(plan_id) is None:
        raise EnvironmentFault(NOT_APPROVED, f"`{plan_id}` is not the id of a plan; `xtrain plan` shows the id")
    folder = root / FOLDER / plan_id
    ask = "ask a person to read the plan and run `xtrain approve`"
    try:
        content = read_regular(folder / APPROVAL_FILE, MOST_JSON)
        approval = Approval(**read_json(folder / APPROVAL_FILE))
        digest = sha256(read_regular(folder / PLAN_FILE, MOST_JSON)).hexdigest()
    except FileNotFoundError:
        raise EnvironmentFault(NOT_APPROVED, f"plan {plan_id} is not approved below {root}; {ask}") from None
    except (OSError, ValueError, TypeError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        raise EnvironmentFault(NOT_APPROVED, f"the approval of {plan_id} is damaged: {reason}; {ask}") from None
    if (approval.plan_id, approval.sha256) != (plan_id, digest) or load_plan(folder / PLAN_FILE).id != plan_id:
        raise EnvironmentFault(NOT_APPROVED, f"the approval in {folder} is for another plan; {ask}")
    if signers is not None:
        _check_signature(approval, folder, content, signers)
    return approval, folder / PLAN_FILE


def _check_signature(approval: Approval, folder: Path, content: bytes, signers: Path) -> None:
    """Raise EnvironmentFault unless one of the signers has signed the approval."""
    signature = _signature(folder)
    if not signature.is_file():
        message = f"the approval of {approval.plan_id} is not signed; use `xtrain approve --key FILE`"
        raise EnvironmentFault(NOT_APPROVED, message)
    if not signers.is_file():
        raise EnvironmentFault(
            NOT_APPROVED, f"there is no file of allowed signers {signers}; write one, or another path"
        )
    done = _ssh_keygen(("verify", "-f", str(signers), "-I", str(approval.by), "-s", str(signature)), content)
    if done.returncode:
        message = (
            f"the signature of {approval.by} on {approval.plan_id} is not valid for {signers}: {_first_line(done)}"
        )
        raise EnvironmentFault(NOT_APPROVED, f"{message}; sign with a key of that file, and name its person with --by")


def _ssh_keygen(arguments: tuple[str, ...], content: bytes) -> subprocess.CompletedProcess[bytes]:
    """Sign or verify `content`. Raises EnvironmentFault without ssh-keygen."""
    action, *rest = arguments
    command = ["ssh-keygen", "-Y", action, "-n", NAMESPACE, *rest]
    try:
        return subprocess.run(command, input=content, capture_output=True, timeout=_SECONDS, check=False)
    except FileNotFoundError:
        message = "ssh-keygen is not installed, which signs and verifies approvals; install OpenSSH"
        raise EnvironmentFault(NOT_APPROVED, message) from None
    except subprocess.TimeoutExpired:
        raise EnvironmentFault(NOT_APPROVED, f"ssh-keygen took more than {_SECONDS} s; try again") from None


def _signature(folder: Path) -> Path:
    return folder / f"{APPROVAL_FILE}.sig"


def _first_line(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = (done.stderr + b"\n" + done.stdout).decode("utf-8", "replace").strip().splitlines()
    return lines[0].strip() if lines else f"exit code {done.returncode}"
