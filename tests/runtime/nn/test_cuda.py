"""What only a CUDA device can show; run with `pytest -m gpu` on a machine that has one."""

import subprocess
import sys

import pytest
import torch

from xtrain.runtime.nn.attention import KERNELS, with_block_masks
from xtrain.runtime.nn.attention_blocks import PLAIN
from xtrain.runtime.nn.batch import DocumentLayout

pytestmark = pytest.mark.gpu

SPEC = """
experiment gpu {{ budget = 20 steps }}
model qwen3 {{ dim = 256, layers = 2, heads = 4, kv_heads = 2, ffn = 512, init_std = 0.05 }}
tokenizer bytes
dataset stdlib {{ source = python_stdlib(), holdout = 5% }}
batch {{ sequence = 512, micro = 2, rows = 8 }}
optimizer adamw {{ lr = 1e-3 }}
precision {{ params = fp32, compute = {compute} }}
launch {{ device = {device} }}
every 1 step log
on finish eval stdlib {{ batches = 4 }} then generate {{ prompts = ["def "], tokens = 8 }}
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_is_masked_attention_forward_and_backward(dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    bounds = torch.tensor([0, 256, 300, 449, 512], dtype=torch.int32)
    layout = DocumentLayout.from_lengths(bounds, 2, 256, torch.device("cuda"))
    packing = with_block_masks(layout, ((PLAIN, False),))
    assert packing.block_masks
    grads = {}
    for name in ("flex", "mask"):
        generator.manual_seed(0)
        tensors = [
            torch.randn(2, heads, 256, 64, device="cuda", dtype=dtype, generator=generator).requires_grad_()
            for heads in (4, 2, 2)
        ]
        out = KERNELS[name](*tensors, packing)
        out.float().square().sum().backward()
        grads[name] = [out, *(t.grad for t in tensors)]
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-3
    for a, b in zip(grads["flex"], grads["mask"], strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_run_on_cuda_follows_the_run_on_cpu(tmp_path, compute):
    import json

    curves = {}
    for device in ("cpu", "cuda"):
        (tmp_path / device).mkdir()
        (tmp_path / device / "s.xtrain").write_text(SPEC.format(compute=compute, device=device))
        command = [sys.executable, "-m", "xtrain", "run", "s.xtrain", "--ui", "plain"]
        done = subprocess.run(command, cwd=tmp_path / device, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        (metrics,) = (tmp_path / device / "runs").rglob("metrics.jsonl")
        curves[device] = [r["loss"] for r in map(json.loads, metrics.read_text().splitlines()) if "loss" in r]
    # Each device draws other initial weights, so only the level is the same.
    assert curves["cuda"][-1] == pytest.approx(curves["cpu"][-1], rel=0.1)
