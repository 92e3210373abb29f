"""A run in a real Slurm of two machines: submitted, stopped before its time limit, requeued, gone on with, and in the
end the same as a run that was never stopped; and a sweep whose trials are elements of arrays."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import slurm

from xtrain.records.sweep import SweepState

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(slurm.found() is None, reason="Slurm is not installed"),
]

SPEC = """experiment "it's queued" {{ seed = 1, budget = {steps} steps }}
model llama {{ dim = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48 }}
tokenizer bytes
dataset lines {{ source = text("*.txt") }}
batch {{ sequence = 64, rows = 8 }}
optimizer adamw {{ lr = 1e-3 }}
every 1 steps log
launch {{ device = cpu, stop_deadline = 20 s, {launch} }}
launcher slurm {{ partition = "tiny", time = 2 min, warn = 30 s, cpus = 2, requeues = 20 }}
"""
SWEEP = """
every 2 steps eval lines {{ batches = 2 }}
every 2 steps checkpoint
sweep {{
  optimizer.lr in log(1e-4, 1e-1)
  method asha {{ first = 2 steps, suggest = random }}
  trials = 4, parallel = 2, retries = 5
  objective = eval.lines.loss
}}
"""
KILLS = 5
PATIENCE_SECONDS = 600


def xtrain(*arguments: str, environment: dict[str, str], code: int = 0) -> str:
    command = [sys.executable, "-m", "xtrain", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def wait_for(what: Callable[[], bool], report: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not what():
        assert time.monotonic() < deadline, report()
        time.sleep(0.5)


def events(directory: Path, kind: str) -> list[dict]:
    if not (directory / "events.jsonl").exists():
        return []
    found = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [each for each in found if each["event"] == kind]


def losses(directory: Path) -> dict[int, float]:
    found = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {each["step"]: each["loss"] for each in found if "loss" in each}


def test_a_run_that_outlives_its_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("".join(f"line {number} of {number * 7919 % 1000}\n" for number in range(3000)))
    (tmp_path / "two.xtrain").write_text(SPEC.format(steps=100_000, launch="nodes = 2, ranks_per_node = 1"))
    with slurm.running(tmp_path / "slurm") as environment:
        assert "nothing found" in subprocess.run(
            ["srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-m", "xtrain", "doctor", "two.xtrain"],
            env=environment, capture_output=True, text=True, timeout=300,
        ).stdout  # fmt: skip
        xtrain("launch", "two.xtrain", environment=environment)
        (job_file,) = tmp_path.glob("runs/*/launch/*/job.json")
        directory = job_file.parents[2] / job_file.parent.name
        job = json.loads(job_file.read_text())["id"]

        def said() -> str:
            output = job_file.parent / f"slurm-{job}.out"
            return "\n".join(output.read_text().splitlines()[-40:]) if output.exists() else "no output yet"

        def row() -> dict:
            return json.loads(xtrain("runs", "--json", environment=environment).splitlines()[0])

        def requeue_at_once() -> None:
            """Slurm lets two minutes pass before a job that was put back begins."""
            subprocess.run(
                ["scontrol", "update", f"JobId={job}", "StartTime=now"], env=environment, capture_output=True
            )

        def stopped() -> bool:
            """By its time limit, after its first step: on a busy machine the first start may not come that far."""
            requeue_at_once()
            return any(each["step"] > 0 for each in events(directory, "run_end"))

        wait_for(stopped, said)
        end = events(directory, "run_end")[-1]
        assert end["status"] == "stopped" and "sigusr1" in end["reason"], said()
        wait_for(lambda: row()["state"].startswith("PENDING"), said)
        assert row()["status"] == "stopped, waiting" and row()["step"] == end["step"]
        starts = len(events(directory, "run_start"))
        requeue_at_once()
        wait_for(lambda: len(events(directory, "run_start")) > starts, said)
        wait_for(lambda: max(losses(directory)) > end["step"] + 5, said)
        assert row()["status"] == "training" and row()["state"] == "RUNNING"
        xtrain("control", str(directory), "stop", environment=environment)
        wait_for(lambda: row()["state"] == "gone" or row()["state"].startswith("FAILED"), said)
        assert row()["status"] == "stopped", "a run that was stopped by hand is no requeues"
    last = max(losses(directory))
    assert list(losses(directory)) == list(range(1, last + 1)) and last > end["step"]
    # The same without a stop, on one machine.
    shutil.copytree(tmp_path / "runs" / "cache", tmp_path / "whole" / "cache", dirs_exist_ok=True)
    launch = f"ranks_per_node = 2, stop_at = {last} steps"
    (tmp_path / "one.xtrain").write_text(SPEC.format(steps=100_000, launch=launch))
    xtrain("run", "one.xtrain", "--set", 'workspace.root="whole"', "--set", 'workspace.run="one"',
           environment=dict(os.environ), code=75)  # fmt: skip
    (whole,) = tmp_path.glob("whole/*/one")
    assert losses(whole) == losses(directory)


def test_replica_groups_outlive_the_launcher_of_a_machine(tmp_path, monkeypatch):
    """It is started again, and its group comes back; the job ends as the run does."""
    pytest.importorskip("torchft")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("".join(f"line {number} of {number * 7919 % 1000}\n" for number in range(3000)))
    groups = "parallel { stack = torchft, torchft { replicas = 2, heartbeat = 1 s } }\n"
    spec = SPEC.format(steps=100_000, launch="nodes = 2, ranks_per_node = 1").replace("time = 2 min", "time = 20 min")
    (tmp_path / "groups.xtrain").write_text(spec + groups)
    with slurm.running(tmp_path / "slurm") as environment:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
        xtrain("launch", "groups.xtrain", environment=environment)
        (job_file,) = tmp_path.glob("runs/*/launch/*/job.json")
        directory = job_file.parents[2] / job_file.parent.name

        def said() -> str:
            return "\n".join(path.read_text()[-3000:] for path in job_file.parent.glob("slurm-*.out"))

        def took_part() -> list[list[int]]:
            return [each["taking_part"] for each in events(directory, "replicas")]

        wait_for(lambda: took_part() == [[0, 1]], said)
        os.kill(launcher_of(directory, 1), signal.SIGKILL)
        wait_for(lambda: took_part() == [[0, 1], [0], [0, 1]], said)
        xtrain("control", str(directory), "stop", environment=environment)
        wait_for(lambda: bool(events(directory, "run_end")), said)
        job = json.loads(job_file.read_text())["id"]

        def ended() -> str:
            shown = subprocess.run(["scontrol", "show", "job", job], env=environment, capture_output=True, text=True)
            return shown.stdout

        wait_for(lambda: "JobState=FAILED" in ended() and "ExitCode=75:0" in ended(), ended)
    last = max(losses(directory))
    assert list(losses(directory)) == list(range(1, last + 1))


def launcher_of(directory: Path, rank: int) -> int:
    """The process that has started a rank."""
    beat = json.loads((directory / "ranks" / f"{rank:05d}.beat").read_bytes())
    return int(Path(f"/proc/{beat['pid']}/stat").read_text().rpartition(")")[2].split()[1])


def outcome(root: Path) -> list[tuple]:
    (folder,) = root.glob("*-sweep-*")
    return [
        (each.number, each.name, each.values, each.decisions, each.value, each.trained, each.status)
        for each in SweepState.read(folder).trials.values()
    ]


def test_a_sweep_of_trials_on_two_machines_whose_driver_is_killed(tmp_path, monkeypatch):
    """Jobs outlive it, are taken over, and a rank that is killed goes on: as a sweep that trains on this machine."""
    monkeypatch.chdir(tmp_path)
    for part in range(40):
        lines = (f"line {number} of {number * 7919 % 1000}\n" for number in range(part * 50, part * 50 + 50))
        (tmp_path / f"{part}.txt").write_text("".join(lines))
    for name, launch in (("one", "ranks_per_node = 2"), ("two", "nodes = 2, ranks_per_node = 1")):
        text = SPEC.format(steps=18, launch=launch).replace('text("*.txt")', 'text("*.txt"), holdout = 10%')
        text = text.replace("time = 2 min, warn = 30 s, cpus = 2", "time = 20 min, cpus = 1, memory = 500 MiB")
        (tmp_path / f"{name}.xtrain").write_text(text + SWEEP.format())
    xtrain("run", "one.xtrain", "--set", 'workspace.root="whole"', environment=dict(os.environ))
    draw = Random(1)
    with slurm.running(tmp_path / "slurm") as environment:
        environment["PYTHONUNBUFFERED"] = "1"
        command = [sys.executable, "-m", "xtrain", "launch", "two.xtrain"]
        for kill in range(KILLS):
            driver = subprocess.Popen(command, env=environment)
            time.sleep(draw.uniform(4, 12))
            driver.kill()
            driver.wait()
            if kill == KILLS // 2:
                for number in draw.sample(ranks := _processes_of(f"{tmp_path}/runs"), min(2, len(ranks))):
                    with suppress(ProcessLookupError):
                        os.kill(number, signal.SIGKILL)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        said = xtrain("runs", "--json", environment=environment)
    rows = [json.loads(line) for line in said.splitlines()]
    assert len(rows) == 4 and all(row["job"].startswith("slurm ") for row in rows)
    assert outcome(tmp_path / "runs") == outcome(tmp_path / "whole")


def _processes_of(word: str) -> list[int]:
    found = []
    for each in Path("/proc").iterdir():
        with suppress(OSError):
            if each.name.isdecimal() and word.encode() in (each / "cmdline").read_bytes():
                found.append(int(each.name))
    return found
