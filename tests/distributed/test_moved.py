"""The directory of a live run is moved or removed."""

import shutil
from pathlib import Path

import pytest
from live_runs import wait_for_step
from projects import Project, events, records


def started(tmp_path: Path):
    project = Project(tmp_path)
    command = project.start(
        project.spec(steps=120, more="every 10 steps checkpoint"), "--ui", "plain", "--set", "checkpoint.keep=none"
    )
    wait_for_step(project, command, 12)
    return project, command, project.directory()


def test_a_directory_that_is_moved_comes_back_with_all_that_was_written_meanwhile(tmp_path):
    project, command, directory = started(tmp_path)
    directory.rename(tmp_path / "away")
    out, err = command.communicate(timeout=240)
    assert command.returncode == 0, out + err
    assert not (tmp_path / "away").exists() and project.directory() == directory
    warning = next(each["message"] for each in events(directory, "warning"))
    assert f"was moved to {tmp_path}/away while the run writes into it, and was moved back to {directory}" in warning
    assert [each["step"] for each in records(directory, "metrics")] == list(range(1, 121))
    saved = {path.name for path in (directory / "checkpoints").glob("ckpt-s*")}
    assert saved == {f"ckpt-s{step:012d}" for step in range(10, 121, 10)}


@pytest.mark.parametrize("way", ["removed", pytest.param("another", marks=pytest.mark.slow)])
def test_a_run_whose_directory_is_gone_saves_stops_and_says_why(tmp_path, way):
    project, command, directory = started(tmp_path)
    if way == "removed":
        while directory.exists():  # the run replaces files meanwhile
            shutil.rmtree(directory, ignore_errors=True)
    else:
        directory.rename(tmp_path / "away")
        directory.mkdir()
        (directory / "mine.txt").write_text("another folder")
    out, err = command.communicate(timeout=240)
    assert command.returncode == 75, out + err
    reason = "the run directory was " + ("removed" if way == "removed" else f"moved to {tmp_path}/away, and")
    (end,) = events(directory, "run_end")
    assert end["status"] == "stopped" and reason in end["reason"] and reason in out
    saved = max((directory / "checkpoints").glob("ckpt-s*"))  # a tick may have saved one before it
    again = project.start(
        "tiny.xtrain", "--ui", "plain", "--set", "checkpoint.keep=none", "--set", "experiment.budget=90 steps"
    )
    out, err = again.communicate(timeout=240)
    assert again.returncode == 0 and f"resumed at step {int(saved.name[6:])}" in out, out + err


def test_the_plan_of_a_copied_run_is_run_in_the_copy(tmp_path):
    project = Project(tmp_path)
    directory = project.run(
        project.spec(steps=6, more="every 2 steps checkpoint"), "--set", "launch.stop_after=4 steps", expect=75
    )
    shutil.copytree(directory, tmp_path / "copy")
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    command = project.start("copy/plan.json", "--ui", "plain")
    out, err = command.communicate(timeout=240)
    assert f"the plan in the run directory {tmp_path}/copy is used instead of" in err, out + err
    assert command.returncode == 0, out + err
    assert before == {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    command = project.start(str(directory / "plan.json"), "--ui", "plain")
    out, err = command.communicate(timeout=240)
    assert "the plan in the run directory" not in err, out + err
