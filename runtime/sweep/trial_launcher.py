"""Where the trials of a sweep run: `LocalTrials` starts them on this machine, `JobTrials` (`job_trials.py`) as jobs."""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import Final, Protocol

from attrs import define, field, frozen

from xtrain.planner.plan import Plan
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.launch.jobs import job_state, read_job

_PR_SET_PDEATHSIG: Final = 1


@frozen
class TrialStart:
    """plan: of the trial up to its next rung. file: where it is saved. log: where its output goes. slot: which of the
    trials that run at once, from 0; no other that goes on has it."""

    plan: Plan
    file: Path
    log: Path
    slot: int


class StartedTrial(Protocol):
    """A run under way."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it goes on."""
        ...

    def stop(self) -> None:
        """Let it save a checkpoint and end; may be called again."""
        ...


class TrialLauncher(Protocol):
    """Starts `xtrain run PLAN`."""

    def start(self, trials: Sequence[TrialStart]) -> Sequence[StartedTrial]:
        """Start some that begin at the same time."""
        ...

    def still_going(self, directories: Sequence[Path]) -> Sequence[StartedTrial | None]:
        """For each run directory the trial that an earlier driver has started and that outlives it."""
        ...


def refuse_job(directory: Path) -> None:
    """Raise EnvironmentFault where the run of a trial is in the hands of another launcher."""
    job = read_job(directory)
    if job is not None and not (state := job_state(job)).over:
        raise EnvironmentFault(
            "X707",
            f"the trial {directory} has a job already: {job.kind} {job.id} is {state}; go on with `xtrain launch`, or "
            f"cancel it with `xtrain launch --cancel {directory}`",
        )


@define(eq=False)
class LocalTrials:
    """Trials as processes of this machine, each with its share of the cores and of the devices.

    parallel: how many run at once. ranks: of a trial. gpus: whether each of them takes one. A trial gets SIGTERM when
    the process that started it dies.
    """

    parallel: int
    ranks: int
    gpus: bool = False
    _cores: list[int] = field(factory=lambda: sorted(os.sched_getaffinity(0)))

    def start(self, trials: Sequence[TrialStart]) -> list[StartedTrial]:
        return [self._started(each) for each in trials]

    def still_going(self, directories: Sequence[Path]) -> list[StartedTrial | None]:
        """None: a trial gets SIGTERM with its driver."""
        for each in directories:
            refuse_job(each.absolute())
        return [None] * len(directories)

    def _started(self, trial: TrialStart) -> StartedTrial:
        environment = {**os.environ, **self._devices(trial.slot)}
        command = [sys.executable, "-P", "-m", "xtrain", "run", str(trial.file), "--ui", "plain"]
        trial.log.parent.mkdir(parents=True, exist_ok=True)
        with trial.log.open("ab") as output:
            process = Popen(
                command, stdin=DEVNULL, stdout=output, stderr=STDOUT, env=environment,
                start_new_session=True, preexec_fn=_Begin(os.getpid(), self._cores_of(trial.slot)),
            )  # fmt: skip
        return _LocalTrial(process)

    def _cores_of(self, slot: int) -> set[int]:
        """The cores of a slot; of fewer cores than trials all."""
        share = len(self._cores) // self.parallel
        return set(self._cores[slot * share : (slot + 1) * share] if share else self._cores)

    def _devices(self, slot: int) -> dict[str, str]:
        """The GPUs of a slot, of those that the environment names, else of all."""
        if not self.gpus:
            return {}
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = named.split(",") if named else [str(number) for number in range(self.parallel * self.ranks)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[slot * self.ranks : (slot + 1) * self.ranks])}


@define(eq=False)
class _Begin:
    """What a trial's process does before it becomes `xtrain run`."""

    parent: int
    cores: set[int]

    def __call__(self) -> None:
        if sys.platform != "linux":
            return
        os.sched_setaffinity(0, self.cores)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != self.parent:
            os._exit(1)  # it died before the kernel was asked


@define(eq=False)
class _LocalTrial:
    process: Popen[bytes]

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
