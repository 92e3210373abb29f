"""What pages show of a command's output is what it prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from xtrain.planner.load import plan_from_spec
from xtrain.planner.review.resumable import resumable

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DIFF = (ROOT / "docs" / "diff.md").read_text(encoding="utf-8")
SPECS = ROOT / "specs"
# What the README does not show of the spec with three mistakes.
FIRST = """experiment first { budget = 200 stpes }
model qwen3 { dim = 192, layers = 4, heads = 6 }
tokenizer bytes
dataset lines { source = python_stdlib() }
batch { sequence = 512 }


optimizer adamw { lr = 3e-3, wieght_decay = 0.1 }
scheduler cosine { warmup = 2 min }
"""


def words(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def shown(command: str) -> list[str]:
    """The lines below a command in a block of the README, but for those left out."""
    block = re.search(rf"^\$ {re.escape(command)}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert block is not None, command
    return [line for line in words(block[1]) if line != "…"]


def printed(folder: Path, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", "xtrain", *arguments]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return words(found.stdout + found.stderr)


def test_mistakes_are_reported_as_the_readme_shows(tmp_path):
    (tmp_path / "first.xtrain").write_text(FIRST)
    assert printed(tmp_path, "check", "first.xtrain") == shown("xtrain check first.xtrain")


@pytest.mark.parametrize(("said", "change"), [
    ("| rows of a step", "batch.rows=64"),
    ("micro against accumulate", "batch.micro=2"),
    ("learning rate, scheduler", "optimizer.lr=1e-4"),
    ("`init_std`", "model.init_std=0.2"),
    ("parameters to a wider format", "precision.params=fp64"),
    ("parameters to a narrower format", "precision.params=bf16"),
    ("`sequence`, `align`", "batch.sequence=128"),
    (", seed |", "experiment.seed=9"),
    ("shapes or names", "model.layers=5"),
    ("what weights mean", "model.rope_theta=5000"),
    ("sizes of axes", "parallel.fsdp=2"),
    ("budget with a constant learning rate", "every.checkpoint=50 steps"),
    ("files, field or hold-out", "dataset.stdlib.holdout=10%"),
])  # fmt: skip
def test_the_table_of_diff_says_what_the_verdict_is(said, change):
    (row,) = [line for line in DIFF.splitlines() if line.startswith("|") and said in line]
    promised = row.split("|")[2].strip()
    a, b = plan_from_spec(SPECS / "quickstart.xtrain").plan, plan_from_spec(SPECS / "quickstart.xtrain", [change]).plan
    assert a is not None and b is not None
    verdict = resumable(a, b)
    assert promised.startswith(verdict.kind), verdict
    effect = "no effect" if verdict.effect == "none" else verdict.effect
    assert verdict.kind != "safe" or effect in promised, verdict
