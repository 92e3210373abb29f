"""What torch computes in the first step of a process is what it computes in later ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SPEC = """experiment first { budget = 2 steps }
model llama { dim = 32, layers = 2, heads = 2, ffn = 48 }
tokenizer bytes
dataset made { source = synthetic(documents = 10) }
batch { sequence = 64, rows = 2 }
optimizer adamw { lr = 1e-3 }
launch { device = cpu }
"""
# Twice the same, by two threads: only the first call may find MKL's vector functions without an accuracy.
FIRST = """
import os
from pathlib import Path
import torch
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.loop.executor import Executor
plan = plan_from_spec(Path("first.xtrain")).plan
Executor(plan, Path("run"), rank=0)._set_up(0.0)
x = (torch.arange(1 << 17) % 257).double()
print(torch.get_num_threads(), float((x.cos() - x.cos()).abs().max()), flush=True)
os._exit(0)
"""
STARTS = 12  # of which three in ten had another cosine where nothing was called before


@pytest.mark.slow
def test_two_threads_compute_the_same_cosines_from_the_first_call_on(tmp_path: Path):
    (tmp_path / "first.xtrain").write_text(SPEC)
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    for _ in range(STARTS):
        command = [sys.executable, "-c", FIRST]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "2 0.0"
