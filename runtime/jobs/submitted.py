"""Jobs that `xtrain launch` has submitted to a queue, a cluster or the background."""

import fcntl
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any, Final, Protocol

from attrs import asdict, frozen

from xtrain.dsl.diagnostics.diagnostic import printable
from xtrain.dsl.schema.cluster import LAUNCHERS, Launcher
from xtrain.plan.graph import UnknownLauncher, groups_node, launcher_args, launcher_from
from xtrain.plan.plan import Plan
from xtrain.regular_files import read_json, reason_of
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.ops import code_of

JOB_FILE: Final = "job.json"
PLAN_FILE: Final = "job-plan.json"
LOCK_FILE: Final = ".submit.lock"
FOLDER: Final = "launch"
# Seconds in addition to launch.stop_deadline before a launcher kills the ranks.
MARGIN: Final = 60


@frozen(kw_only=True)
class Job:
    """Job to submit. launcher: a `Launcher`, of its code's class. directory: of the run. folder: base of the spec's
    paths, the same on all machines. python: interpreter that runs xtrain."""

    plan: Plan
    launcher: Any
    directory: Path
    folder: Path
    python: str

    @property
    def files(self) -> Path:
        """The folder of the job's files."""
        return job_folder(self.directory)

    @property
    def nodes(self) -> int:
        return self.plan.launch["nodes"]

    @property
    def gpus(self) -> int:
        """GPUs of a node; one for each rank unless the launcher says otherwise."""
        asked = getattr(self.launcher, "gpus", None)
        if isinstance(asked, int):
            return asked
        return 0 if self.plan.launch["device"] == "cpu" else self.plan.launch["ranks_per_node"]

    @property
    def nodes_may_leave(self) -> bool:
        """True if the run continues without a lost machine, because its ranks are in replica groups."""
        return self.nodes > 1 and groups_node(self.plan) is not None

    @property
    def patience(self) -> int:
        """Seconds that ranks have to exit once one of them has exited."""
        return int(self.plan.launch["stop_deadline_seconds"]) + MARGIN


@frozen(kw_only=True)
class SubmittedJob:
    """Job that a run was given to. launcher: its arguments, as in a plan; id: assigned by the launcher; time: in
    seconds since 1970; plan: the id of its plan."""

    launcher: Mapping[str, Any]
    id: str
    time: float
    plan: str

    @property
    def kind(self) -> str:
        return self.launcher["kind"]


@frozen(kw_only=True)
class QueueState:
    """State of a job in its queue. over: the job is gone or has ended. waits: it has not begun, or not again. word: of
    the launcher, such as `PENDING`. why: such as `Priority`."""

    over: bool
    word: str
    why: str = ""
    waits: bool = False

    def __str__(self) -> str:
        return printable(f"{self.word} ({self.why})" if self.why else self.word)


class JobLauncher(Protocol):
    """Interface of a launcher. Commands that fail raise EnvironmentFault (X461)."""

    def files(self, job: Job) -> dict[str, str]:
        """Return name → content; the submitted file first."""
        ...

    def submit(self, job: Job) -> str:
        """Submit a job whose files are written; return its id."""
        ...

    def states(self, launcher: Launcher, ids: Sequence[str]) -> dict[str, QueueState]:
        """Return the state of each job, from one query."""
        ...

    def cancel(self, launcher: Launcher, id: str) -> None:
        """End the job, or take it out of the queue."""
        ...


class TrialJobs(JobLauncher, Protocol):
    """Further interface of a launcher for trials of a sweep; launchers of a single machine lack it."""

    def trial_files(self, jobs: Sequence[Job], name: str, logs: Sequence[Path]) -> dict[Path, str]:
        """Return path → content of all files to submit for some jobs; the submitted file first.

        name: under which `find_trials` finds them. logs: where each writes its output. The jobs have the same launcher
        and the same requirements.
        """
        ...

    def submit_trials(self, jobs: Sequence[Job], name: str) -> list[str]:
        """Submit jobs whose files are written; return their ids in the same order."""
        ...

    def find_trials(self, jobs: Sequence[Job], name: str) -> list[str] | None:
        """Return the ids that `submit_trials` returned, or would have returned when it was killed; None if none were
        assigned."""
        ...

    def stop(self, launcher: Launcher, id: str) -> None:
        """Let the job save and end without a restart; take it out of the queue if it waits there."""
        ...

    def collect(self, launcher: Launcher, id: str) -> "EndedJob":
        """Return the result of a finished job. Afterwards the launcher may forget the job."""
        ...


@frozen(kw_only=True)
class EndedJob:
    """Result of a finished job. code: its exit code, negative for a signal; None if unknown. output: printed text that
    is in no file."""

    code: int | None = None
    output: str = ""


def job_launcher(kind: str) -> JobLauncher:
    """Load the code of a launcher. Raises EnvironmentFault if it cannot be loaded."""
    component = LAUNCHERS[kind]
    return code_of(component, component.run_module()).LAUNCHER


def job_folder(directory: Path) -> Path:
    """Return the folder of a run's job."""
    return directory.parent / FOLDER / directory.name


def read_job(directory: Path) -> SubmittedJob | None:
    """Return the job that the run in a directory was given to; None without one, or if it cannot be read."""
    try:
        job = SubmittedJob(**read_json(job_folder(directory) / JOB_FILE))
    except (OSError, ValueError, TypeError):
        return None
    launcher = job.launcher
    whole = isinstance(launcher, dict) and isinstance(launcher.get("kind"), str) and isinstance(job.id, str)
    return job if whole and job.id else None


def launcher_of_job(job: SubmittedJob) -> Launcher:
    """Return the launcher with the settings of the submission. Raises EnvironmentFault if this installation does not
    accept them."""
    try:
        return launcher_from(dict(job.launcher))
    except UnknownLauncher as error:
        raise EnvironmentFault(
            "X461", f"{job.kind} job {job.id} has {error}; use the xtrain, and its packages, that submitted it"
        ) from error


def job_state(job: SubmittedJob) -> QueueState:
    """Return the state of a job. Raises EnvironmentFault if the launcher does not answer."""
    return job_states([job])[0]


def job_states(jobs: Sequence[SubmittedJob]) -> list[QueueState]:
    """Return the states of several jobs, with one query for each launcher. Raises EnvironmentFault if a launcher does
    not answer."""
    by_launcher: dict[str, list[SubmittedJob]] = {}
    for job in jobs:
        by_launcher.setdefault(json.dumps(job.launcher), []).append(job)
    state_of: dict[tuple[str, str], QueueState] = {}
    for same in by_launcher.values():
        launcher = launcher_of_job(same[0])
        states = job_launcher(launcher.kind).states(launcher, [job.id for job in same])
        state_of |= {(launcher.kind, id): state for id, state in states.items()}
    return [state_of[job.kind, job.id] for job in jobs]


def not_begun(directory: Path) -> str:
    """Describe the job of a run that has written nothing yet; empty without a job, or once the run has begun."""
    job = read_job(directory.absolute())
    if job is None or directory.exists():
        return ""
    try:
        state = f"is {job_state(job)}"
    except EnvironmentFault as fault:
        state = f"cannot be queried: {fault}"
    return f"the run {directory} has not started: its job {job.kind} {job.id} {state}"


def cancel_job(job: SubmittedJob) -> None:
    """Cancel a job. Raises EnvironmentFault."""
    job_launcher(job.kind).cancel(launcher_of_job(job), job.id)


def submit_job(job: Job, plan_text: str) -> SubmittedJob:
    """Write the files of a job and submit it to its launcher.

    plan_text: the plan as a file. Raises EnvironmentFault if the run already has a job, or if the launcher refuses it.
    """
    with _alone(job.files):
        if (before := read_job(job.directory)) is not None:
            _check_over(before, job)
        launcher = job_launcher(job.launcher.kind)
        contents = {**launcher.files(job), PLAN_FILE: plan_text}
        write_files({job.files / name: text for name, text in contents.items()})
        return note_submitted(job, launcher.submit(job))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Allow one process at a time to submit a run; the next one sees its job. Raises EnvironmentFault."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("a")
    except OSError as error:
        raise _unwritable(folder, error) from error
    with lock:
        with suppress(OSError):  # of a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_over(before: SubmittedJob, job: Job) -> None:
    """Raise EnvironmentFault if the run's earlier job is not over, or if its state is unknown."""
    name = f"{before.kind} {before.id}"
    try:
        state = job_state(before)
    except EnvironmentFault as fault:
        file = job.files / JOB_FILE
        message = f"the run {job.directory} was given to {name}, whose state is unknown: {fault}"
        raise EnvironmentFault(fault.code, f"{message}; or remove {file} if that job has certainly ended") from fault
    if not state.over:
        raise EnvironmentFault(
            "X707",
            f"the run {job.directory} has a job already: {name} is {state}; wait until it ends, or cancel it with "
            f"`xtrain launch --cancel {quote(str(job.directory))}`",
        )


def write_files(contents: Mapping[Path, str]) -> None:
    """Write files. Raises EnvironmentFault."""
    for path, text in contents.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            durable.write(path, text.encode())
        except OSError as error:
            raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> EnvironmentFault:
    hint = "set workspace.root to a folder on a disk with room that this user may write to"
    return EnvironmentFault("X706", f"{path} cannot be written: {reason_of(error)}; {hint}")


def note_submitted(job: Job, id: str) -> SubmittedJob:
    """Record the job that a run was given to. On EnvironmentFault the job is cancelled, because it would be unknown."""
    submitted = SubmittedJob(launcher=launcher_args(job.launcher), id=id, time=time.time(), plan=job.plan.id)
    try:
        durable.write(job.files / JOB_FILE, json.dumps(asdict(submitted), indent=1).encode())
    except OSError as error:
        cancel_job(submitted)
        message = f"{job.files / JOB_FILE} cannot be written: {error.strerror}, and so {submitted.kind} job {id} was "
        raise EnvironmentFault("X706", f"{message}cancelled; set workspace.root to a folder with room") from error
    return submitted
