"""Ranks that die in real runs, which `xtrain run` starts again: what comes out is what an unbroken run gives."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from checkpoints import folder, same
from forking import ForkedCommand
from live_runs import gone, wait_for_step, workers
from projects import Project, curve, events, records, worst
from saboteur import AT_SAVE, AT_SETUP, AT_STEP, environment, sabotage

EVERY = "every 4 steps checkpoint\n"
PRECISE = "precision { params = fp64 }\n"


def more(settings: str, rest: str = "") -> str:
    return f"{EVERY}fault_tolerance {{ {settings} }}\n{rest}"


def run(
    project: Project, *arguments: str, expect: int = 0, root: str = "runs", forked: bool = False
) -> tuple[Path, str]:
    """The command with the sabotage of the project; its directory and what it printed.

    forked: its processes are, in which the change of a module comes after others have imported from it.
    """
    arguments = (*arguments, "--ui", "plain", "--set", f"workspace.root={root}")
    if forked:
        process = ForkedCommand(["run", *arguments], project.folder, environment(project))
        out, err = process.communicate(timeout=240)
        assert process.returncode == expect, out + err
        return project.directory(root), out + err
    command = project.command("run", *arguments)
    done = subprocess.run(
        command, cwd=project.folder, env=environment(project), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return project.directory(root), done.stdout + done.stderr


def unbroken(project: Project, *arguments: str) -> Path:
    (project.folder / "sitecustomize.py").unlink(missing_ok=True)
    return project.run(*arguments, root="unbroken")


def assert_same(broken: Path, whole: Path) -> None:
    assert curve(broken) == curve(whole)
    ours, theirs = (folder(directory).latest() for directory in (broken, whole))
    assert ours is not None and theirs is not None and ours.step == theirs.step
    assert same(ours.path, theirs.path), "weights and moments, bit for bit"


@pytest.mark.parametrize("world", ["2", pytest.param("4", marks=pytest.mark.slow)])
def test_a_run_whose_rank_dies_ends_by_itself_as_if_nothing_had_happened(project, world):
    spec = project.spec(steps=12, more=more("restarts = 2"))
    sabotage(project, AT_STEP, rank=1, step=7)
    broken, out = run(project, spec, "--world", world, forked=True)
    (restart,) = events(broken, "restart")
    assert (restart["number"], restart["step"], restart["world"]) == (1, 4, int(world))
    assert "restart  step 4  1 of 2  rank 1 was killed by SIGKILL; continues from step 4" in out
    assert [e["attempt"] for e in events(broken, "run_start")] == [1, 2]
    assert len(events(broken, "run_end")) == 1 and len(list((broken / "logs").glob("2*"))) == 2
    assert out.count("step 3/12") == 1, "steps that stay are shown once"
    assert_same(broken, unbroken(project, spec, "--world", world))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_rank_that_dies_while_it_saves_costs_no_more_than_that_save(project, rank, mode):
    spec = project.spec(steps=12, more=more("restarts = 2", f"checkpoint {{ mode = {mode} }}\n"))
    sabotage(project, AT_SAVE, rank=rank)
    broken, _ = run(project, spec, "--world", "2")
    (restart,) = events(broken, "restart")
    assert restart["step"] == 4
    assert not [path for path in (broken / "checkpoints").iterdir() if path.name.endswith(".partial")]
    assert_same(broken, unbroken(project, spec, "--world", "2"))


@pytest.mark.slow
def test_the_second_death_is_survived_as_the_first(project):
    spec = project.spec(steps=12, more=more("restarts = 2"))
    sabotage(project, AT_STEP, rank=0, starts=(0, 1), step=10)
    broken, _ = run(project, spec, "--world", "2")
    assert [e["step"] for e in events(broken, "restart")] == [8, 8]
    assert_same(broken, unbroken(project, spec, "--world", "2"))


@pytest.mark.slow
def test_a_run_begun_anew_goes_on_from_its_own_checkpoint_after_a_death(project):
    """`checkpoint.resume = false` speaks of what an earlier command has left."""
    spec = project.spec(steps=12, more=more("restarts = 1", "checkpoint { resume = false }\n"))
    sabotage(project, AT_STEP, rank=1, step=7)
    broken, _ = run(project, spec, "--world", "2")
    assert events(broken, "run_start")[1]["resumed_step"] == 4
    assert_same(broken, unbroken(project, spec, "--world", "2"))


@pytest.mark.slow
def test_restarts_that_are_used_up_end_the_run_with_a_report(project):
    spec = project.spec(steps=12, more=more("restarts = 1"))
    sabotage(project, AT_STEP, rank=1, starts=(0, 1, 2), step=7)
    directory, out = run(project, spec, "--world", "2", expect=1)
    assert "given up after 2 starts: all restarts are used up" in out
    assert out.count("rank 1 was killed by SIGKILL") == 3  # the restart, and both starts of the report
    assert gone(directory, 5)
    (project.folder / "sitecustomize.py").unlink()
    again, _ = run(project, spec, "--world", "2")
    assert_same(again, unbroken(project, spec, "--world", "2"))


@pytest.mark.slow
def test_a_rank_that_dies_twice_at_the_same_place_is_left_out(project):
    spec = project.spec(steps=12, more=more("restarts = 3, elastic = 1..4", PRECISE))
    sabotage(project, AT_STEP, rank=3, starts=(0, 1, 2, 3), step=7)
    broken, out = run(project, spec, "--world", "4")
    assert [e["world"] for e in events(broken, "restart")] == [4, 2]
    assert "continues from step 4 on 2 ranks" in out
    whole = unbroken(project, spec, "--world", "4")
    assert [m["tokens"] for m in _metrics(broken)] == [m["tokens"] for m in _metrics(whole)]
    assert max(worst(curve(broken), curve(whole))) < 1e-10


def _metrics(directory: Path) -> list[dict]:
    return [record for record in records(directory, "metrics") if "loss" in record]


@pytest.mark.slow
def test_a_fault_in_set_up_is_tried_three_times(project):
    spec = project.spec(steps=12, more=more("restarts = 9"))
    sabotage(project, AT_SETUP, rank=1, starts=tuple(range(10)))
    directory, out = run(project, spec, "--world", "2", expect=1)
    assert len(events(directory, "restart")) == 2
    assert "this rank does not come up" in out and "a restart would fail in the same way" in out


@pytest.mark.slow
def test_a_fault_in_set_up_that_passes_does_not_matter(project):
    spec = project.spec(steps=12, more=more("restarts = 9"))
    sabotage(project, AT_SETUP, rank=1)
    broken, _ = run(project, spec, "--world", "2")
    assert_same(broken, unbroken(project, spec, "--world", "2"))


def _begun(project: Project, spec: str) -> subprocess.Popen:
    command = project.command("run", spec, "--world", "2", "--ui", "plain")
    return subprocess.Popen(
        command,
        cwd=project.folder,
        env=environment(project),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_for_restart(project: Project) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        for path in (project.folder / "runs").glob("tiny/*/events.jsonl"):
            if '"event":"restart"' in path.read_text():
                return
        time.sleep(0.02)
    raise AssertionError("there was no restart")


@pytest.mark.slow
@pytest.mark.parametrize("later", [0.0, 1.5])
def test_a_stop_request_during_a_restart_stops_the_run_and_it_goes_on_later(project, later):
    """In the pause before the next start, and while its ranks are coming up."""
    spec = project.spec(steps=12, more=more("restarts = 2"))
    sabotage(project, AT_STEP, rank=1, step=7)
    process = _begun(project, spec)
    _wait_for_restart(project)
    time.sleep(later)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, out + err
    assert "Traceback" not in out + err
    directory = project.directory()
    assert gone(directory, 5)
    assert [e["status"] for e in events(directory, "run_end")] == ["stopped"]
    (project.folder / "sitecustomize.py").unlink()
    again, _ = run(project, spec, "--world", "2")
    assert_same(again, unbroken(project, spec, "--world", "2"))


@pytest.mark.slow
def test_ranks_of_a_second_start_do_not_outlive_a_killed_launcher(project):
    spec = project.spec(steps=4000, more=more("restarts = 2"))
    sabotage(project, AT_STEP, rank=1, step=3)
    process = _begun(project, spec)
    _wait_for_restart(project)
    wait_for_step(project, process, 8)
    directory = project.directory()
    assert len(workers(directory)) == 2
    process.kill()
    process.communicate()
    assert gone(directory, 30)


@pytest.mark.slow
def test_a_stopped_rank_is_swept_away_before_the_next_start(project):
    """One rank is frozen, the other one killed: the agent waits for the frozen one in vain."""
    spec = project.spec(steps=60, more=more("restarts = 2", "every 1 step eval lines { batches = 20 }\n"))
    process = _begun(project, spec)
    wait_for_step(project, process, 6)
    directory = project.directory()
    ranks = {
        next(v for v in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if v.startswith(b"RANK=")): pid
        for pid in workers(directory)
    }
    os.kill(ranks[b"RANK=0"], signal.SIGSTOP)
    os.kill(ranks[b"RANK=1"], signal.SIGKILL)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    assert gone(directory, 5) and len(events(directory, "restart")) == 1
    assert not Path(f"/proc/{ranks[b'RANK=0']}").exists()


def under_torchrun(project: Project, ranks: int, *arguments: str) -> tuple[Path, str]:
    command = project.command("run", *arguments, "--ui", "plain")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1")
    command[2:3] = (*torchrun, "-m", "xtrain")
    done = subprocess.run(
        command, cwd=project.folder, env=environment(project), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return project.directory(), done.stdout + done.stderr


@pytest.mark.slow
def test_torchrun_starts_a_run_again_and_it_goes_on(project):
    spec = project.spec(steps=12, more=more("restarts = 0", "checkpoint { resume = false }\n"))
    sabotage(project, AT_STEP, rank=1, step=7)
    broken, _ = under_torchrun(project, 2, spec, "--world", "2")
    assert [e["resumed_step"] for e in events(broken, "run_start")] == [None, 4]
    assert_same(broken, unbroken(project, spec, "--world", "2"))


@pytest.mark.slow
def test_torchrun_may_start_any_world_of_the_range_and_no_other(project):
    spec = project.spec(steps=6, more=more("restarts = 0, elastic = 1..4", PRECISE))
    fewer, _ = under_torchrun(project, 2, spec)
    (start,) = events(fewer, "run_start")
    assert start["world_size"] == 2
    assert max(worst(curve(fewer), curve(unbroken(project, spec)))) < 1e-10
    with pytest.raises(AssertionError, match="X703"):
        under_torchrun(project, 3, spec)
