"""Real runs that are stopped or asked from outside: through their launcher, through one rank, while being set up."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from commands import xtrain
from live_runs import gone, slow_set_up, wait_for_slow_set_up, wait_for_step, workers
from projects import Project, curve, events, records

from xtrain.runtime.jobs.launch import ranks_of

SLOW = pytest.mark.slow
LONG = {"steps": 4000}
# Minutes of work, though the model may end a single text at any token.
ENDLESS = "generate { prompts = [" + '"line", ' * 8000 + "], tokens = 400 }"


def of_rank(directory: Path, rank: int) -> int:
    """The process of a rank."""
    word = f"\0RANK={rank}\0".encode()
    return next(p for p in workers(directory) if word in Path(f"/proc/{p}/environ").read_bytes())


def control(project: Project, *arguments: str) -> tuple[int, str]:
    done = xtrain("control", "runs", *arguments, cwd=project.folder)
    return done.returncode, done.stdout + done.stderr


def start_slowly(project: Project) -> subprocess.Popen:
    slow_set_up(project)
    environment = {**project.environment, "PYTHONPATH": str(project.folder)}
    command = project.command("run", project.spec(steps=20), "--world", "2", "--ui", "plain")
    process = subprocess.Popen(
        command, cwd=project.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for_slow_set_up(project)
    return process


def test_a_live_run_is_asked_from_another_process(project):
    process = project.start(project.spec(**LONG), "--world", "2", "--ui", "plain")
    wait_for_step(project, process, 2)
    code, said = control(project, "pause")
    assert code == 0 and "done  pause" in said, said
    directory = project.directory()
    # A second Ctrl-C, and a restart, find them by their command.
    assert sorted(ranks_of(directory.relative_to(project.folder), process.pid)) == sorted(workers(directory))
    before = len(records(directory, "metrics"))
    code, said = control(project, "save", "--json")
    assert code == 0 and len(records(directory, "metrics")) == before, said
    assert control(project, "pause")[0] == 1 and control(project, "eval", "nothing")[0] == 1
    assert control(project, "resume")[0] == 0
    code, said = control(project, "stop")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75 and code == 0 and "Traceback" not in out + err, out + err + said
    saved = [event["step"] for event in events(directory, "checkpoint")]
    assert saved[-1] == curve(directory)[-1][0] and len(saved) == 2
    assert gone(directory, 5)
    code, said = control(project, "save")
    assert code == 3 and "no rank is running in" in said


@SLOW
@pytest.mark.parametrize("numbers, code", [
    ([signal.SIGUSR1], 75),
    ([signal.SIGHUP], 75),
    ([signal.SIGUSR1, signal.SIGTERM], 75),
    ([signal.SIGTERM, signal.SIGUSR1], 75),
])  # fmt: skip
def test_signals_to_the_launcher_reach_all_ranks(project, numbers, code):
    spec = project.spec(steps=60)
    process = project.start(spec, "--world", "2", "--ui", "plain")
    wait_for_step(project, process, 5)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.02)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in out + err, out + err
    directory = project.directory()
    stopped = curve(directory)[-1][0]
    assert [event["step"] for event in events(directory, "checkpoint")] == [stopped] and gone(directory, 5)
    project.run(spec, "--world", "2")
    assert [step for step, *_ in curve(directory)] == list(range(1, 61))
    assert events(directory, "resumed")[-1]["step"] == stopped


@SLOW
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_is_no_failure_of_it(project, rank):
    process = project.start(project.spec(**LONG), "--world", "2", "--ui", "plain")
    wait_for_step(project, process, 3)
    directory = project.directory()
    os.kill(of_rank(directory, rank), signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75 and not events(directory, "failure"), out + err
    (saved,) = events(directory, "checkpoint")
    assert saved["step"] == curve(directory)[-1][0]


@SLOW
@pytest.mark.parametrize(
    "number, code", [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)], ids=["term", "usr1", "int"]
)
@pytest.mark.parametrize("whom", ["launcher", "rank"])
def test_a_run_that_is_being_set_up_stops_at_once(project, number, code, whom):
    process = start_slowly(project)
    directory = project.directory()
    os.kill(process.pid if whom == "launcher" else of_rank(directory, 1), number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, out + err
    assert not events(directory, "failure") and "Traceback" not in out + err, out + err
    assert events(directory, "run_end")[-1]["exit_code"] == code and gone(directory, 5)


@SLOW
def test_a_second_ctrl_c_ends_the_run_at_once(project):
    process = project.start(project.spec(steps=3, more=f"on finish {ENDLESS}"), "--world", "2", "--ui", "plain")
    wait_for_step(project, process, 3)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and gone(project.directory(), 60), out + err
