"""`precision { deterministic = true }`: a run whose algorithms give the same numbers each time."""

import os

import pytest
import torch

from xtrain.planner.load import plan_from_text
from xtrain.planner.review.resumable import resumable
from xtrain.runtime.loop.executor import Executor

SPEC = """
experiment same {{ seed = 1, budget = 3 steps }}
model qwen3_moe {{ dim = 32, layers = 2, heads = 2, experts = 4, experts_per_token = 2, expert_ffn = 16 }}
tokenizer bytes
dataset made {{ source = synthetic(documents = 50, length = 40) }}
batch {{ sequence = 64, micro = 2 }}
optimizer adamw {{ lr = 1e-3 }}
precision {{ deterministic = {deterministic} }}
launch {{ device = {device} }}
on finish generate {{ prompts = ["a"], tokens = 4, top_p = 0.9 }}
every 1 step log
checkpoint {{ enabled = false }}
"""


def planned(deterministic="true", device="cpu"):
    found = plan_from_text(SPEC.format(deterministic=deterministic, device=device), "same.xtrain")
    assert found.plan is not None, found.diagnostics.render()
    return found.plan


def metrics(plan, folder):
    assert Executor(plan, folder, rank=0).run() == "done"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [[word for word in line.split(",") if '"loss"' in word or '"grad_norm"' in word] for line in lines]


def test_a_plan_shows_it_and_a_run_goes_on_with_it():
    plan, other = planned(), planned("false")
    node = plan.node("setup.deterministic")
    assert node.args == {"workspaces": ":4096:8"} and "use deterministic algorithms" in node.does
    assert "CUDA" not in node.does and "CUDA" in planned(device="cuda").node("setup.deterministic").does
    assert "setup.deterministic" not in {each.id for each in other.nodes}
    for one, two in ((plan, other), (other, plan)):
        (reason,) = resumable(one, two).reasons
        assert (reason.kind, reason.path, reason.effect) == ("safe", "precision.deterministic", "rounding")


def test_a_run_takes_algorithms_that_are_the_same_each_time(tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    plain = metrics(planned("false"), tmp_path / "plain")
    assert not torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    same = metrics(planned(), tmp_path / "same")
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert len(same) == 3 and same == plain  # those of a CPU are the same each time


@pytest.mark.gpu
def test_a_run_on_a_gpu_repeats_itself(tmp_path):
    once, again = (metrics(planned(device="cuda"), tmp_path / name) for name in ("once", "again"))
    assert len(once) == 3 and once == again
