"""Runs on a device whose tensors are not the CPU's, as those of a GPU: no operator is given tensors of both, and no
code reads memory of the device as if it were the host's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "support" / "second_device_runs.py"


def runs(folder: Path, devices: str, *names: str) -> dict[str, dict[str, list[float]]]:
    """Losses by name and device; in a process of its own, as torch never forgets a device."""
    command = [sys.executable, str(PROGRAM), devices, *names]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def same_on_both(folder: Path, *names: str) -> None:
    for name, curves in runs(folder, "second:0,cpu", *names).items():
        assert len(curves["second"]) == 3, name
        # torch has fast kernels of attention for a CPU, and for a device that it does not know plain ones.
        assert curves["second"] == pytest.approx(curves["cpu"], rel=2e-3), name


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[float]]]:
    return runs(tmp_path_factory.mktemp("second"), "second:0", "sums of both", "texts")


def test_a_run_with_evaluation_texts_and_checkpoints_is_on_its_device(found):
    first, _, last = found["texts"]["second"]
    assert last < first


@pytest.mark.slow
def test_what_a_day_on_a_gpu_runs_is_on_its_device(tmp_path):
    # nothing compiles for this device
    names = ["recomputed", "recomputed in part", "muon", "8-bit states", "bf16 parameters", "adapter on NF4"]
    names += [
        "texts", "experts, bf16", "saved beside training", "averages", "profiled", "fp8", "beside the CPU",
        "interrupted",
    ]  # fmt: skip
    same_on_both(tmp_path, *names)


def test_tensors_of_both_devices_are_seen(found):
    assert found["sums of both"]["second"] == [6.0, 3.0]
