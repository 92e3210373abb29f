"""Trials as jobs, which go on without their driver: nothing is submitted twice, and no result is lost."""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from attrs import define, field
from sweeps import DiesAfter, Killed, WrittenTrial, WrittenTrials, driver, write_spec

from xtrain.cli.main import main
from xtrain.components.launchers.local import LocalLauncher
from xtrain.components.launchers.slurm import Slurm
from xtrain.plan.plan import Plan
from xtrain.records.sweep import SweepState
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.jobs import submitted as jobs_module
from xtrain.runtime.jobs import sweep as driver_module
from xtrain.runtime.jobs import trials as job_trials
from xtrain.runtime.jobs.submitted import EndedJob, Job, QueueState, note_submitted
from xtrain.runtime.jobs.trials import JobTrials, LocalTrials


@define
class QueuedJob:
    """looks: questions until it has run. code: how it ended."""

    plan: Plan
    name: str
    looks: int
    code: int | None = None


@define
class Queue:
    """A `TrialJobs` in memory. chance: of a job to be gone without a trace; unsubmitted, forgotten: of a driver to be
    killed just before or after its jobs are submitted. answers: of it to answer. least: looks until a job has run.
    known: of its exit code to be known."""

    random: Random
    chance: float = 0.0
    unsubmitted: float = 0.0
    forgotten: float = 0.0
    answers: float = 1.0
    least: int = 0
    known: float = 0.5
    jobs: dict[str, QueuedJob] = field(factory=dict)
    stopped: list[str] = field(factory=list)
    trained: WrittenTrials = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.trained = WrittenTrials(self.random)

    def trial_files(self, jobs: Sequence[Job], name: str, logs: Sequence[Path]) -> dict[Path, str]:
        return {job.files / "job.sh": name for job in jobs}

    def submit_trials(self, jobs: Sequence[Job], name: str) -> list[str]:
        assert all(json.loads((job.files / "job-plan.json").read_text())["name"] == "tiny" for job in jobs)
        if self.random.random() < self.unsubmitted:
            raise Killed
        ids = []
        for job in jobs:
            ids.append(f"{len(self.jobs)}")
            self.jobs[ids[-1]] = QueuedJob(job.plan, name, self.least + self.random.randrange(6))
        if self.random.random() < self.forgotten:
            raise Killed
        return ids

    def find_trials(self, jobs: Sequence[Job], name: str) -> list[str] | None:
        return [id for id, each in self.jobs.items() if each.name == name] or None

    def states(self, launcher, ids: Sequence[str]) -> dict[str, QueueState]:
        if self.random.random() >= self.answers:
            raise EnvironmentFault("X461", "the queue does not answer")
        return {id: self._state(self.jobs[id]) for id in ids}

    def _state(self, job: QueuedJob) -> QueueState:
        job.looks -= 1
        if job.looks < 0 and job.code is None:
            job.code = -9 if self.random.random() < self.chance else self.trained.written(job.plan, 0).code
        return QueueState(over=job.code is not None, word="RUNNING")

    def stop(self, launcher, id: str) -> None:
        self.stopped.append(id)
        self.jobs[id].code = 75

    def collect(self, launcher, id: str) -> EndedJob:
        return EndedJob(code=self.jobs[id].code if self.random.random() < self.known else None)


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch, tmp_path):
    monkeypatch.setattr(driver_module, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(job_trials, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(job_trials, "MOST_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def queue(monkeypatch) -> Queue:
    found = Queue(Random(3))
    monkeypatch.setattr(jobs_module, "job_launcher", lambda kind: found)
    monkeypatch.setattr(job_trials, "job_launcher", lambda kind: found)
    return found


def job_driver(path: str, root: str, show=lambda event: None):
    sweep = driver(path, WrittenTrials(Random(0)), (f"workspace.root={root}", "sweep.retries=100"), show)
    sweep.launcher = JobTrials(sweep.folder.absolute(), Slurm(), Path.cwd(), "python")
    return sweep


def outcome(state: SweepState) -> list[tuple]:
    return [
        (each.number, each.name, each.point, each.values, each.decisions, each.value, each.status)
        for each in state.trials.values()
    ]


METHOD = "method asha { first = 2 steps, suggest = random }, trials = 10, parallel = 3"


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[tuple]:
    """What trials that are processes come to."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver_module, "LOOK_SECONDS", 0.0)
        patch.chdir(folder)
        sweep = driver(write_spec(folder, METHOD), WrittenTrials(Random(0)))
        sweep.run()
    return outcome(sweep.state)


def test_jobs_come_to_what_processes_come_to(tmp_path, queue, alone):
    path = write_spec(tmp_path, METHOD)
    sweep = job_driver(path, "jobs")
    assert sweep.run() == "done"
    assert outcome(sweep.state) == alone
    first = [each for each in queue.jobs.values() if each.name == queue.jobs["0"].name]
    assert len(first) == 3, "those that begin together are submitted together"
    assert not list(tmp_path.rglob("submitting.json"))


def test_a_killed_driver_submits_nothing_twice(tmp_path, queue, alone):
    """It is killed behind some of its events, before and after its jobs are submitted, and the queue may be silent."""
    path = write_spec(tmp_path, METHOD)
    queue.unsubmitted, queue.forgotten, queue.answers = 0.15, 0.3, 0.8
    starts = 0
    while True:
        starts += 1
        sweep = job_driver(path, "killed", DiesAfter(queue.random.randrange(1, 9)))
        try:
            assert sweep.run() == "done"
        except (Killed, EnvironmentFault):
            sweep._lock.close()
            continue
        break
    assert starts > 5
    assert outcome(SweepState.read(sweep.folder)) == alone
    pieces = [(each.plan.workspace["run"], each.plan.timeline.stop_at) for each in queue.jobs.values()]
    assert len(set(pieces)) == len(pieces)


def test_a_job_that_is_gone_is_submitted_again(tmp_path, queue, alone):
    path = write_spec(tmp_path, METHOD)
    queue.chance = 0.4
    sweep = job_driver(path, "jobs")
    assert sweep.run() == "done"
    assert outcome(sweep.state) == alone
    assert sum(each.code == -9 for each in queue.jobs.values()) > 3


def test_a_stop_reaches_jobs_once_and_they_end(tmp_path, queue):
    path = write_spec(tmp_path, METHOD)
    sweep, queue.least = job_driver(path, "jobs"), 100
    sweep._ask()
    sweep._start()
    assert len(queue.jobs) == 3
    sweep.stop()
    assert sweep.run() == "stopped"
    assert sorted(queue.stopped) == ["0", "1", "2"]


def test_jobs_of_a_driver_that_is_gone_are_stopped(tmp_path, queue, capsys):
    path = write_spec(tmp_path, METHOD)
    sweep, queue.least = job_driver(path, "jobs"), 100
    sweep._ask()
    sweep._start()
    assert main(["sweep", "stop", str(sweep.folder)]) == 0, "its driver is there and is asked"
    assert (sweep.folder / "stop").exists() and not queue.stopped
    sweep._lock.close()
    queue.jobs["1"].code = 0
    assert main(["sweep", "show", str(sweep.folder)]) == 0
    assert "slurm 0 RUNNING" in capsys.readouterr().out
    assert main(["sweep", "stop", str(sweep.folder)]) == 0
    assert queue.stopped == ["0", "2"] and "2 jobs of its trials" in capsys.readouterr().out
    assert main(["sweep", "stop", str(sweep.folder)]) == 2


def test_a_trial_has_one_launcher_at_a_time(tmp_path, queue):
    path = write_spec(tmp_path, METHOD)
    sweep, queue.least = job_driver(path, "jobs"), 100
    sweep._ask()
    sweep._start()
    directories = [sweep.folder / each.name for each in sweep.state.trials.values()]
    with pytest.raises(EnvironmentFault) as refused:
        LocalTrials(1, 1, gpus=False).still_going(directories)
    assert refused.value.code == "X707" and "slurm 0 is RUNNING" in str(refused.value)
    other = JobTrials(sweep.folder.absolute(), Slurm(), Path.cwd(), "python")
    going = list(other.still_going(directories))
    assert len(going) == len(directories) > 0 and None not in going
    job = other.jobs([queue.jobs["0"].plan])[0]
    note_submitted(
        Job(plan=job.plan, launcher=LocalLauncher(), directory=job.directory, folder=job.folder, python=""), "1"
    )
    with pytest.raises(EnvironmentFault):
        other.still_going(directories)


def test_records_may_come_later_than_the_job_is_over(tmp_path, queue, monkeypatch):
    path = write_spec(tmp_path, "method random, trials = 1")
    sweep = job_driver(path, "jobs")
    sweep._ask()
    sweep._start()
    queue.jobs["0"].code, trial = 0, sweep._going[0].started
    queue.known = 1.0
    assert [trial.poll() for _ in range(3)] == [None] * 3
    queue.trained.written(queue.jobs["0"].plan, 0)
    assert trial.poll() == 0 and sweep.run() == "done"


def test_a_folder_of_runs_that_the_driver_does_not_see(tmp_path, queue, monkeypatch):
    monkeypatch.setattr(job_trials, "RECORDS_SECONDS", 0.0)
    sweep = job_driver(write_spec(tmp_path, "method random, trials = 2"), "jobs")
    monkeypatch.setattr(WrittenTrials, "written", lambda self, plan, slot: WrittenTrial(0, 0))
    queue.known = 1.0
    assert sweep.run() == "stopped" and "machines must share this folder" in sweep.fault
    assert len(queue.jobs) == 1


def test_a_queue_that_is_silent_for_long_ends_the_driver(tmp_path, queue, monkeypatch):
    monkeypatch.setattr(job_trials, "PATIENCE_SECONDS", 0.0)
    path = write_spec(tmp_path, METHOD)
    sweep = job_driver(path, "jobs")
    queue.answers = 0.0
    with pytest.raises(EnvironmentFault):
        sweep.run()
