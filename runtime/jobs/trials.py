"""Trials of a sweep, as processes of this machine or as jobs that outlive the driver."""

import ctypes
import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import Any, Final, Protocol, cast

from attrs import define, field, frozen

from xtrain.plan.plan import Plan
from xtrain.plan.serialise import dumps, load_plan
from xtrain.records.events import RunEndEvent
from xtrain.records.names import EndStatus
from xtrain.regular_files import read_json
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import EXIT_CODES, EnvironmentFault
from xtrain.runtime.jobs.runs import last_end
from xtrain.runtime.jobs.submitted import (
    FOLDER,
    JOB_FILE,
    PLAN_FILE,
    EndedJob,
    Job,
    QueueState,
    SubmittedJob,
    TrialJobs,
    job_launcher,
    job_state,
    job_states,
    launcher_of_job,
    note_submitted,
    read_job,
    write_files,
)

_PR_SET_PDEATHSIG: Final = 1


@frozen
class TrialStart:
    """Trial to start. plan: of the trial up to its next rung. file: where it is saved. log: where its output goes.
    slot: index among the trials that run at once; no other running trial has it."""

    plan: Plan
    file: Path
    log: Path
    slot: int


class StartedTrial(Protocol):
    """A running trial."""

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        ...

    def stop(self) -> None:
        """Let it save a checkpoint and end; may be called again."""
        ...


class TrialLauncher(Protocol):
    """Launcher of `xtrain run PLAN`."""

    def start(self, trials: Sequence[TrialStart]) -> Sequence[StartedTrial]:
        """Start trials at the same time."""
        ...

    def still_going(self, directories: Sequence[Path]) -> Sequence[StartedTrial | None]:
        """Return for each run directory the trial of an earlier driver that is still running."""
        ...


def refuse_job(directory: Path) -> None:
    """Raise EnvironmentFault if the run of a trial belongs to another launcher's job."""
    job = read_job(directory)
    if job is not None and not (state := job_state(job)).over:
        raise EnvironmentFault(
            "X707",
            f"the trial {directory} has a job already: {job.kind} {job.id} is {state}; use `xtrain launch`, or "
            f"cancel it with `xtrain launch --cancel {directory}`",
        )


@define(eq=False)
class LocalTrials:
    """Trials as processes of this machine, each with its share of the cores and of the devices.

    parallel: trials at once. ranks: of a trial. gpus: each rank takes one GPU. A trial gets SIGTERM when the process
    that started it dies.
    """

    parallel: int
    ranks: int
    gpus: bool
    _cores: list[int] = field(factory=lambda: sorted(os.sched_getaffinity(0)))

    def start(self, trials: Sequence[TrialStart]) -> list[StartedTrial]:
        return [self._started(trial) for trial in trials]

    def still_going(self, directories: Sequence[Path]) -> list[StartedTrial | None]:
        """Return None for each: a trial gets SIGTERM with its driver."""
        for directory in directories:
            refuse_job(directory.absolute())
        return [None] * len(directories)

    def _started(self, trial: TrialStart) -> StartedTrial:
        environment = {**os.environ, **self._devices(trial.slot)}
        command = [sys.executable, "-P", "-m", "xtrain", "run", str(trial.file), "--ui", "plain"]
        trial.log.parent.mkdir(parents=True, exist_ok=True)
        with trial.log.open("ab") as output:
            process = Popen(
                command, stdin=DEVNULL, stdout=output, stderr=STDOUT, env=environment,
                start_new_session=True, preexec_fn=partial(_begin, os.getpid(), self._cores_of(trial.slot)),
            )  # fmt: skip
        return _LocalTrial(process)

    def _cores_of(self, slot: int) -> set[int]:
        """Return the cores of a slot; all cores if there are fewer than trials."""
        share = len(self._cores) // self.parallel
        return set(self._cores[slot * share : (slot + 1) * share] if share else self._cores)

    def _devices(self, slot: int) -> dict[str, str]:
        """Return the GPUs of a slot, of CUDA_VISIBLE_DEVICES or else of all."""
        if not self.gpus:
            return {}
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = named.split(",") if named else [str(number) for number in range(self.parallel * self.ranks)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[slot * self.ranks : (slot + 1) * self.ranks])}


def _begin(parent: int, cores: set[int]) -> None:
    """Prepare a trial's process before it becomes `xtrain run`."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, cores)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)  # it died before the kernel was asked


@define(eq=False)
class _LocalTrial:
    process: Popen[bytes]

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)


SUBMITTING_FILE: Final = "submitting.json"
# Exit codes of a run that has recorded its end.
SAVED: Final = (0, EXIT_CODES[EndStatus.STOPPED])
# Seconds between two queries of a launcher: at first, and at most while nothing changes.
LEAST_SECONDS: Final = 1.0
MOST_SECONDS: Final = 15.0
# Seconds without an answer of a launcher before the driver gives up.
PATIENCE_SECONDS: Final = 900.0
# Seconds that the records of a run may lag behind its job, from another machine.
RECORDS_SECONDS: Final = 60.0
# Seconds between two stop requests: one sent before a run can handle it is lost.
STOP_SECONDS: Final = 10.0


@define(eq=False)
class JobTrials:
    """`TrialLauncher` that submits jobs.

    lineage: folder of the sweep, absolute. launcher: of all trials, of its code's class. folder: base of the spec's
    paths. python: interpreter that runs xtrain.
    """

    lineage: Path
    launcher: Any
    folder: Path
    python: str
    queue: "_Queue" = field(factory=lambda: _Queue(), init=False)

    def jobs(self, plans: Sequence[Plan]) -> list[Job]:
        """Return the jobs of trials."""
        return [
            Job(
                plan=plan, launcher=self.launcher, directory=self.lineage / plan.workspace["run"],
                folder=self.folder, python=self.python,
            )
            for plan in plans
        ]  # fmt: skip

    def files(self, trials: Sequence[TrialStart], name: str = "NAME") -> dict[Path, str]:
        """Return the submitted files, path → content; trials with the same requirements together."""
        files: dict[Path, str] = {}
        for number, (jobs, logs) in enumerate(self._together(trials)):
            files |= self._code.trial_files(jobs, f"{name}{number or ''}", logs)
        return files

    def start(self, trials: Sequence[TrialStart]) -> list[StartedTrial]:
        submitted: dict[Path, SubmittedJob] = {}
        for jobs, logs in self._together(trials):
            submitted |= self._submit(jobs, logs)
        return [self._follow(job.directory, submitted[job.directory]) for job in self.jobs([t.plan for t in trials])]

    def still_going(self, directories: Sequence[Path]) -> list[StartedTrial | None]:
        self._note_found()
        return [self._still_going(directory.absolute()) for directory in directories]

    def _still_going(self, directory: Path) -> StartedTrial | None:
        job = read_job(directory)
        if job is None or job.kind != self.launcher.kind:
            refuse_job(directory)
            return None
        return None if job_states([job])[0].over else self._follow(directory, job)

    @property
    def _code(self) -> TrialJobs:
        return trial_jobs(self.launcher.kind)

    @property
    def _note(self) -> Path:
        return self.lineage / FOLDER / SUBMITTING_FILE

    def _together(self, trials: Sequence[TrialStart]) -> list[tuple[list[Job], list[Path]]]:
        """Return groups of jobs with the same requirements, and their logs."""
        groups: dict[tuple[int, ...], tuple[list[Job], list[Path]]] = {}
        for job, trial in zip(self.jobs([start.plan for start in trials]), trials, strict=True):
            jobs, logs = groups.setdefault((job.nodes, job.gpus, job.patience), ([], []))
            jobs.append(job)
            logs.append(trial.log.absolute())
        return list(groups.values())

    def _submit(self, jobs: Sequence[Job], logs: Sequence[Path]) -> dict[Path, SubmittedJob]:
        name = f"{re.sub(r'[^A-Za-z0-9.-]+', '-', self.lineage.name).strip('-')}-{os.urandom(4).hex()}"
        plans = {job.files / PLAN_FILE: dumps(job.plan) for job in jobs}
        note = json.dumps({"name": name, "plans": [str(plan) for plan in plans]})
        for log in logs:
            log.parent.mkdir(parents=True, exist_ok=True)
        write_files({**self._code.trial_files(jobs, name, logs), **plans, self._note: note})
        return self._noted(jobs, self._code.submit_trials(jobs, name))

    def _note_found(self) -> None:
        """Record the jobs that a driver submitted before it was killed."""
        if not self._note.is_file():
            return
        note = read_json(self._note)
        jobs = self.jobs([load_plan(Path(plan_file)) for plan_file in note["plans"]])
        self._noted(jobs, self._code.find_trials(jobs, note["name"]) or ())

    def _noted(self, jobs: Sequence[Job], ids: Sequence[str]) -> dict[Path, SubmittedJob]:
        submitted = {job.directory: note_submitted(job, id) for job, id in zip(jobs, ids, strict=False)}
        durable.forget(self._note)
        return submitted

    def _follow(self, directory: Path, job: SubmittedJob) -> StartedTrial:
        self.queue.add(job)
        return _JobTrial(self.queue, job, directory, self.lineage / "logs" / f"{directory.name}.log")


def stop_jobs(lineage: Path) -> int:
    """Let the trials of a sweep without a driver save and end; return their number. Raises EnvironmentFault."""
    notes = sorted((lineage / FOLDER).glob(f"*/{JOB_FILE}"))
    jobs = [job for note in notes if (job := read_job(lineage / note.parent.name)) is not None]
    going = [job for job, state in zip(jobs, job_states(jobs), strict=True) if not state.over]
    for job in going:
        trial_jobs(job.kind).stop(launcher_of_job(job), job.id)
    return len(going)


def trial_jobs(kind: str) -> TrialJobs:
    """Load the code of a launcher that has trials."""
    return cast(TrialJobs, job_launcher(kind))


@define(eq=False)
class _Queue:
    """States of the trials' jobs, queried together and not too often."""

    jobs: dict[str, SubmittedJob] = field(factory=dict)
    states: dict[str, QueueState] = field(factory=dict)
    pause: float = field(factory=lambda: LEAST_SECONDS)
    asked: float = field(factory=time.monotonic)
    answered: float = field(factory=time.monotonic)

    def add(self, job: SubmittedJob) -> None:
        self.jobs[job.id] = job
        self.pause = LEAST_SECONDS

    def drop(self, job: SubmittedJob) -> None:
        self.jobs.pop(job.id, None)
        self.states.pop(job.id, None)

    def state(self, job: SubmittedJob) -> QueueState | None:
        """Return the last known state; None before the first. Raises EnvironmentFault after a long time without an
        answer."""
        now = time.monotonic()
        if now - self.asked >= self.pause:
            self.asked = now
            self._ask(now)
        return self.states.get(job.id)

    def _ask(self, now: float) -> None:
        jobs = list(self.jobs.values())
        try:
            states = {job.id: state for job, state in zip(jobs, job_states(jobs), strict=True)}
        except EnvironmentFault:
            if now - self.answered > PATIENCE_SECONDS:
                raise
            states = self.states
        else:
            self.answered = now
        self.pause = min(self.pause * 2, MOST_SECONDS) if states == self.states else LEAST_SECONDS
        self.states = states


@define(eq=False)
class _JobTrial:
    queue: _Queue
    job: SubmittedJob
    directory: Path
    log: Path
    _before: RunEndEvent | None = field(init=False)
    _code: int | None = field(default=None, init=False)
    _over: float = field(default=0.0, init=False)
    _stopped: float | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._before = last_end(self.directory)

    def poll(self) -> int | None:
        if self._code is None and (state := self.queue.state(self.job)) is not None and state.over:
            self._code, self._over = self._collected(), time.monotonic()
            self.queue.drop(self.job)
        late = self._code in SAVED and self._stopped is None and last_end(self.directory) == self._before
        return None if late and time.monotonic() - self._over < RECORDS_SECONDS else self._code

    def stop(self) -> None:
        asked_before = self._stopped is not None and time.monotonic() - self._stopped < STOP_SECONDS
        if self._code is None and not asked_before:
            self._stopped = time.monotonic()
            with suppress(EnvironmentFault):  # it is asked again
                trial_jobs(self.job.kind).stop(launcher_of_job(self.job), self.job.id)

    def _collected(self) -> int:
        """Return the exit code: from the launcher, else from the run's records, else 1."""
        try:
            ended = trial_jobs(self.job.kind).collect(launcher_of_job(self.job), self.job.id)
        except EnvironmentFault:
            ended = EndedJob()
        if ended.output:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(ended.output)
        if ended.code is not None:
            return ended.code
        end = last_end(self.directory)
        return 1 if end is None or end.exit_code is None else end.exit_code
