"""A profile in one process: exactly the steps that were asked for, and nothing torn whatever goes wrong."""

import json
from pathlib import Path

import pytest
import torch
from attrs import evolve
from one_rank import one_rank

from xtrain.components.actions import profile_torch as module
from xtrain.components.actions.profile_torch import Profile, Subject
from xtrain.runtime.base.state import Progress
from xtrain.runtime.inspect.profile_summary import ProfileRecorder
from xtrain.runtime.loop.commands import UnderWay
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import Records


class Run:
    """Steps of a run of one rank, in each of which a matrix of another size is multiplied."""

    def __init__(self, folder: Path, *, number: int = 0) -> None:
        self.records = Records.open(folder, number)
        self.progress, self.beat, self.under_way = Progress(), HeartbeatWriter(), UnderWay()
        self.rank = one_rank(number)
        self.answers: list[tuple[bool, str]] = []

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.beat.at("step.forward_backward")
            size = 10 + self.progress.step + 1
            torch.mm(torch.ones(size, size), torch.ones(size, size))
            self.beat.at("step.optimizer")
            self.progress.step += 1
            self.under_way.after_step()

    def begin(self, **settings) -> Profile:
        given = {"wait": 0, "warmup": 0, "active": 1, "ranks": None, "shapes": False, "stacks": False, "memory": False}
        found = Profile.begin(
            Subject(node="tick.profile", **given | settings),
            rank=self.rank,
            records=self.records,
            progress=self.progress,
            beat=self.beat,
            report=lambda done, text: self.answers.append((done, text)),
        )
        self.under_way.begin(found)
        return found

    @property
    def events(self) -> list[dict]:
        path = self.records.directory / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def files(self) -> list[str]:
        folder = self.records.directory / "profile"
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def run(tmp_path):
    found = Run(tmp_path)
    yield found
    found.under_way.drop()
    found.records.close()


def of(run, name):
    """The entries of the trace in the one folder that is there."""
    (path,) = (run.records.directory / "profile").glob("*/rank-00000.json")
    return [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X" and e["name"].startswith(name)]


@pytest.mark.parametrize(
    ("wait", "warmup", "active"), [(0, 0, 1), (0, 1, 2), (2, 0, 1), (1, 1, 3), (3, 2, 1)], ids=lambda value: str(value)
)
def test_exactly_the_steps_that_are_asked_for(run, wait, warmup, active):
    run.steps(4)
    run.begin(wait=wait, warmup=warmup, active=active, shapes=True)
    run.steps(wait + warmup + active - 1)
    assert run.under_way and not run.files and not run.answers
    run.steps(1)
    assert not run.under_way and run.beat.on_node is None
    first, last = 5 + wait + warmup, 4 + wait + warmup + active
    folder = f"steps-{first:012d}-{last:012d}"
    assert run.files == [f"{folder}/{name}" for name in ("rank-00000.json", "rank-00000.summary.json", "summary.md")]
    assert sorted(e["name"] for e in of(run, "ProfilerStep#")) == [f"ProfilerStep#{n}" for n in range(first, last + 1)]
    # A step is recognised by the size of its matrices.
    sizes = [e["args"]["Input Dims"][0][0] for e in of(run, "aten::mm")]
    assert sizes == [10 + n for n in range(first, last + 1)]
    assert len(of(run, "step.forward_backward")) == len(of(run, "step.optimizer")) == active
    (event,) = run.events
    assert (event["event"], event["first"], event["last"], event["step"]) == ("profile", first, last, last)
    (answer,) = run.answers
    assert answer == (True, f"{active} steps in {run.records.directory / 'profile' / folder}, 1 trace")
    run.steps(2)
    assert len(run.events) == 1


def test_what_is_recorded_beside(run):
    sizes = {}
    for setting in ("", "shapes", "stacks", "memory"):
        run.begin(**({setting: True} if setting else {}))
        run.steps(1)
        assert run.answers[-1][0], run.events
        (path,) = (run.records.directory / "profile").glob(f"steps-{run.progress.step:012d}-*/rank-00000.json")
        entries = json.loads(path.read_text())["traceEvents"]
        sizes[setting] = (
            any("Input Dims" in e.get("args", {}) for e in entries),
            any(e.get("cat") == "python_function" for e in entries),
            any(e.get("name") == "[memory]" for e in entries),
        )
    assert sizes == {
        "": (False, False, False),
        "shapes": (True, False, False),
        "stacks": (False, True, False),
        "memory": (False, False, True),
    }


def test_a_rank_that_is_not_asked_for_only_goes_along(tmp_path, monkeypatch):
    monkeypatch.setattr(ProfileRecorder, "of", lambda *_, **__: pytest.fail("it records"))
    run = Run(tmp_path)
    run.begin(ranks=[1], active=2)
    run.steps(2)
    assert not run.under_way and run.beat.on_node is None and not list(tmp_path.rglob("rank-*"))
    run.records.close()


def test_cut_short_it_keeps_the_steps_that_have_ended(run):
    run.begin(warmup=1, active=5)
    run.steps(3)
    run.under_way.cut_short("the run waits")
    assert not run.under_way and run.beat.on_node is None
    assert run.files[0] == "steps-000000000002-000000000003/rank-00000.json"
    (event,) = run.events
    assert event["note"] == "cut short, as the run waits" and event["last"] == 3
    (answer,) = run.answers
    assert (
        answer[0] and answer[1].startswith("2 of 5 steps in ") and answer[1].endswith("; cut short, as the run waits")
    )


@pytest.mark.parametrize("passed", [0, 1, 2])
def test_without_a_step_that_has_ended_nothing_is_left(run, passed):
    run.begin(wait=1, warmup=1, active=2)
    run.steps(passed)
    run.under_way.cut_short("the run goes back")
    assert not run.files and run.answers == [(False, "no step was recorded, as the run goes back")]
    # Torch's profiler is free again.
    run.begin()
    run.steps(1)
    assert len(run.files) == 3


@pytest.mark.parametrize("passed", [0, 1, 2, 3])
def test_of_a_run_that_fails_nothing_is_left(run, passed):
    run.begin(wait=1, warmup=1, active=2)
    run.steps(passed)
    run.under_way.drop()
    assert not run.under_way and not run.files and not run.answers and not run.events and run.beat.on_node is None
    run.begin()
    run.steps(1)
    assert len(run.files) == 3


def test_steps_that_are_trained_again_have_a_place_of_their_own(run):
    for number in ("", "-2", "-3"):
        run.begin(active=2)
        run.steps(2)
        run.progress.step -= 2
        folder = run.records.directory / f"profile/steps-000000000001-000000000002{number}"
        assert sorted(path.name for path in folder.iterdir())[0] == "rank-00000.json"
    ends = [Path(event["path"]).name.removeprefix("steps-000000000001-000000000002") for event in run.events]
    assert ends == ["", "-2", "-3"]


def test_leftovers_of_a_killed_process_are_removed(run):
    torn = run.records.directory / "profile/steps-000000000001-000000000002/rank-00000.json.partial"
    torn.parent.mkdir(parents=True)
    torn.touch()
    run.begin()
    assert not torn.exists()


def full(path):
    raise OSError(28, "No space left on device", str(path))


def half(recorder, path):
    original(recorder, path)
    path.write_bytes(path.read_bytes()[:-2000])


original = ProfileRecorder.write


@pytest.mark.parametrize(
    ("write", "part"),
    [(lambda _, path: full(path), "No space left"), (half, "holds no whole trace")],
    ids=["full", "torn"],
)
def test_what_cannot_be_written_is_reported_and_nothing_is_left_of_it(run, monkeypatch, write, part):
    monkeypatch.setattr(ProfileRecorder, "write", write)
    run.begin(active=2)
    run.steps(2)
    assert not run.files and not run.under_way
    (warning,) = run.events
    assert (
        warning["event"] == "warning" and part in warning["message"] and "rank 0 could not write" in warning["message"]
    )
    (answer,) = run.answers
    assert not answer[0] and answer[1].startswith("1 of 1 ranks could not write their traces")


def test_a_profiler_that_does_not_start_is_reported_and_steps_go_on(run, monkeypatch):
    monkeypatch.setattr(
        ProfileRecorder, "start", lambda _: (_ for _ in ()).throw(RuntimeError("somebody else records"))
    )
    run.begin(warmup=1, active=2)
    run.steps(3)
    assert not run.files and "somebody else records" in run.events[0]["message"]


def test_a_page_that_cannot_be_written_is_no_matter_of_the_traces(run, monkeypatch):
    monkeypatch.setattr(module, "summary_text", lambda *_, **__: 1 / 0)
    run.begin()
    run.steps(1)
    assert len(run.files) == 2 and [event["event"] for event in run.events] == ["warning", "profile"]
    assert run.answers[0][0]


@pytest.mark.gpu
def test_of_a_gpu_its_kernels_are_recorded(run):
    run.rank = evolve(run.rank, device=torch.device("cuda"))
    run.begin(warmup=1, active=2)
    left = torch.ones(512, 512, device="cuda")
    for _ in range(3):
        torch.mm(left, left).sum().item()
        run.steps(1)
    (path,) = (run.records.directory / "profile").glob("*/rank-00000.summary.json")
    found = json.loads(path.read_text())
    assert found["device"] == "gpu" and found["shares"]["matmul"] > 0 and found["shares"]["idle"] > 0
