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
# Seconds beside launch.stop_deadline until whoever has started the ranks kills them.
MARGIN: Final = 60


@frozen(kw_only=True)
class Job:
    """launcher: a `Launcher`, of the class that its code knows. directory: of the run. folder: where paths of the spec
    start, for all machines the same. python: that runs xtrain."""

    plan: Plan
    launcher: Any
    directory: Path
    folder: Path
    python: str

    @property
    def files(self) -> Path:
        """The folder of its files."""
        return job_folder(self.directory)

    @property
    def nodes(self) -> int:
        return self.plan.launch["nodes"]

    @property
    def gpus(self) -> int:
        """Of a node; as many as it has ranks unless the launcher says otherwise."""
        asked = getattr(self.launcher, "gpus", None)
        if isinstance(asked, int):
            return asked
        return 0 if self.plan.launch["device"] == "cpu" else self.plan.launch["ranks_per_node"]

    @property
    def nodes_may_leave(self) -> bool:
        """Whether the run goes on without a machine that is lost, as its ranks are in replica groups."""
        return self.nodes > 1 and groups_node(self.plan) is not None

    @property
    def patience(self) -> int:
        """Seconds that ranks have to leave once one of them has left."""
        return int(self.plan.launch["stop_deadline_seconds"]) + MARGIN


@frozen(kw_only=True)
class SubmittedJob:
    """Which job a run was given to. launcher: its arguments, as in a plan; id: what the launcher calls it; time: when,
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
    """over: whether the job is gone or has ended. waits: whether it has not begun, or not again. word: of the launcher,
    such as `PENDING`. why: such as `Priority`."""

    over: bool
    word: str
    why: str = ""
    waits: bool = False

    def __str__(self) -> str:
        return printable(f"{self.word} ({self.why})" if self.why else self.word)


class JobLauncher(Protocol):
    """What a launcher does. Commands that fail raise EnvironmentFault (X461)."""

    def files(self, job: Job) -> dict[str, str]:
        """Name → content, the one that is submitted first."""
        ...

    def submit(self, job: Job) -> str:
        """The id of the job, whose files are written."""
        ...

    def states(self, launcher: Launcher, ids: Sequence[str]) -> dict[str, QueueState]:
        """What has become of jobs, of each of them; asked for all at once."""
        ...

    def cancel(self, launcher: Launcher, id: str) -> None:
        """End it, or take it out of the queue."""
        ...


class TrialJobs(JobLauncher, Protocol):
    """What the launcher of the trials of a sweep does beside that: a launcher of one machine alone does not."""

    def trial_files(self, jobs: Sequence[Job], name: str, logs: Sequence[Path]) -> dict[Path, str]:
        """Path → content of all that is submitted with some jobs, the one that is submitted first.

        name: under which `find_trials` finds them. logs: where each writes what it prints. The jobs are alike: they
        have the same launcher and ask for the same of a machine.
        """
        ...

    def submit_trials(self, jobs: Sequence[Job], name: str) -> list[str]:
        """The ids of jobs whose files are written, in the same order."""
        ...

    def find_trials(self, jobs: Sequence[Job], name: str) -> list[str] | None:
        """The ids that `submit_trials` has given, or was about to give when it was killed; None: none were given."""
        ...

    def stop(self, launcher: Launcher, id: str) -> None:
        """Let it save and end, and not start again; take it out of the queue if it waits there."""
        ...

    def collect(self, launcher: Launcher, id: str) -> "EndedJob":
        """What is left of a job that is over. Afterwards the launcher need not know of it any more."""
        ...


@frozen(kw_only=True)
class EndedJob:
    """code: its exit code, negative for a signal; None: nobody knows it. output: what it has printed, where no file
    has it."""

    code: int | None = None
    output: str = ""


def job_launcher(kind: str) -> JobLauncher:
    """The code of a launcher. Raises EnvironmentFault where it cannot be loaded."""
    component = LAUNCHERS[kind]
    return code_of(component, component.run_module()).LAUNCHER


def job_folder(directory: Path) -> Path:
    """Of the job of a run."""
    return directory.parent / FOLDER / directory.name


def read_job(directory: Path) -> SubmittedJob | None:
    """The job that the run in a directory was given to; None where it was given to none, or that cannot be read."""
    try:
        found = SubmittedJob(**read_json(job_folder(directory) / JOB_FILE))
    except (OSError, ValueError, TypeError):
        return None
    launcher = found.launcher
    whole = isinstance(launcher, dict) and isinstance(launcher.get("kind"), str) and isinstance(found.id, str)
    return found if whole and found.id else None


def launcher_of_job(job: SubmittedJob) -> Launcher:
    """With the settings that the job was submitted with. Raises EnvironmentFault where they are not those of here."""
    try:
        return launcher_from(dict(job.launcher))
    except UnknownLauncher as error:
        raise EnvironmentFault(
            "X461", f"{job.kind} job {job.id} has {error}; use the xtrain, and its packages, that submitted it"
        ) from error


def job_state(job: SubmittedJob) -> QueueState:
    """Raises EnvironmentFault where nobody can be asked."""
    return job_states([job])[0]


def job_states(jobs: Sequence[SubmittedJob]) -> list[QueueState]:
    """Those of several; of one launcher all at once. Raises EnvironmentFault where nobody can be asked."""
    by_launcher: dict[str, list[SubmittedJob]] = {}
    for each in jobs:
        by_launcher.setdefault(json.dumps(each.launcher), []).append(each)
    found: dict[tuple[str, str], QueueState] = {}
    for same in by_launcher.values():
        launcher = launcher_of_job(same[0])
        states = job_launcher(launcher.kind).states(launcher, [each.id for each in same])
        found |= {(launcher.kind, id): state for id, state in states.items()}
    return [found[each.kind, each.id] for each in jobs]


def not_begun(directory: Path) -> str:
    """How the job of a run stands that has written nothing yet; empty where there is none, or the run has begun."""
    job = read_job(directory.absolute())
    if job is None or directory.exists():
        return ""
    try:
        state = f"is {job_state(job)}"
    except EnvironmentFault as fault:
        state = f"cannot be asked for: {fault}"
    return f"the run {directory} has not begun: its job {job.kind} {job.id} {state}"


def cancel_job(job: SubmittedJob) -> None:
    """Raises EnvironmentFault."""
    job_launcher(job.kind).cancel(launcher_of_job(job), job.id)


def submit_job(job: Job, plan_text: str) -> SubmittedJob:
    """Write the files of a job and give it to its launcher.

    plan_text: the plan as a file. Raises EnvironmentFault where the run has a job already, or the launcher refuses it.
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
    """One process at a time submits a run, the next one sees its job. Raises EnvironmentFault."""
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
    """Raises EnvironmentFault where the job that the run was given to goes on, or where nobody says whether it does."""
    name = f"{before.kind} {before.id}"
    try:
        state = job_state(before)
    except EnvironmentFault as fault:
        file = job.files / JOB_FILE
        message = f"the run {job.directory} was given to {name}, and nobody says whether that goes on: {fault}"
        raise EnvironmentFault(fault.code, f"{message}; or remove {file} if it surely does not") from fault
    if not state.over:
        raise EnvironmentFault(
            "X707",
            f"the run {job.directory} has a job already: {name} is {state}; wait until it ends, or cancel it with "
            f"`xtrain launch --cancel {quote(str(job.directory))}`",
        )


def write_files(contents: Mapping[Path, str]) -> None:
    """Raises EnvironmentFault."""
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
    """Write down which job a run was given to. Raises EnvironmentFault; then nobody would know of the job, and it is
    cancelled."""
    submitted = SubmittedJob(launcher=launcher_args(job.launcher), id=id, time=time.time(), plan=job.plan.id)
    try:
        durable.write(job.files / JOB_FILE, json.dumps(asdict(submitted), indent=1).encode())
    except OSError as error:
        cancel_job(submitted)
        message = f"{job.files / JOB_FILE} cannot be written: {error.strerror}, and so {submitted.kind} job {id} was "
        raise EnvironmentFault("X706", f"{message}cancelled; set workspace.root to a folder with room") from error
    return submitted
