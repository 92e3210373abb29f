"""docs/accuracy.md is what benchmarks/accuracy.py writes, and says as much as it claims."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def accuracy():
    spec = importlib.util.spec_from_file_location("accuracy", ROOT / "benchmarks/accuracy.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(accuracy):
    assert (ROOT / "docs/accuracy.md").read_text(encoding="utf-8") == accuracy.page()


def test_memory_of_most_published_runs_is_foreseen(accuracy):
    rows = [*accuracy.titan_rows(), *accuracy.kempner_rows()]
    ratios = [accuracy.predicted(row, accuracy.planned(row)) / row.measured for row in rows]
    assert sum(abs(ratio - 1) <= 0.15 for ratio in ratios) >= 12


def test_the_head_in_fp32_is_foreseen(accuracy):
    for head in accuracy.HEAD_ROWS:
        if head.params == "fp32" and head.low == head.high:
            assert abs(head.predicted / head.low - 1) < 0.02
