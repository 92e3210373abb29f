"""Checkpoints that DeepSpeed's engine has saved, put together as its own script does it, and read as models."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from xtrain.cli.main import main
from xtrain.dsl.checking.model_folder import settings_in_folder

pytestmark = pytest.mark.slow
pytest.importorskip("deepspeed")
PROGRAM = Path(__file__).parents[1] / "support" / "deepspeed_program.py"


@pytest.mark.parametrize(
    ("stage", "ranks", "more"),
    [(0, 1, ()), (2, 3, ()), (3, 3, ("tied",)), (1, 2, ("tied",))],
)
def test_they_are_put_together_as_by_its_own_script(tmp_path, stage, ranks, more):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from transformers import AutoModelForCausalLM

    saved, model = tmp_path / "ds", tmp_path / "ds-model"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command += [str(PROGRAM), str(stage), str(saved), *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert main(["checkpoint", "convert", str(saved), "--like", str(model), "--to", str(tmp_path / "out")]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    if stage:
        expected = get_fp32_state_dict_from_zero_checkpoint(str(saved))
        expected = {name: each for name, each in expected.items() if more == () or name != "lm_head.weight"}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], each) for name, each in expected.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert all(torch.equal(loaded.state_dict()[name], each) for name, each in found.items())
    means, diagnostics = settings_in_folder(str(tmp_path / "out"))
    assert not diagnostics.has_errors and means
