"""Benchmarks that others are told to run: that every part of them runs, at toy size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def ended(name: str, *arguments: str, folder: Path) -> str:
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_part_of_the_day_on_a_gpu_runs_on_a_cpu(tmp_path):
    ended("gpu_day.py", "all", "--dry", "--minutes", "35", "--out", "day.json", folder=tmp_path)
    found = json.loads((tmp_path / "day.json").read_text())
    runs, parts = (
        ("goal", "full", "fp8"),
        {"smoke", "attention", "updates", "right", "breaks", "tests", "memory", "more"},
    )
    parts |= set(runs)
    assert set(found) == {"about", "calibration", *parts}
    trials = {f"{part}: {name}": trial for part in parts for name, trial in found[part].items()}
    assert not {name for name, trial in trials.items() if "failed" in trial}
    skipped = {name for name, trial in trials.items() if "skipped" in trial}
    of_cuda = ("varlen", "fp8")
    assert skipped <= {name for name in trials if "transformers" in name or name.endswith(of_cuda)}
    trained = [trial for name, trial in trials.items() if name.startswith(("smoke", "more: features"))]
    assert trained and all(trial["falls"] and trial["graph_breaks"] == 0 for trial in trained)
    assert found["right"]["resumed"]["bit_for_bit"]
    assert found["right"]["beside_the_cpu: fp32"]["most_apart"] == 0
    signalled = [found["breaks"][f"{name}, and the same command again"] for name in ("SIGINT", "SIGKILL")]
    assert [trial["every_step_once"] for trial in signalled] == [True, True]
    codes = {trial["exit_code"] for trial in found["breaks"].values() if "said" in trial}
    assert codes and codes <= {1, 3}
    assert found["more"]["experts: grouped"]["apart"] < 0.02
    assert found["updates"]["optimizers: AdamW, fused"]["apart"] == 0
    assert found["attention"]["products: bf16"]["tflops"] > 0
    for trial in (trial for part in (*runs, "memory") for trial in found[part].values()):
        assert trial["memory"]["states_of_planned"] == 1 and trial["of_planned_step"] > 0
        assert trial["memory"]["held"].get("other", 0) < 10_000, "of the run before"
    assert all(len(trial["kernels"]) == 10 for trial in found["goal"].values())


def test_a_step_and_those_of_other_trainers_give_the_same_losses(tmp_path):
    lines = ended("peers.py", "--sizes", "tiny", "--steps", "60", "--turns", "1", folder=tmp_path).splitlines()
    found = json.loads(lines[-1])
    assert found["agree"] and {"xtrain", "same", "plain", "trainer"} <= set(found["sides"])
    assert all(side["wall"] > 0 for side in found["sides"].values())
