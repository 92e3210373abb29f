"""The campaign of kills: that it sees what a kill has spoilt, and, on demand, a few kills of real runs."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from projects import Project
from small_checkpoints import save

from xtrain.runtime.store.checkpoints import CheckpointFolder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def campaign(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("crash_campaign")


def test_pointers_to_what_is_not_intact_are_faults(campaign, tmp_path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 2)
    newest = save(folder, 4, "best")
    assert campaign.spoilt(folder, 2) == ([], 4)
    shard = next(newest.glob("__*"))
    content = shard.read_bytes()
    shard.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    faults, _ = campaign.spoilt(folder, 2)
    assert [fault.partition(":")[0] for fault in faults] == [f"{p} names {newest.name}" for p in ("latest", "best")]
    shard.unlink()
    assert all("is missing" in fault for fault in campaign.spoilt(folder, 2)[0])


def test_a_pointer_before_its_folder_and_one_that_goes_back_are_faults(campaign, tmp_path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 2)
    assert campaign.spoilt(folder, 4) == (["latest has gone from step 4 back to 2"], 2)
    (tmp_path / "latest").write_text("ckpt-s000000000006\n")
    assert "state.json is missing" in campaign.spoilt(folder, 2)[0][0]


def test_results_that_differ_in_one_bit_are_named(campaign):
    ours = {"line 0": {"loss": 1.5}, "latest/a": torch.tensor([1.0, 2.0]), "kept": ["x"]}
    assert campaign.differences(ours, {**ours, "latest/a": torch.tensor([1.0, 2.0])}) == []
    theirs = {"line 0": {"loss": 1.5000000000000002}, "latest/a": torch.tensor([1.0, 2.0000002]), "line 1": {}}
    found = campaign.differences(ours, theirs)
    assert found == [f"{name} differs" for name in ("kept", "latest/a", "line 0", "line 1")]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("options", [("--ranks", "1"), ("--ranks", "2", "--restarts"), ("--ranks", "4")], ids=" ".join)
def test_real_runs_that_are_killed_end_as_if_nothing_had_happened(tmp_path, options):
    script = str(BENCHMARKS / "crash_campaign.py")
    command = [sys.executable, script, "--kills", "8", "--seed", "3", "--folder", str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=Project(tmp_path).environment)
    assert done.returncode == 0, done.stdout + done.stderr
