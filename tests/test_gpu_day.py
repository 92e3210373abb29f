"""What `benchmarks/gpu_day.py` is to run on a GPU: that each of its specs has a plan, here and there."""

import sys
from pathlib import Path

import pytest

from xtrain.planner.load import plan_from_text

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def day(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield __import__("gpu_day")
    sys.modules.pop("gpu_day")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_run_of_the_day_has_a_plan(day, device, tmp_path):
    for name, (model, more) in day.FEATURES.items():
        text = day.spec_text(model, more, steps=2, sequence=128, device=device)
        compiled = plan_from_text(text, str(tmp_path / "s.xtrain"), [], world=1)
        assert compiled.plan is not None, f"{name}: {compiled.diagnostics.render(color=False)}"
