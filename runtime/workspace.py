"""The run directory: `<root>/<lineage>/<run_id>/`, and what it keeps about the code and the machine."""

import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import IO

from attrs import frozen

from ..planner.plan import Plan
from ..planner.serialise import to_json
from .checkpoint.layout import CheckpointFolder
from .checkpoint.model_check import check_model, check_weights
from .checkpoint.publish import Publisher
from .checkpoint.sources import Start, find, starting_point
from .errors import EnvironmentFault
from .records import trim_after
from .user_parts import keep_parts

LAUNCHER_LOCK = ".launcher.lock"
# Held by the first rank itself: a killed launcher leaves ranks behind that are still saving.
WORKER_LOCK = ".worker.lock"


@frozen
class Workspace:
    """A run's directory, opened for one attempt at running it. `lock` is held until the object is gone.

    elsewhere: directories of the same experiment under another state of the code, if this one has no checkpoint.
    """

    directory: Path
    attempt: str
    lock: IO[str]
    elsewhere: tuple[Path, ...] = ()


@frozen
class Code:
    """The state of the git checkout that holds the spec: `code_id` and the diff that makes it dirty."""

    sha: str
    diff: str

    @property
    def code_id(self) -> str:
        """Eight digits of the commit, and of the diff where there is one."""
        if not self.diff:
            return self.sha[:8]
        return f"{self.sha[:8]}-d{blake2b(self.diff.encode(), digest_size=5).hexdigest()}"


def read_code(folder: Path) -> Code | None:
    """None outside a git checkout or before its first commit.

    Specs are left out of the diff: what they change is in the configuration's own identity.
    """
    sha = _git(folder, "rev-parse", "HEAD")
    if sha is None:
        return None
    return Code(sha=sha.strip(), diff=_git(folder, "diff", "HEAD", "--", ":/", ":(exclude,top,glob)**/*.xtrain") or "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None


def locate(plan: Plan, code: Code | None) -> Path:
    """Where this plan's run lives; the same plan under the same code always gives the same place."""
    chosen = plan.workspace["run"]
    run_id = chosen or (f"{code.code_id}-{plan.config_id}" if code else plan.config_id)
    return Path(plan.workspace["root"]) / (plan.workspace["lineage"] or plan.name) / run_id


def open_workspace(plan: Plan, resolved_spec: str) -> Workspace:
    """Make the run directory ready for another attempt.

    Records of steps that will be computed again are moved to `logs/`; a run that is not to be resumed moves aside as a
    whole. Raises EnvironmentFault if the directory cannot be written or another process is running in it.
    """
    code = read_code(Path(plan.spec).resolve().parent)
    return _open(locate(plan, code), plan, resolved_spec, code, None)


def reopen(workspace: Workspace, plan: Plan) -> Workspace:
    """Make the directory ready for another attempt by the process that has opened it, whose lock goes on.

    plan: the same run, perhaps on other ranks. Raises EnvironmentFault as `open_workspace` does.
    """
    code = read_code(Path(plan.spec).resolve().parent)
    return _open(workspace.directory, plan, plan.spec_text, code, workspace.lock)


def _open(directory: Path, plan: Plan, resolved_spec: str, code: Code | None, lock: IO[str] | None) -> Workspace:
    attempt = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = lock or hold(directory, LAUNCHER_LOCK)
        hold(directory, WORKER_LOCK).close()
        Publisher(CheckpointFolder(directory / "checkpoints")).sweep()
        start = starting_point(plan, directory)
        _check_start(plan, start)  # before anything of the run is overwritten
        if start.anew and (directory / "metrics.jsonl").exists():
            directory.rename(directory.with_name(f"{directory.name}~{attempt}"))
            directory.mkdir()
            lock = hold(directory, LAUNCHER_LOCK)
        for name in ("metadata", "ranks", "logs", "checkpoints"):
            (directory / name).mkdir(exist_ok=True)
        superseded = directory / "logs" / f"metrics-superseded-{attempt}.jsonl"
        trim_after(directory / "metrics.jsonl", start.step, superseded)
        (directory / "spec.xtrain").write_text(resolved_spec)
        keep_parts(plan, directory)
        (directory / "plan.json").write_text(json.dumps(to_json(plan), sort_keys=True))
        _write_metadata(directory / "metadata", plan, code)
    except OSError as error:
        raise EnvironmentFault("X706", f"the run directory {directory} cannot be written: {error.strerror}") from error
    named = plan.workspace["run"] is not None
    elsewhere = () if start.entry or named else _elsewhere(directory, plan.config_id)
    return Workspace(directory, attempt, lock, elsewhere)


def _check_start(plan: Plan, start: Start) -> None:
    """Raise EnvironmentFault if the run cannot begin with what it is to begin with."""
    if start.entry is not None:
        check_model(plan, start.entry)
        return
    for node in plan.nodes:
        if node.op == "setup.pretrained":
            check_weights(plan, find(Path(node.args["path"]), weights=True))


def _elsewhere(directory: Path, config_id: str) -> tuple[Path, ...]:
    others = [other for other in directory.parent.glob(f"*{config_id}") if other != directory]
    # Only runs whose name says that the code was another one; a run that the user has named says nothing of that.
    others = [other for other in others if other.name.count("-") in (1, 2) and "~" not in other.name]
    return tuple(sorted(other for other in others if CheckpointFolder(other / "checkpoints").latest()))


def hold(directory: Path, name: str) -> IO[str]:
    """Lock a file of the run directory for as long as what is returned stays open.

    Raises EnvironmentFault if another process holds it.
    """
    lock = (directory / name).open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise EnvironmentFault(
            "X707", f"another process is running in {directory}; wait for it, or name this run with workspace.run"
        ) from error
    return lock


def _write_metadata(folder: Path, plan: Plan, code: Code | None) -> None:
    environment = {
        "xtrain": version("xtrain"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "plan_id": plan.id,
        "config_id": plan.config_id,
    }
    (folder / "environment.json").write_text(json.dumps(environment, indent=1))
    if code is not None:
        (folder / "git.yaml").write_text(
            f"sha: {code.sha}\ncode_id: {code.code_id}\ndirty: {bool(code.diff)}\n".lower()
        )
        (folder / "git.diff").write_text(code.diff)
