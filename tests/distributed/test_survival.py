"""Signals, deaths and restarts of real runs."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from commands import xtrain
from forking import ForkedCommand
from live_runs import gone, wait_for_step, workers
from projects import Project, curve, events

LONG = {"steps": 4000}
# Seconds for what is done at once, on a busy machine too: ranks left in a collective would wait for many minutes.
AT_ONCE = 120.0
BROKEN_SCHEDULER = """
import os
if os.environ.get("RANK") == "1":
    from functools import wraps
    from attrs import evolve
    from xtrain.runtime.base.ops import OPS, load_ops
    load_ops()
    scheduler = OPS["setup.scheduler"]
    @wraps(scheduler.function)
    def leave(**given):
        raise RuntimeError("the scheduler has left the building")
    OPS["setup.scheduler"] = evolve(scheduler, function=leave)
"""
# Minutes of work, though the model may end a single text at any token.
ENDLESS = "generate { prompts = [" + '"line", ' * 8000 + "], tokens = 400 }"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, under_torchrun) -> Callable[[str], list[tuple[int, float, float]]]:
    """The curve of 40 steps that nothing has stopped, by number of ranks: several are started by torchrun."""

    @cache
    def curve_of(world: str) -> list[tuple[int, float, float]]:
        if int(world) > 1:
            return curve(under_torchrun(world)[0])
        project = Project(tmp_path_factory.mktemp("unbroken"))
        return curve(project.run(project.spec(steps=40), "--world", world))

    return curve_of


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory) -> Callable[[str], tuple[Path, str]]:
    """Directory and output of a run of 40 steps whose ranks torchrun has started, by their number."""

    @cache
    def run(world: str) -> tuple[Path, str]:
        project = Project(tmp_path_factory.mktemp("torchrun"))
        process = project.start(project.spec(steps=40), "--world", world, "--ui", "plain", torchrun=int(world))
        out, err = process.communicate(timeout=AT_ONCE)
        assert process.returncode == 0, out + err
        return project.directory(), out

    return run


@pytest.mark.slow
@pytest.mark.parametrize("world", ["1", "2"])
def test_a_stopped_run_goes_on_and_its_curve_is_that_of_an_unbroken_one(project, unbroken, world):
    spec = project.spec(steps=40)
    process = project.start(spec, "--world", world, "--ui", "plain")
    wait_for_step(project, process, 10)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=AT_ONCE)
    assert process.returncode == 75, out + err
    assert "Traceback" not in out + err
    stopped = curve(project.directory())
    assert 10 <= len(stopped) < 40
    directory = project.run(spec, "--world", world)
    assert curve(directory) == unbroken(world)
    assert events(directory, "resumed")[0]["step"] == stopped[-1][0]


def test_ctrl_c_saves_and_says_130(project):
    spec = project.spec(**LONG)
    process = project.start(spec, "--world", "2")
    wait_for_step(project, process, 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=AT_ONCE)
    assert process.returncode == 130 and "Traceback" not in out + err
    directory = project.directory()
    (saved,) = events(directory, "checkpoint")
    assert saved["step"] == curve(directory)[-1][0]
    assert gone(directory, 60)


def test_a_rank_that_dies_ends_the_run_at_once(project):
    spec = project.spec(**LONG)
    process = project.start(spec, "--world", "2", "--ui", "plain")
    wait_for_step(project, process, 3)
    directory = project.directory()
    victim = next(p for p in workers(directory) if b"\0RANK=1\0" in Path(f"/proc/{p}/environ").read_bytes())
    os.kill(victim, signal.SIGKILL)
    out, err = process.communicate(timeout=AT_ONCE)
    assert process.returncode == 1
    assert "rank 1" in out and "SIGKILL" in out, out + err
    assert gone(directory, 60)


def test_an_exception_in_a_rank_is_shown_with_its_traceback(project):
    """In the middle of setting up, on one rank alone."""
    (project.folder / "sitecustomize.py").write_text(BROKEN_SCHEDULER)
    spec = project.spec(**LONG)
    environment = {**project.environment, "PYTHONPATH": str(project.folder)}
    command = ForkedCommand(["run", spec, "--world", "2", "--ui", "plain"], project.folder, environment)
    out, err = command.communicate(timeout=AT_ONCE)
    assert command.returncode == 1
    assert "the scheduler has left the building" in out and "rank 1" in out, out + err
    assert gone(project.directory(), 60)


def test_ranks_do_not_outlive_a_killed_launcher_and_leave_a_checkpoint(project):
    spec = project.spec(**LONG)
    process = project.start(spec, "--world", "2")
    wait_for_step(project, process, 3)
    directory = project.directory()
    assert len(workers(directory)) == 2
    process.kill()
    process.communicate()
    assert gone(directory, 60)
    assert len(events(directory, "checkpoint")) == 1


def test_a_killed_run_goes_on_from_its_last_checkpoint(project, unbroken):
    keep_two = ("--set", "checkpoint.keep=2")
    spec = project.spec(steps=40, more="every 10 steps checkpoint", name="often.xtrain")
    process = project.start(spec, *keep_two)
    wait_for_step(project, process, 25)
    (worker,) = workers(project.directory())
    os.kill(worker, signal.SIGKILL)
    process.kill()
    process.communicate()
    directory = project.run(spec, *keep_two)
    assert events(directory, "resumed")[0]["step"] % 10 == 0
    assert curve(directory) == unbroken("1")


def test_a_finished_run_has_nothing_left_to_do_and_can_be_extended(project):
    spec = project.spec(steps=6)
    directory = project.run(spec)
    (first,), set_up = events(directory, "run_start"), len(events(directory, "setup"))
    assert project.run(spec) == directory
    assert len(curve(directory)) == 6
    again = {"attempt": 2, "resumed_step": 6, "time": events(directory, "run_start")[1]["time"]}
    assert events(directory, "run_start")[1] == first | again
    assert len(events(directory, "setup")) == set_up  # no rank was started
    end = events(directory, "run_end")[-1]
    assert (end["status"], end["exit_code"], end["step"], end["loss"]) == ("complete", 0, 6, None)
    assert project.run(spec, "--set", "experiment.budget=9 steps") == directory
    assert [step for step, *_ in curve(directory)] == list(range(1, 10))


def test_a_run_that_shall_not_be_resumed_begins_anew_and_loses_nothing(project):
    spec = project.spec(steps=4)
    first = project.run(spec)
    before = curve(first)
    assert project.run(spec, "--set", "checkpoint.resume=false") == first
    assert curve(first) == before
    (aside,) = (d for d in first.parent.iterdir() if "~" in d.name)
    assert curve(aside) == before and len(events(first, "run_start")) == 1


def test_two_processes_do_not_share_a_run_directory(project):
    spec = project.spec(**LONG)
    process = project.start(spec)
    wait_for_step(project, process, 1)
    other = project.start(spec)
    _, err = other.communicate(timeout=AT_ONCE)
    assert other.returncode == 3 and "another process" in err and "Traceback" not in err
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=AT_ONCE)
    assert process.returncode == 75


def test_under_torchrun_the_same_command_is_a_rank(under_torchrun, unbroken):
    directory, out = under_torchrun("2")
    assert len(re.findall(r"^step 40/40", out, re.M)) == 1
    first = slice(5)  # rounding is a matter of layout, and grows
    ours, theirs = curve(directory), unbroken("1")
    assert len(ours) == len(theirs)
    assert all(abs(a[1] - b[1]) < 1e-5 * b[1] for a, b in zip(ours[first], theirs[first], strict=True))


def test_files_that_are_not_there_are_reported(project):
    path = project.folder / project.spec(steps=2)
    path.write_text(path.read_text().replace('jsonl("data.jsonl")', 'text("nothing/*.txt")'))
    assert xtrain("plan", path).returncode == 0
    process = project.start(path.name)
    out, err = process.communicate(timeout=AT_ONCE)
    assert process.returncode == 3
    assert "nothing/*.txt" in out + err and "Traceback" not in out + err


def test_another_world_than_planned_is_reported_before_anything_starts(project):
    spec = project.spec(steps=5)
    process = project.start(spec, "--world", "4", torchrun=2)
    out, err = process.communicate(timeout=AT_ONCE)
    assert process.returncode != 0
    assert "4 ranks, but 2 were started" in out + err


@pytest.mark.slow  # test_ways_in.py goes on with a run by its saved plan
def test_the_plan_that_was_reviewed_is_the_one_that_runs(project):
    spec = project.spec(steps=3)
    assert xtrain("plan", spec, "--out", "plan.json", cwd=project.folder).returncode == 0
    directory = project.run("plan.json")
    reviewed, ran = (json.loads((d / "plan.json").read_text())["id"] for d in (project.folder, directory))
    assert reviewed == ran


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_and_said(project):
    spec = project.spec(steps=40, more="every 10 steps checkpoint")
    whole = project.run(spec)
    before = curve(whole)
    newest = whole / "checkpoints" / "ckpt-s000000000040"
    shard = next(newest.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:100])
    (whole / "finished").unlink()
    assert project.run(spec) == whole
    assert events(whole, "resumed")[0]["step"] == 30
    assert "damaged" in events(whole, "warning")[0]["message"]
    assert curve(whole) == before


@pytest.mark.slow
def test_a_run_directory_of_another_model_is_left_as_it_was(project):
    spec = project.spec(steps=4)
    named = ("--set", "workspace.run=mine")
    directory = project.run(spec, *named)
    plan = (directory / "plan.json").read_text()
    project.run(spec, *named, "--set", "model.dim=64", expect=3)
    assert (directory / "plan.json").read_text() == plan
    command = project.command("generate", str(directory), "--prompt", "line", "--tokens", "3")
    assert subprocess.run(command, capture_output=True, cwd=project.folder.parent).returncode == 0


@pytest.mark.slow
def test_a_run_killed_at_its_end_still_does_what_was_to_happen_there(project):
    spec = project.spec(steps=6, more=f"on finish {ENDLESS}")
    process = project.start(spec)
    wait_for_step(project, process, 6)
    directory = project.directory()
    deadline = time.monotonic() + AT_ONCE
    while not events(directory, "checkpoint") and time.monotonic() < deadline:
        time.sleep(0.02)
    (worker,) = workers(directory)
    os.kill(worker, signal.SIGKILL)
    process.communicate()
    assert process.returncode == 1
    short = ("--set", "checkpoint.keep=3")
    spec = project.spec(steps=6, more='on finish generate { prompts = ["line"], tokens = 4 }')
    assert project.run(spec, *short) == directory
    assert len(events(directory, "generate")) == 1
    assert events(directory, "run_end")[-1]["status"] == "done"
    project.run(spec, *short)
    assert len(events(directory, "generate")) == 1


def test_ranks_that_cannot_stop_in_time_are_a_failure(project):
    spec = project.spec(steps=3, more=f"launch {{ stop_deadline = 1 s }}\non finish {ENDLESS}")
    process = project.start(spec, "--ui", "plain")
    wait_for_step(project, process, 3)
    beat, deadline = project.directory() / "ranks" / "00000.beat", time.monotonic() + AT_ONCE
    while b"finish.generate" not in beat.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=AT_ONCE)
    assert process.returncode == 1
    assert "did not exit within 1 s" in out


def test_a_rank_variable_alone_is_no_launcher(project):
    spec = project.spec(steps=2)
    command = ForkedCommand(["run", spec, "--ui", "none"], project.folder, {**project.environment, "RANK": "0"})
    assert command.wait(timeout=AT_ONCE) == 0
